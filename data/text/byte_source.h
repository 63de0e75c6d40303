// Sequential reading of a file, with decompression.
#pragma once

#include "runtime/io/files.h"

// Reads gzip (including multiple members, as written by bgzip and pigz), zstd (including multiple frames) or
// uncompressed files, which it tells apart by their first bytes, not by their names. Memory use does not depend on the
// file size. Fails with Exit::data, naming the file, if the data is damaged or truncated.
class ByteSource {
public:
    explicit ByteSource(const MappedFile& file);

    // Returns the bytes at position(): at least `count`, or fewer at the end of the input. Valid until the next call.
    // For an uncompressed file, returns all remaining bytes; they stay valid while the file is mapped.
    std::string_view peek(size_t count);
    void skip(uint64_t count);  // stops at the end of the input
    uint64_t position() const { return position_; }
    bool is_mapped() const { return !decoder_; }

    class Decoder {
    public:
        virtual ~Decoder() = default;
        // Appends decoded bytes to `out`. Returns false at the end of the input.
        virtual bool decode_more(std::string& out) = 0;
    };

private:
    MappedFile file_;
    std::shared_ptr<Decoder> decoder_;
    std::string buffer_;  // unread decoded bytes start at buffer_begin_
    size_t buffer_begin_ = 0;
    uint64_t position_ = 0;
};

// Decompress one block of known decompressed size, as in Parquet. Return false if the block is damaged or its size
// differs. A size that the format shows to be impossible for the compressed bytes allocates no memory.
bool decompress_gzip(std::string_view bytes, size_t size, std::string& out);
bool decompress_zstd(std::string_view bytes, size_t size, std::string& out);
bool decompress_snappy(std::string_view bytes, size_t size, std::string& out);

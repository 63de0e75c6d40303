// The bytes of a file from its beginning to its end, decompressed on the way.
#pragma once

#include "runtime/io/io.h"

enum class Compression { none, gzip, zstd };

// By the first bytes of the file, whatever its name is.
Compression compression_of(std::string_view first_bytes);

// Reads gzip (also several members, as bgzip and pigz write them), zstd (also several frames) or the bytes themselves,
// in memory that does not grow with the file. Every error is Exit::data and names the file: damaged, or cut short.
class ByteSource {
public:
    explicit ByteSource(const MappedFile& file);

    // The bytes at position(): at least `count` of them, or fewer if the input ends before. Valid until the next call.
    // A file that is not compressed gives all its remaining bytes, and they stay valid as long as the file is mapped.
    std::string_view peek(size_t count);
    void skip(uint64_t count);  // no further than to the end
    uint64_t position() const { return position_; }
    bool is_mapped() const { return !decoder_; }

    class Decoder {
    public:
        virtual ~Decoder() = default;
        // Appends some more bytes to `out`; returns false at the end of the input.
        virtual bool decode_more(std::string& out) = 0;
    };

private:
    MappedFile file_;
    std::shared_ptr<Decoder> decoder_;
    std::string buffer_;  // decoded bytes from buffer_begin_ on
    size_t buffer_begin_ = 0;
    uint64_t position_ = 0;
};

// Decompresses one block whose decompressed size is known, as in Parquet. False if the block is damaged or has another
// size. A false size that the compressed bytes cannot reach takes no memory where the format tells.
bool decompress_gzip(std::string_view bytes, size_t size, std::string& out);
bool decompress_zstd(std::string_view bytes, size_t size, std::string& out);
bool decompress_snappy(std::string_view bytes, size_t size, std::string& out);

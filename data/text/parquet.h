// Reads a flat column of strings from a Parquet file (https://parquet.apache.org/docs/file-format/).
#pragma once

#include <optional>

#include "runtime/io/files.h"

inline constexpr std::string_view kParquetMagic = "PAR1";

// Reads the values of a column in order, one page in memory at a time. Supports required and optional BYTE_ARRAY
// columns, PLAIN and dictionary encoding, data pages of versions 1 and 2, and no compression, Snappy, gzip or zstd.
// Fails with Exit::data, naming the file and the feature, for anything else: nested and repeated columns, other types,
// encodings and codecs, encryption. Validates every length in the file.
class ParquetColumn {
public:
    // Reads the metadata. If the column does not exist, the error lists the columns.
    ParquetColumn(const MappedFile& file, const std::string& column);

    // Returns the next non-null value, valid until the next call; nullopt after the last one.
    std::optional<std::string_view> next();

private:
    struct Chunk {  // the part of the column in a row group
        int32_t codec = 0;
        uint64_t value_count = 0;
        std::string_view pages;
    };
    struct PageHeader {
        int64_t type = -1, uncompressed_bytes = -1, compressed_bytes = -1, value_count = -1, encoding = -1;
        int64_t definition_bytes = -1, repetition_bytes = 0;
        std::optional<int64_t> crc;
        bool is_compressed = true;
    };

    void read_metadata(std::string_view metadata, const std::string& column);
    void read_row_group(class ThriftReader& reader, size_t column_index);
    bool open_page();
    PageHeader read_page_header(class BoundedBytes& bytes) const;
    void read_dictionary(const PageHeader& header, std::string_view content);
    void open_data_page(const PageHeader& header, std::string_view content, std::string_view levels);
    std::string_view decompressed(std::string_view bytes, int64_t size, int32_t codec, std::string& buffer) const;
    std::string_view plain_value();

    MappedFile file_;
    bool is_optional_ = false;
    std::vector<Chunk> chunks_;
    size_t chunk_ = 0;               // the current chunk
    uint64_t chunk_values_ = 0;      // values of the current chunk in the pages read so far
    std::string dictionary_buffer_;  // decompressed
    std::vector<std::string_view> dictionary_;
    bool has_dictionary_ = false;

    // The current data page.
    std::string page_buffer_;  // decompressed
    std::string_view values_;  // PLAIN: the remaining values
    bool is_indexed_ = false;
    std::vector<uint32_t> present_, indices_;  // 1 or 0 per value of an optional column; an index per present value
    size_t page_values_ = 0, value_ = 0, index_ = 0;
};

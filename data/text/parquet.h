// Reading a flat column of strings from a Parquet file (https://parquet.apache.org/docs/file-format/).
#pragma once

#include <optional>

#include "runtime/io/io.h"

inline constexpr std::string_view kParquetMagic = "PAR1";

// Reads the values of a column in order, one page in memory at a time: BYTE_ARRAY columns, required or optional, with
// PLAIN and dictionary encoding, data pages of version 1 and 2, uncompressed or compressed with Snappy, gzip or zstd.
// Everything else (nested and repeated columns, other types, encodings and codecs, encryption) is named and refused:
// every error is Exit::data and names the file. No length in the file is trusted.
class ParquetColumn {
public:
    // Reads the metadata. If there is no such column, the error lists the columns.
    ParquetColumn(const MappedFile& file, const std::string& column);

    // The next value that is not null, valid until the next call; nullopt after the last one.
    std::optional<std::string_view> next();

    uint64_t nulls() const { return nulls_; }  // that have been passed over

private:
    struct Chunk {  // the column's part of a row group
        int32_t codec = 0;
        uint64_t value_count = 0;
        std::string_view pages;
    };
    struct PageHeader {
        int64_t type = -1, uncompressed_bytes = -1, compressed_bytes = -1, value_count = -1, encoding = -1;
        int64_t definition_bytes = -1, repetition_bytes = 0;
        int64_t crc = 0;
        bool has_crc = false, is_compressed = true;
    };

    void read_metadata(std::string_view metadata, const std::string& column);
    void read_row_group(class ThriftReader& reader, size_t column_index);
    bool open_page();
    PageHeader read_page_header(class BoundedBytes& bytes) const;
    void read_dictionary(const PageHeader& header, std::string_view content);
    void open_data_page(const PageHeader& header, std::string_view content, std::string_view levels);
    std::string_view decompressed(std::string_view bytes, int64_t size, int32_t codec, std::string& buffer) const;
    void decode_levels(std::string_view encoded, uint32_t count);
    std::string_view plain_value();

    MappedFile file_;
    bool is_optional_ = false;
    std::vector<Chunk> chunks_;
    size_t chunk_ = 0;               // that is being read
    uint64_t chunk_values_ = 0;      // of it that pages have brought
    std::string dictionary_buffer_;  // decompressed
    std::vector<std::string_view> dictionary_;
    bool has_dictionary_ = false;

    // The data page that is being read.
    std::string page_buffer_;  // decompressed
    std::string_view values_;  // PLAIN: the rest
    bool is_indexed_ = false;
    std::vector<uint32_t> present_, indices_;  // 1 or 0 per value, if optional; per value that is present
    size_t page_values_ = 0, value_ = 0, index_ = 0;
    uint64_t nulls_ = 0;
};

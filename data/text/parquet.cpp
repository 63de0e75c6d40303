#include "data/text/parquet.h"

#include <isa-l.h>

#include "data/text/byte_source.h"
#include "data/text/thrift.h"
#include "runtime/io/reject_file.h"

// A typical page has about a megabyte. A much larger size means a damaged or malicious file.
static constexpr int64_t kMaxPageBytes = int64_t(1) << 29;

namespace {

enum Type { kByteArray = 6 };
enum Repetition { kOptional = 1, kRepeated = 2 };
enum Codec { kUncompressed = 0, kSnappy = 1, kGzip = 2, kZstd = 6 };
enum Encoding { kPlain = 0, kPlainDictionary = 2, kRle = 3, kRleDictionary = 8 };
enum PageType { kDataPage = 0, kIndexPage = 1, kDictionaryPage = 2, kDataPageV2 = 3 };

template <size_t N> std::string name_in(const char* const (&names)[N], int64_t number) {
    return number >= 0 && number < int64_t(N) ? names[number] : format("number %ld", number);
}
constexpr const char* kTypes[] = {"BOOLEAN", "INT32",  "INT64",      "INT96",
                                  "FLOAT",   "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"};
constexpr const char* kCodecs[] = {"uncompressed", "Snappy", "gzip", "LZO", "Brotli", "LZ4", "zstd", "LZ4_RAW"};
constexpr const char* kEncodings[] = {"PLAIN",
                                      "number 1",
                                      "PLAIN_DICTIONARY",
                                      "RLE",
                                      "BIT_PACKED",
                                      "DELTA_BINARY_PACKED",
                                      "DELTA_LENGTH_BYTE_ARRAY",
                                      "DELTA_BYTE_ARRAY",
                                      "RLE_DICTIONARY",
                                      "BYTE_STREAM_SPLIT"};

struct SchemaElement {
    int64_t type = -1, repetition = 0, children = 0;
    std::string name;
};

SchemaElement read_schema_element(ThriftReader& reader) {
    SchemaElement element;
    reader.read_struct([&](int id, ThriftReader::Type) {
        if (id != 4)
            return reader.read_integer(id, {{1, &element.type}, {3, &element.repetition}, {5, &element.children}});
        element.name = reader.string();
        return true;
    });
    return element;
}

// A column directly below the root: its index among all leaves.
struct FoundColumn {
    size_t leaf;
    bool is_optional;
};

FoundColumn find_column(const std::vector<SchemaElement>& schema, const std::string& name, const std::string& path) {
    if (schema.empty()) reject_file(path, "the Parquet schema is empty");
    size_t next = 1, leaf = 0;
    std::string names;
    std::optional<FoundColumn> found;
    // Skips a subtree and counts its leaves.
    auto pass = [&](const SchemaElement& element) {
        const SchemaElement* passed = &element;
        for (int64_t left = 1;;) {
            if (passed->children <= 0) leaf++;
            left += std::clamp<int64_t>(passed->children, 0, INT32_MAX) - 1;
            if (left == 0) return;
            if (next >= schema.size()) reject_file(path, "the Parquet schema ends too early");
            passed = &schema[next++];
        }
    };
    for (int64_t child = 0; child < schema[0].children; child++) {
        if (next >= schema.size()) reject_file(path, "the Parquet schema ends too early");
        const SchemaElement& element = schema[next++];
        if (element.name == name && !found) {
            if (element.children > 0 || element.repetition == kRepeated)
                reject_file(path, "the column \"%s\" is %s; only flat columns of strings are supported", name,
                            element.children > 0 ? "nested" : "repeated");
            if (element.type != kByteArray)
                reject_file(path, "the column \"%s\" has the type %s; only strings (BYTE_ARRAY) are supported", name,
                            name_in(kTypes, element.type));
            found = {leaf, element.repetition == kOptional};
        }
        names += (names.empty() ? "" : ", ") + element.name;
        pass(element);
    }
    if (!found) reject_file(path, "no column is called \"%s\"; choose one with --field: %s", name, names);
    return *found;
}

// Decodes `count` values of `width` bits in Parquet's RLE/bit-packing hybrid encoding.
void decode_hybrid(BoundedBytes bytes, uint32_t width, uint64_t count, std::vector<uint32_t>& out) {
    out.clear();
    out.reserve(count);
    while (out.size() < count) {
        const uint64_t header = bytes.varint(), left = count - out.size();
        if ((header & 1) == 0) {
            const uint64_t run = header >> 1;
            if (run == 0) bytes.reject("has a run of no values");
            uint32_t value = 0;
            for (uint32_t shift = 0; shift < width; shift += 8) value |= uint32_t(bytes.byte()) << shift;
            if (uint64_t(value) >> width != 0)
                bytes.reject("has a run of the value %u, which has more than %u bits", value, width);
            out.insert(out.end(), std::min(run, left), value);
            continue;
        }
        const uint64_t groups = std::min(header >> 1, (left + 7) / 8), values = std::min(groups * 8, left);
        if (groups == 0) bytes.reject("has a run of no values");
        // The last group may end after its last value.
        const std::string_view packed =
            bytes.take(std::max((values * width + 7) / 8, std::min<uint64_t>(groups * width, bytes.rest().size())));
        uint64_t window = 0;
        uint32_t filled = 0;
        size_t position = 0;
        for (uint64_t i = 0; i < values; i++) {
            for (; filled < width; filled += 8) window |= uint64_t(uint8_t(packed[position++])) << filled;
            out.push_back(uint32_t(window & ((uint64_t(1) << width) - 1)));
            window >>= width, filled -= width;
        }
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

ParquetColumn::ParquetColumn(const MappedFile& file, const std::string& column) : file_(file) {
    const std::string_view all = file.text();
    const std::string& path = file.path();
    if (!all.starts_with(kParquetMagic))
        reject_file(path, "not a Parquet file: it looks like %s", describe_content(all.substr(0, 1024), all.size()));
    if (all.ends_with("PARE") && all.size() >= 12)
        reject_file(path, "the Parquet file is encrypted, which is not supported");
    if (!all.ends_with(kParquetMagic) || all.size() < 12)
        reject_file(path, "the Parquet file does not end with PAR1: the file was cut short");
    BoundedBytes end(all.substr(all.size() - 8), path, "the end");
    const uint32_t metadata_bytes = end.uint32();
    if (metadata_bytes > all.size() - 12)
        reject_file(path, "the footer states %u bytes of metadata, but the file has %zu", metadata_bytes, all.size());
    read_metadata(all.substr(all.size() - 8 - metadata_bytes, metadata_bytes), column);
}

void ParquetColumn::read_metadata(std::string_view metadata, const std::string& column) {
    BoundedBytes bytes(metadata, file_.path(), "the Parquet metadata");
    ThriftReader reader(bytes);
    std::vector<SchemaElement> schema;
    std::optional<FoundColumn> found;
    reader.read_struct([&](int id, ThriftReader::Type type) {
        if (id == 2 && type == ThriftReader::list) {
            reader.read_list([&](auto) { schema.push_back(read_schema_element(reader)); });
            found = find_column(schema, column, file_.path());
            is_optional_ = found->is_optional;
            return true;
        }
        if (id == 4 && type == ThriftReader::list) {
            if (!found) bytes.reject("has row groups before the schema");
            return reader.read_list([&](auto) { read_row_group(reader, found->leaf); });
        }
        if (id == 8) bytes.reject("has encrypted columns, which are not supported");
        return false;
    });
    if (!found) bytes.reject("has no schema");
}

void ParquetColumn::read_row_group(ThriftReader& reader, size_t column_index) {
    const std::string_view all = file_.text();
    size_t index = 0;
    bool found = false;
    auto read_chunk = [&](auto) {
        const bool is_wanted = index++ == column_index;
        reader.read_struct([&](int id, ThriftReader::Type type) {
            if (is_wanted && id == 1)
                reject_file(file_.path(), "the column is stored in another file, which is not supported");
            if (is_wanted && (id == 8 || id == 9))
                reject_file(file_.path(), "the column is encrypted, which is not supported");
            if (!is_wanted || id != 3 || type != ThriftReader::structure) return false;
            Chunk chunk;
            int64_t codec = 0, data = -1, dictionary = -1, size = -1, count = -1;
            reader.read_struct([&](int field, ThriftReader::Type) {
                return reader.read_integer(field,
                                           {{4, &codec}, {5, &count}, {7, &size}, {9, &data}, {11, &dictionary}});
            });
            chunk.codec = int32_t(codec);
            // Some writers store 0 if the column has no dictionary.
            const int64_t begin = dictionary > 0 ? std::min(dictionary, data) : data;
            if (begin < 4 || size < 0 || uint64_t(begin) > all.size() ||
                uint64_t(size) > all.size() - uint64_t(begin) || count < 0)
                reject_file(file_.path(),
                            "a row group states %ld values of the column in %ld bytes from offset %ld, but the file "
                            "has %zu bytes",
                            count, size, begin, all.size());
            if (chunk.codec != kUncompressed && chunk.codec != kSnappy && chunk.codec != kGzip && chunk.codec != kZstd)
                reject_file(file_.path(), "the column is compressed with %s; only Snappy, gzip and zstd are supported",
                            name_in(kCodecs, chunk.codec));
            chunk.value_count = uint64_t(count);
            chunk.pages = all.substr(size_t(begin), size_t(size));
            chunks_.push_back(chunk);
            return found = true;
        });
    };
    reader.read_struct([&](int id, ThriftReader::Type type) {
        return id == 1 && type == ThriftReader::list && reader.read_list(read_chunk);
    });
    if (!found) reject_file(file_.path(), "a row group lacks the column");
}

ParquetColumn::PageHeader ParquetColumn::read_page_header(BoundedBytes& bytes) const {
    PageHeader header;
    ThriftReader reader(bytes);
    auto read_data_header = [&](int id, ThriftReader::Type) {  // of a data or dictionary page
        return reader.read_integer(id, {{1, &header.value_count}, {2, &header.encoding}});
    };
    auto read_data_header_v2 = [&](int id, ThriftReader::Type type) {
        if (id == 7) header.is_compressed = type == ThriftReader::yes;
        return id == 7 || reader.read_integer(id, {{1, &header.value_count},
                                                   {4, &header.encoding},
                                                   {5, &header.definition_bytes},
                                                   {6, &header.repetition_bytes}});
    };
    reader.read_struct([&](int id, ThriftReader::Type type) {
        if (type == ThriftReader::structure && (id == 5 || id == 7)) return reader.read_struct(read_data_header);
        if (type == ThriftReader::structure && id == 8) return reader.read_struct(read_data_header_v2);
        if (id != 4)
            return reader.read_integer(
                id, {{1, &header.type}, {2, &header.uncompressed_bytes}, {3, &header.compressed_bytes}});
        header.crc = reader.integer();
        return true;
    });
    if (header.compressed_bytes < 0 || header.uncompressed_bytes < 0 || header.uncompressed_bytes > kMaxPageBytes)
        bytes.reject("states %ld bytes, %ld uncompressed; the limit is %ld bytes", header.compressed_bytes,
                     header.uncompressed_bytes, kMaxPageBytes);
    return header;
}

std::string_view ParquetColumn::decompressed(std::string_view bytes, int64_t size, int32_t codec,
                                             std::string& buffer) const {
    if (codec == kUncompressed) {
        if (int64_t(bytes.size()) != size)
            reject_file(file_.path(), "an uncompressed Parquet page has %zu bytes, but its header states %ld",
                        bytes.size(), size);
        return bytes;
    }
    const auto decompress = codec == kSnappy ? decompress_snappy : codec == kGzip ? decompress_gzip : decompress_zstd;
    if (!decompress(bytes, size_t(size), buffer))
        reject_file(file_.path(), "a Parquet page compressed with %s is damaged", name_in(kCodecs, codec));
    return buffer;
}

void ParquetColumn::read_dictionary(const PageHeader& header, std::string_view content) {
    if (header.encoding != kPlain && header.encoding != kPlainDictionary)
        reject_file(file_.path(), "a dictionary has the encoding %s, which is not supported",
                    name_in(kEncodings, header.encoding));
    BoundedBytes bytes(content, file_.path(), "a Parquet dictionary");
    if (header.value_count < 0 || uint64_t(header.value_count) > content.size() / 4)
        bytes.reject("states %ld values in %zu bytes", header.value_count, content.size());
    dictionary_.clear();
    for (int64_t i = 0; i < header.value_count; i++) dictionary_.push_back(bytes.take(bytes.uint32()));
    has_dictionary_ = true;
}

void ParquetColumn::open_data_page(const PageHeader& header, std::string_view content, std::string_view levels) {
    const Chunk& chunk = chunks_[chunk_];
    BoundedBytes bytes(content, file_.path(), "a Parquet page");
    if (header.value_count < 0 || uint64_t(header.value_count) > chunk.value_count - chunk_values_)
        bytes.reject("states %ld values, but its column chunk has %zu left", header.value_count,
                     chunk.value_count - chunk_values_);
    page_values_ = size_t(header.value_count);
    chunk_values_ += page_values_;
    value_ = index_ = 0;
    size_t present = page_values_;
    if (is_optional_) {
        if (header.type == kDataPage) levels = bytes.take(bytes.uint32());
        // A run of a few bytes can encode any number of nulls. The limit bounds the memory for the rows of a page.
        if (page_values_ > size_t(kMaxPageBytes) / 4) bytes.reject("has too many values (%zu)", page_values_);
        decode_hybrid({levels, file_.path(), "a Parquet page's definition levels"}, 1, page_values_, present_);
        present = size_t(std::ranges::count(present_, 1u));
    }
    is_indexed_ = header.encoding == kPlainDictionary || header.encoding == kRleDictionary;
    if (!is_indexed_ && header.encoding != kPlain)
        bytes.reject("has the encoding %s, which is not supported", name_in(kEncodings, header.encoding));
    values_ = bytes.rest();
    if (!is_indexed_) {
        if (present > values_.size() / 4) bytes.reject("has %zu values in %zu bytes", present, values_.size());
        return;
    }
    if (!has_dictionary_) bytes.reject("refers to a dictionary, but the column chunk has none");
    if (present == 0) return indices_.clear();
    const uint32_t width = bytes.byte();
    if (width > 32) bytes.reject("has indices of %u bits", width);
    if (present > size_t(kMaxPageBytes) / 4) bytes.reject("has too many values (%zu)", present);
    decode_hybrid({bytes.rest(), file_.path(), "a Parquet page's indices"}, width, present, indices_);
    for (uint32_t index : indices_)
        if (index >= dictionary_.size())
            bytes.reject("refers to value %u of a dictionary with %zu values", index, dictionary_.size());
}

// Opens the next data page. Returns false at the end of the file.
bool ParquetColumn::open_page() {
    while (chunk_ < chunks_.size()) {
        Chunk& chunk = chunks_[chunk_];
        if (chunk_values_ == chunk.value_count) {
            chunk_++, chunk_values_ = 0, has_dictionary_ = false;
            continue;
        }
        BoundedBytes bytes(chunk.pages, file_.path(), "a Parquet page's header");
        const PageHeader header = read_page_header(bytes);
        std::string_view content = bytes.take(uint64_t(header.compressed_bytes)), levels;
        chunk.pages = bytes.rest();
        if (header.crc && uint32_t(*header.crc) !=
                              crc32_gzip_refl(0, reinterpret_cast<const uint8_t*>(content.data()), content.size()))
            reject_file(file_.path(), "a Parquet page is damaged: its CRC does not match");
        if (header.type == kDictionaryPage) {
            read_dictionary(header, decompressed(content, header.uncompressed_bytes, chunk.codec, dictionary_buffer_));
        } else if (header.type == kDataPage) {
            open_data_page(header, decompressed(content, header.uncompressed_bytes, chunk.codec, page_buffer_), {});
            return true;
        } else if (header.type == kDataPageV2) {
            if (header.definition_bytes < 0 || header.repetition_bytes != 0 ||
                header.definition_bytes > std::min<int64_t>(int64_t(content.size()), header.uncompressed_bytes))
                reject_file(file_.path(), "a Parquet page has invalid level lengths: definition %ld, repetition %ld",
                            header.definition_bytes, header.repetition_bytes);
            levels = content.substr(0, size_t(header.definition_bytes));
            content.remove_prefix(levels.size());
            const int32_t codec = header.is_compressed ? chunk.codec : int32_t(kUncompressed);
            open_data_page(
                header, decompressed(content, header.uncompressed_bytes - header.definition_bytes, codec, page_buffer_),
                levels);
            return true;
        } else if (header.type != kIndexPage) {
            reject_file(file_.path(), "a Parquet page has the type %ld, which is not supported", header.type);
        }
    }
    return false;
}

std::string_view ParquetColumn::plain_value() {
    BoundedBytes bytes(values_, file_.path(), "a Parquet page");
    const std::string_view value = bytes.take(bytes.uint32());
    values_ = bytes.rest();
    return value;
}

std::optional<std::string_view> ParquetColumn::next() {
    for (;;) {
        while (value_ == page_values_)
            if (!open_page()) return std::nullopt;
        const bool is_present = !is_optional_ || present_[value_] != 0;
        value_++;
        if (is_present) return is_indexed_ ? dictionary_[indices_[index_++]] : plain_value();
    }
}

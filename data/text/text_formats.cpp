#include "data/text/text_formats.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "data/text/parquet.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLongestTextPiece = 4 * kTextPieceBytes;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
constexpr std::string_view kJsonSpace = " \t\r\n";
constexpr size_t kNone = std::string_view::npos;

// Returns the line number of a position. For error messages only: reads the file again.
size_t line_of(const TextSource& source, uint64_t position) {
    size_t line = 1;
    ByteSource bytes(source.file);
    for (std::string_view some; position > 0 && !(some = bytes.peek(1).substr(0, position)).empty();) {
        line += size_t(std::ranges::count(some, '\n'));
        position -= some.size();
        bytes.skip(some.size());
    }
    return line;
}

template <class... Values>
[[noreturn]] void reject_record(const TextSource& source, uint64_t position, const std::string& pattern,
                                const Values&... values) {
    reject_file(source.file.path(), "line %zu " + pattern, line_of(source, position), values...);
}

void visit_json_line(const TextSource& source, uint64_t position, std::string_view text, const DocumentVisitor& visit) {
    Json value = parse_json_or_null(text);
    // Only the message of an error needs the line number.
    if (value.is_null())
        value = parse_json(text,
                           format("the JSON in line %zu of %s", line_of(source, position), source.file.path().c_str()),
                           Exit::data);
    const auto member = value.is_object() ? value.find(source.field) : value.end();
    if (member != value.end() && member->is_string()) return visit(member->get_ref<const std::string&>());
    std::string found = ": " + printed(value);
    if (value.is_object() && !value.empty())
        found = "; choose one with --field: " +
                joined(value.items(), ", ", [](const auto& field) { return printed(field.key()); });
    reject_record(source, position, "is not a JSON object with a string \"%s\"%s", source.field, found);
}

// ---------------------------------------------------------------------------------------------------------------------
// Format detection

// Returns whether the first line of the text is a JSON object.
bool begins_with_json_line(std::string_view text) {
    const size_t begin = text.find_first_not_of(kJsonSpace);
    if (begin == kNone || text[begin] != '{') return false;
    const std::string_view line = text.substr(begin, std::min(text.find('\n', begin), text.size()) - begin);
    return Json::accept(line);
}

// Returns whether the text begins with a JSON array whose first element is a complete string or object.
bool begins_with_json_array(std::string_view text) {
    std::istringstream stream{std::string(text)};
    Json element;
    char bracket = 0, next = 0;
    if (!(stream >> bracket) || bracket != '[') return false;
    try {
        stream >> element >> next;
    } catch (const Json::exception&) {
        return false;
    }
    return (element.is_string() || element.is_object()) && (next == ',' || next == ']');
}

TextFormat recognize(const std::string& path, std::string_view start) {
    std::filesystem::path name = path;
    if (name.extension() == ".gz" || name.extension() == ".zst") name = name.stem();
    const std::string suffix = name.extension();
    if (start.starts_with(kParquetMagic) || suffix == ".parquet") return TextFormat::parquet;
    if (suffix == ".jsonl" || suffix == ".ndjson") return TextFormat::json_lines;
    if (start.starts_with(kByteOrderMark)) start.remove_prefix(kByteOrderMark.size());
    const bool is_table = suffix == ".csv" || suffix == ".tsv";
    if (!is_table && begins_with_json_line(start)) return TextFormat::json_lines;
    if (is_table || suffix == ".json" || begins_with_json_array(start))
        reject_file(path,
                    "CSV, TSV and JSON other than an object per line are not supported; convert the file to "
                    "JSONL or Parquet");
    return TextFormat::text;
}

}  // namespace

TextSource open_text_source(const std::string& path, std::optional<TextFormat> wanted, const std::string& field) {
    TextSource source;
    source.file = MappedFile(path);
    source.field = field.empty() ? "text" : field;
    ByteSource bytes(source.file);
    const std::string_view start = bytes.peek(kTextPieceBytes).substr(0, kTextPieceBytes);
    source.format = wanted ? *wanted : recognize(path, start);
    if (source.format == TextFormat::parquet) {
        if (!bytes.is_mapped()) reject_file(path, "compressed Parquet files are not supported; decompress it first");
        ParquetColumn(source.file, source.field);
        return source;
    }
    if (bytes.is_mapped()) source.size = source.file.size();
    if (const size_t nul = start.substr(0, size_t(1) << 16).find('\0'); nul != kNone) {
        const std::string looks = start.starts_with("\xff\xfe") || start.starts_with("\xfe\xff")
                                      ? "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8"
                                      : describe_content(start.substr(0, 1024), source.file.size());
        reject_file(path, "not a text file: byte %zu is 0; it looks like %s", nul, looks);
    }
    if (start.starts_with(kByteOrderMark)) source.content = kByteOrderMark.size();
    return source;
}

// ---------------------------------------------------------------------------------------------------------------------

size_t next_piece(const TextSource& source, ByteSource& bytes, uint64_t limit) {
    const uint64_t left = limit - bytes.position();
    for (size_t length = kTextPieceBytes;; length *= 2) {
        const std::string_view rest = bytes.peek(length + 1).substr(0, left);
        if (rest.size() <= length) return rest.size();
        const std::string_view piece = rest.substr(0, length);
        if (source.format == TextFormat::json_lines) {
            if (const size_t newline = piece.rfind('\n'); newline != kNone) return newline + 1;
            if (length > kMaxRecordBytes)
                reject_record(source, bytes.position(), "exceeds the limit of %zu bytes", kMaxRecordBytes);
            continue;
        }
        if (const size_t cut = last_safe_cut(piece, source.cut)) return cut;
        if (length < kLongestTextPiece) continue;
        while ((uint8_t(rest[length]) & 0xc0) == 0x80 && length > kLongestTextPiece - 3)
            length--;  // do not cut within a character
        return length;
    }
}

uint64_t skip_values(ParquetColumn& column, uint64_t position, const Advance& advance) {
    uint64_t at = 0;
    while (at < position) {
        const auto value = column.next();
        if (!value) break;
        at += value->size() + 1;
        advance(value->size() + 1);
    }
    return at;
}

uint64_t next_record(const TextSource& source, uint64_t position) {
    if (position == 0) return 0;
    if (source.format == TextFormat::parquet) {
        ParquetColumn column(source.file, source.field);
        return skip_values(column, position, [](uint64_t) {});
    }
    ByteSource bytes(source.file);
    bytes.skip(position - 1);
    for (std::string_view rest; !(rest = bytes.peek(kTextPieceBytes)).empty(); bytes.skip(rest.size()))
        if (const size_t newline = rest.find('\n'); newline != kNone) return bytes.position() + newline + 1;
    return source.size;
}

void visit_json_lines(const TextSource& source, uint64_t position, std::string_view piece,
                      const DocumentVisitor& visit) {
    for (size_t begin = 0, end; begin < piece.size(); begin = end + 1) {
        end = std::min(piece.find('\n', begin), piece.size());
        const std::string_view line = piece.substr(begin, end - begin);
        if (line.find_first_not_of(" \t\r") == kNone) continue;
        if (line.size() > kMaxRecordBytes)
            reject_record(source, position + begin, "has %zu bytes; the limit is %zu", line.size(), kMaxRecordBytes);
        visit_json_line(source, position + begin, line, visit);
    }
}

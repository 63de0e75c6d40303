#include "data/text/text_formats.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/text/parquet.h"
#include "runtime/io/files.h"
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

// ---------------------------------------------------------------------------------------------------------------------
// JSON

// Returns the size of the JSON value at the beginning of `text`; kNone if the value is incomplete.
size_t json_value_length(std::string_view text) {
    size_t depth = 0, i = 0;
    do {
        if (i >= text.size()) return kNone;
        switch (text[i]) {
            case '"':
                for (i++; i < text.size() && text[i] != '"'; i++)
                    if (text[i] == '\\') i++;
                if (i >= text.size()) return kNone;
                i++;
                break;
            case '{':
            case '[': depth++, i++; break;
            case '}':
            case ']':
                if (depth == 0) return i;
                depth--, i++;
                break;
            default:
                if (depth == 0) return std::min(text.find_first_of(" \t\r\n,]}"), text.size());
                i = std::min(text.find_first_of("\"{}[]", i), text.size());
        }
    } while (depth > 0);
    return i;
}

// Lists the keys of an object, for messages.
std::string keys_of(const Json& object) {
    std::string names;
    for (const auto& [key, value] : object.items()) names += (names.empty() ? "" : ", ") + printed(key);
    return names;
}

void visit_json_value(const TextSource& source, uint64_t position, std::string_view text,
                      const DocumentVisitor& visit) {
    // On failure, parses again to add the line number to the message.
    Json value;
    try {
        value = parse_json(text, source.file.path(), Exit::data);
    } catch (const Error&) {
        const size_t line = line_of(source, position);
        parse_json(text, format("the JSON in line %zu of %s", line, source.file.path().c_str()), Exit::data);
    }
    if (source.format == TextFormat::json && value.is_string()) return visit(value.get_ref<const std::string&>());
    const auto member = value.is_object() ? value.find(source.field) : value.end();
    if (member != value.end() && member->is_string()) return visit(member->get_ref<const std::string&>());
    const std::string found = value.is_object() && !value.empty()
                                  ? format("; choose one with --field: %s", keys_of(value).c_str())
                                  : format(": %s", printed(value).c_str());
    reject_record(source, position, "is not a JSON object with a string \"%s\"%s", source.field, found);
}

void visit_json_lines(const TextSource& source, uint64_t position, std::string_view piece,
                      const DocumentVisitor& visit) {
    for (size_t begin = 0, end; begin < piece.size(); begin = end + 1) {
        end = std::min(piece.find('\n', begin), piece.size());
        const std::string_view line = piece.substr(begin, end - begin);
        if (line.find_first_not_of(" \t\r") == kNone) continue;
        if (line.size() > kMaxRecordBytes)
            reject_record(source, position + begin, "has %zu bytes; the limit is %zu", line.size(), kMaxRecordBytes);
        visit_json_value(source, position + begin, line, visit);
    }
}

void visit_json_array(const TextSource& source, uint64_t position, std::string_view piece,
                      const DocumentVisitor& visit) {
    for (size_t at = 0;;) {
        at = piece.find_first_not_of(" \t\r\n,", at);
        if (at == kNone || (piece[at] == ']' && source.is_array)) return;
        const size_t length = std::max<size_t>(json_value_length(piece.substr(at)), 1);
        visit_json_value(source, position + at, piece.substr(at, length), visit);
        at += length;
    }
}

// Returns the size of the separator and value at the beginning of `text`: 0 at the end of the array, kNone if the value
// is incomplete.
size_t json_record_length(const TextSource& source, std::string_view text, uint64_t position) {
    const size_t begin = text.find_first_not_of(" \t\r\n,");
    if (begin == kNone) return kNone;
    if (source.is_array && text[begin] == ']') return 0;
    const size_t length = json_value_length(text.substr(begin));
    if (length == 0) reject_record(source, position + begin, "has an unmatched \"%c\"", text[begin]);
    return length == kNone ? kNone : begin + length;
}

// ---------------------------------------------------------------------------------------------------------------------
// CSV

char separator_of(const TextSource& source) { return source.format == TextFormat::tsv ? '\t' : ','; }

// Returns the size of the row at the beginning of `text`, including its line end, and calls field(i, raw) for each
// field. Returns kNone if the row is incomplete. `is_all`: no text follows. As in RFC 4180, a field is quoted if it
// begins with a quote.
template <class Field> size_t csv_row_length(std::string_view text, char separator, bool is_all, const Field& field) {
    size_t i = 0;
    const char ends[] = {separator, '\n'};
    for (size_t number = 0;; number++) {
        const size_t begin = i;
        if (i < text.size() && text[i] == '"') {
            for (i++;; i += 2) {
                i = text.find('"', i);
                if (i == kNone || (i + 1 == text.size() && !is_all)) return kNone;
                if (i + 1 == text.size() || text[i + 1] != '"') break;
            }
        }
        i = text.find_first_of(std::string_view(ends, 2), i);
        if (i == kNone && !is_all) return kNone;
        i = std::min(i, text.size());
        field(number, text.substr(begin, i - begin));
        if (i == text.size()) return i;
        if (text[i++] == '\n') return i;
    }
}

std::string csv_value(std::string_view raw) {
    if (raw.ends_with('\r')) raw.remove_suffix(1);
    if (!raw.starts_with('"')) return std::string(raw);
    std::string value;
    for (size_t i = 1; i < raw.size(); i++) {
        if (raw[i] == '"' && ++i >= raw.size()) break;  // the closing quote
        value += raw[i];
    }
    return value;
}

void visit_csv(const TextSource& source, uint64_t position, std::string_view piece, const DocumentVisitor& visit) {
    for (size_t begin = 0, length; begin < piece.size(); begin += length) {
        size_t fields = 0;
        std::string_view wanted, row = piece.substr(begin);
        length = csv_row_length(row, separator_of(source), true, [&](size_t number, std::string_view raw) {
            fields = number + 1;
            if (number == source.column) wanted = raw;
        });
        if (length == kNone) reject_record(source, position + begin, "has an unclosed quote");
        row = row.substr(0, length);
        if (row.find_first_not_of("\r\n") == kNone) continue;
        if (fields != source.columns)
            reject_record(source, position + begin, "has %zu fields, but the header has %zu", fields, source.columns);
        visit(csv_value(wanted));
    }
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
    size_t at = text.find_first_not_of(kJsonSpace);
    if (at == kNone || text[at] != '[') return false;
    at = text.find_first_not_of(kJsonSpace, at + 1);
    if (at == kNone || (text[at] != '{' && text[at] != '"')) return false;
    const size_t length = json_value_length(text.substr(at));
    if (length == kNone || !Json::accept(text.substr(at, length))) return false;
    const size_t next = text.find_first_not_of(kJsonSpace, at + length);
    return next != kNone && (text[next] == ',' || text[next] == ']');
}

TextFormat recognize(const std::string& path, std::string_view start) {
    std::filesystem::path name = path;
    if (name.extension() == ".gz" || name.extension() == ".zst") name = name.stem();
    const std::string suffix = name.extension();
    if (start.starts_with(kParquetMagic) || suffix == ".parquet") return TextFormat::parquet;
    if (suffix == ".jsonl" || suffix == ".ndjson") return TextFormat::json_lines;
    if (suffix == ".csv") return TextFormat::csv;
    if (suffix == ".tsv") return TextFormat::tsv;
    if (start.starts_with(kByteOrderMark)) start.remove_prefix(kByteOrderMark.size());
    if (begins_with_json_line(start)) return TextFormat::json_lines;
    if (suffix == ".json" || begins_with_json_array(start)) return TextFormat::json;
    return TextFormat::text;
}

void open_json(TextSource& source, std::string_view start) {
    const size_t begin = start.find_first_not_of(kJsonSpace, source.content);
    if (begin == kNone) return;
    source.is_array = start[begin] == '[';
    if (!source.is_array && start[begin] != '{')
        reject_file(source.file.path(),
                    "neither a JSON array nor a sequence of JSON objects: begins with \"%s\"; pass --format text to "
                    "read it as text",
                    std::string(start.substr(begin, 20)));
    source.content = begin + source.is_array;
}

void open_csv(TextSource& source, std::string_view start, const std::string& field) {
    std::vector<std::string> names;
    const size_t length = csv_row_length(start.substr(source.content), separator_of(source), true,
                                         [&](size_t, std::string_view raw) { names.push_back(csv_value(raw)); });
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
    auto column = std::ranges::find(names, field.empty() && names.size() == 1 ? names[0] : source.field);
    if (length == kNone || column == names.end())
        reject_file(source.file.path(), "no column is called \"%s\"; choose one with --field: %s", source.field,
                    printed(list.substr(0, 1000)));
    source.field = *column;
    source.column = size_t(column - names.begin());
    source.columns = names.size();
    source.content += length;
}

}  // namespace

TextSource open_text_source(const std::string& path, std::optional<TextFormat> wanted, const std::string& field) {
    TextSource source;
    source.file = MappedFile(path);
    source.field = field.empty() ? "text" : field;
    ByteSource bytes(source.file);
    const std::string_view start = bytes.peek(kTextPieceBytes).substr(0, kTextPieceBytes);
    source.format = wanted ? *wanted : recognize(path, start);
    source.is_counted = bytes.is_mapped() && source.format != TextFormat::parquet;
    if (source.is_counted) source.size = source.file.size();
    if (source.format == TextFormat::parquet) {
        if (!bytes.is_mapped()) reject_file(path, "compressed Parquet files are not supported; decompress it first");
        ParquetColumn(source.file, source.field);
        return source;
    }
    if (const size_t nul = start.substr(0, size_t(1) << 16).find('\0'); nul != kNone) {
        const std::string looks = start.starts_with("\xff\xfe") || start.starts_with("\xfe\xff")
                                      ? "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8"
                                      : describe_content(start.substr(0, 1024), source.file.size());
        reject_file(path, "not a text file: byte %zu is 0; it looks like %s", nul, looks);
    }
    source.has_mark = start.starts_with(kByteOrderMark);
    source.content = source.has_mark ? kByteOrderMark.size() : 0;
    if (source.format == TextFormat::json) open_json(source, start);
    if (source.format == TextFormat::csv || source.format == TextFormat::tsv) open_csv(source, start, field);
    return source;
}

// ---------------------------------------------------------------------------------------------------------------------

namespace {

// Returns the size of the record at the beginning of `text`, including its separator; 0 if there are no more records,
// kNone if the record is incomplete.
size_t record_length(const TextSource& source, std::string_view text, bool is_all, uint64_t position) {
    switch (source.format) {
        case TextFormat::json: return json_record_length(source, text, position);
        case TextFormat::csv:
        case TextFormat::tsv: return csv_row_length(text, separator_of(source), is_all, [](size_t, auto) {});
        default: {
            const size_t newline = text.find('\n');
            return newline != kNone ? newline + 1 : is_all ? text.size() : kNone;
        }
    }
}

size_t text_piece(SafeCut rule, ByteSource& bytes, uint64_t left) {
    for (size_t length = kTextPieceBytes;; length *= 2) {
        const std::string_view rest = bytes.peek(length + 1).substr(0, left);
        if (rest.size() <= length) return rest.size();
        if (size_t cut = last_safe_cut(rest.substr(0, length), rule)) return cut;
        if (length < kLongestTextPiece) continue;
        while ((uint8_t(rest[length]) & 0xc0) == 0x80 && length > kLongestTextPiece - 3)
            length--;  // do not cut within a character
        return length;
    }
}

size_t lines_piece(const TextSource& source, ByteSource& bytes, uint64_t left) {
    for (size_t length = kTextPieceBytes;; length *= 2) {
        const std::string_view rest = bytes.peek(length + 1).substr(0, left);
        if (rest.size() <= length) return rest.size();
        if (size_t newline = rest.substr(0, length).rfind('\n'); newline != kNone) return newline + 1;
        if (length > kMaxRecordBytes)
            reject_record(source, bytes.position(), "exceeds the limit of %zu bytes", kMaxRecordBytes);
    }
}

// Fails unless only white space follows the last record.
void check_end(const TextSource& source, ByteSource& bytes) {
    const uint64_t position = bytes.position();
    bool is_open = source.is_array;
    for (std::string_view rest; !(rest = bytes.peek(kTextPieceBytes)).empty(); bytes.skip(rest.size())) {
        for (size_t at = 0; (at = rest.find_first_not_of(is_open ? " \t\r\n," : kJsonSpace, at)) != kNone; at++) {
            if (!is_open || rest[at] != ']')
                reject_record(source, position + at, "has data after the end of the array");
            is_open = false;
        }
    }
    if (is_open) reject_file(source.file.path(), "the JSON array has no end: the file was cut short");
}

}  // namespace

size_t next_piece(const TextSource& source, ByteSource& bytes, uint64_t limit) {
    const uint64_t left = limit - bytes.position();
    if (left == 0) {
        if (source.format == TextFormat::json && limit == source.size) check_end(source, bytes);
        return 0;
    }
    if (source.format == TextFormat::text) return text_piece(source.cut, bytes, left);
    if (source.format == TextFormat::json_lines) return lines_piece(source, bytes, left);
    for (size_t length = kTextPieceBytes;; length *= 2) {
        const std::string_view all = bytes.peek(length + 1).substr(0, left);
        const bool is_all = all.size() <= length;
        const std::string_view rest = all.substr(0, length);
        size_t taken = 0, record = 0;
        while (taken < rest.size() &&
               (record = record_length(source, rest.substr(taken), is_all, bytes.position() + taken)) != kNone &&
               record > 0)
            taken += record;
        if (taken > 0) return taken;
        if (is_all || record == 0) {
            if (rest.find_first_not_of(source.format == TextFormat::json ? " \t\r\n,]" : "") != kNone &&
                record == kNone)
                reject_record(source, bytes.position(), "begins an incomplete record");
            if (source.format == TextFormat::json && limit == source.size) check_end(source, bytes);
            return 0;
        }
        if (length > kMaxRecordBytes)
            reject_record(source, bytes.position(), "begins a record that exceeds the limit of %zu bytes",
                          kMaxRecordBytes);
    }
}

uint64_t next_record(const TextSource& source, uint64_t position) {
    if (position == 0) return 0;
    if (source.format == TextFormat::parquet) {
        uint64_t at = 0;
        ParquetColumn column(source.file, source.field);
        while (at < position) {
            const auto value = column.next();
            if (!value) break;
            at += value->size() + 1;
        }
        return at;
    }
    ByteSource bytes(source.file);
    const bool is_by_line = source.format == TextFormat::text || source.format == TextFormat::json_lines;
    bytes.skip(is_by_line ? position - 1 : source.content);
    if (is_by_line) {
        for (std::string_view rest; !(rest = bytes.peek(kTextPieceBytes)).empty(); bytes.skip(rest.size()))
            if (const size_t newline = rest.find('\n'); newline != kNone) return bytes.position() + newline + 1;
        return source.size;
    }
    while (bytes.position() < position) {
        const size_t piece = next_piece(source, bytes, source.size);
        if (piece == 0) return source.size;
        if (bytes.position() + piece >= position) {
            const std::string_view rest = bytes.peek(piece).substr(0, piece);
            size_t at = 0;
            while (bytes.position() + at < position)
                at += record_length(source, rest.substr(at), true, bytes.position() + at);
            bytes.skip(at);
            return next_piece(source, bytes, source.size) > 0 ? bytes.position() : source.size;
        }
        bytes.skip(piece);
    }
    return bytes.position();
}

void visit_documents(const TextSource& source, uint64_t position, std::string_view piece,
                     const DocumentVisitor& visit) {
    switch (source.format) {
        case TextFormat::text:
        case TextFormat::parquet: return visit(piece);
        case TextFormat::json_lines: return visit_json_lines(source, position, piece, visit);
        case TextFormat::json: return visit_json_array(source, position, piece, visit);
        case TextFormat::csv:
        case TextFormat::tsv: return visit_csv(source, position, piece, visit);
    }
}

// The kinds of text files: which one a file is, where its records end, and the documents in them.
#pragma once

#include <optional>

#include "data/text/byte_source.h"
#include "data/tokenizer/pretokenizer.h"

// A record (a JSON value, a CSV row) may be this long.
inline constexpr size_t kMaxRecordBytes = size_t(64) << 20;
// Records are read in blocks of about this size; a text file is visited in pieces of about this size, split between
// pre-tokens. Text without white space for four times that size is split anywhere.
inline constexpr size_t kTextPieceBytes = size_t(1) << 20;

enum class TextFormat {
    text,        // one document
    json_lines,  // a JSON object per line
    json,        // an array of strings or objects, or objects one behind the other
    csv,         // RFC 4180 with a header: a document per row
    tsv,         // the same with tabs
    parquet,     // a document per row
};
inline constexpr std::array kTextFormats = {"text", "jsonl", "json", "csv", "tsv", "parquet"};  // for the command line

// A file of text and how it is read.
struct TextSource {
    MappedFile file;
    TextFormat format = TextFormat::text;
    std::string field;       // JSON's key, or the name of a column
    size_t column = 0;       // its index: CSV
    size_t columns = 0;      // of a row: CSV
    uint64_t content = 0;    // where the first record begins: behind the byte order mark, the bracket or the header
    bool has_mark = false;   // begins with the byte order mark U+FEFF, which belongs to no document
    bool is_array = false;   // JSON, in brackets
    uint64_t size = 0;       // bytes, decompressed; of Parquet, those of the column's strings
    bool is_counted = true;  // whether size is known yet
    SafeCut cut = SafeCut::by_gpt2;  // where a text may be cut into pieces
};

// Opens a file and recognizes its format by content and name, unless `format` is given. An empty `field` means "text",
// or the only column there is. Fails with Exit::data if the file is no text, saying what it looks like, or has no such
// column, naming those it has.
TextSource open_text_source(const std::string& path, std::optional<TextFormat> format, const std::string& field);

// Bytes of the next piece of the source from bytes.position() on: whole records; 0 at its end. `limit` is where a
// record begins or the input ends. Fails with Exit::data for a record that has no end or is too long.
size_t next_piece(const TextSource& source, ByteSource& bytes, uint64_t limit);

// Returns where the first record begins at or behind `position`, or the source's size if there is none. A text's
// records are its lines; Parquet's positions count the bytes of the column's strings.
uint64_t next_record(const TextSource& source, uint64_t position);

// Calls visit(document) for each document of a piece that begins at `position` of the source. Fails with Exit::data,
// naming file and line, for a record without the field.
using DocumentVisitor = std::function<void(std::string_view)>;
void visit_documents(const TextSource& source, uint64_t position, std::string_view piece, const DocumentVisitor& visit);

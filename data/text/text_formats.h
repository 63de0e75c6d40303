// Text file formats: detection, record boundaries and documents.
#pragma once

#include <optional>

#include "data/text/byte_source.h"
#include "data/tokenizer/pretokenizer.h"
#include "runtime/io/files.h"

// Maximum size of a JSON value.
inline constexpr size_t kMaxRecordBytes = size_t(64) << 20;
// Approximate size of a block of records, and of a piece of a text file, which is cut between pre-tokens. Text with no
// cut for four times this size is cut at any character.
inline constexpr size_t kTextPieceBytes = size_t(1) << 20;

enum class TextFormat {
    text,        // one document
    json_lines,  // a JSON object per line
    parquet,     // a document per row
};
inline constexpr std::array kTextFormats = {"text", "jsonl", "parquet"};  // for the command line

// A text file and the parameters for reading it.
struct TextSource {
    MappedFile file;
    TextFormat format = TextFormat::text;
    std::string field;     // JSON key, or column name
    uint64_t content = 0;  // start of the first record, after the byte order mark, which belongs to no document
    // Bytes after decompression, or of the column's strings, plus one per string. 0 until they have been counted.
    uint64_t size = 0;
    SafeCut cut = SafeCut::by_gpt2;  // where text may be cut into pieces
};

// Opens a file and detects its format from content and name, unless `format` is given. An empty `field` means "text".
// Fails with Exit::data if the file is not text (the error describes its content), is CSV, TSV or other JSON, or does
// not have the column (the error lists the columns).
TextSource open_text_source(const std::string& path, std::optional<TextFormat> format, const std::string& field);

// Returns the size of the next piece at bytes.position(): a part of a text, or whole lines of JSON; 0 at the end.
// `limit` is the start of a record or the end of the input. Fails with Exit::data if a line is too long.
size_t next_piece(const TextSource& source, ByteSource& bytes, uint64_t limit);

// Called during a long pass with the number of bytes since the last call.
using Advance = std::function<void(uint64_t bytes)>;

// Skips the values of a column that begin before `position`, and returns the position after them. Positions count bytes
// like TextSource::size.
uint64_t skip_values(class ParquetColumn& column, uint64_t position, const Advance& advance);

// Returns the start of the first record at or after `position`, or the size of the source if there is none. The records
// of a text are its lines.
uint64_t next_record(const TextSource& source, uint64_t position);

// Calls visit(document) for each line of a piece that begins at `position` of the source. Fails with Exit::data, naming
// the file and the line, if a line is not an object with the field.
using DocumentVisitor = std::function<void(std::string_view)>;
void visit_json_lines(const TextSource& source, uint64_t position, std::string_view piece,
                      const DocumentVisitor& visit);

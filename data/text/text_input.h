// Reads text files as one stream of documents, in bounded memory.
#pragma once

#include "data/text/byte_source.h"
#include "data/text/text_formats.h"
#include "data/tokenizer/pretokenizer.h"
#include "kernels/base/check.h"

// A piece of one source, read by a TextReader. Any thread may visit its documents.
struct TextBlock {
    size_t source = 0;            // index of the source
    uint64_t begin = 0, end = 0;  // positions in the concatenated sources
    bool starts_document = true;  // false: continues the document of the previous block
    std::vector<size_t> lengths;  // Parquet: lengths of the documents
    std::string_view mapped;      // the bytes, if the file is mapped
    std::string copied;           // the bytes otherwise
    std::string_view bytes() const { return mapped.empty() ? copied : mapped; }
};

// One piece of a document, valid during the call.
using TextVisitor = std::function<void(std::string_view text, bool starts_document)>;

class TextInput {
public:
    // Opens the files like open_text_source(). Positions are byte offsets in the concatenation of the decompressed
    // files; a Parquet file counts as the strings of its column, each followed by one byte.
    explicit TextInput(const std::vector<std::string>& paths, std::optional<TextFormat> format = std::nullopt,
                       const std::string& field = "");

    // Computes the sizes of compressed and Parquet files by reading them.
    void count(const Advance& advance = [](uint64_t) {});

    uint64_t size() const { return begins_.back(); }  // bytes of all files; requires count()
    const std::vector<TextSource>& sources() const { return sources_; }
    uint64_t source_begin(size_t source) const { return begins_[source]; }
    void set_sizes(const std::vector<uint64_t>& sizes);  // replaces count()

    // Sets where text may be cut into pieces. The default is SafeCut::by_gpt2.
    void set_cut(SafeCut cut) {
        for (TextSource& source : sources_) source.cut = cut;
    }

    // Returns the start of the held-out part: the first record (a line of a text) at or after byte
    // floor((1 - fraction) * size()), or size() if there is none. Each file starts a record. Requires `fraction` in
    // [0, 1).
    uint64_t held_out_begin(double fraction) const;

    // Visits the documents of a block. Fails with Exit::data, naming file and line, if a record lacks the field.
    void visit(const TextBlock& block, const TextVisitor& visit) const;

    // Visits the bytes [begin, end); both must be record starts or size(). The first piece starts a document even if
    // `begin` is within one.
    void read(uint64_t begin, uint64_t end, const TextVisitor& visit) const;

private:
    std::vector<TextSource> sources_;
    std::vector<uint64_t> begins_{0};  // (sources + 1)
};

// Cuts [begin, end) of an input into blocks; both must be record starts or size(). The end of a block depends only on
// its start and the text, so a reader that starts at the end of any block finds the same remaining blocks.
class TextReader {
public:
    TextReader(const TextInput& input, uint64_t begin, uint64_t end, uint64_t start);

    // Reads the next block. Returns false at the end.
    bool next(TextBlock& block);

private:
    bool open_next();
    bool next_bytes(TextBlock& block);
    bool next_values(TextBlock& block);

    const TextInput& input_;
    uint64_t begin_, end_, position_;
    size_t source_ = 0;  // the open source, or the next one to open
    std::optional<ByteSource> bytes_;
    std::shared_ptr<class ParquetColumn> column_;
    std::optional<std::string> value_;  // next value of the column, read ahead
};

// Files of text as one stream of documents, in bounded memory.
#pragma once

#include "data/text/text_formats.h"

// A piece of one source, as a TextReader finds it. The documents in it are visited by any thread.
struct TextBlock {
    size_t source = 0;            // its index
    uint64_t begin = 0, end = 0;  // in all sources
    bool starts_document = true;  // false: goes on with that of the block before
    std::vector<size_t> lengths;  // of the documents, if the format is Parquet
    std::string_view mapped;      // the bytes, if they are in a mapped file
    std::string copied;           // otherwise
    std::string_view bytes() const { return mapped.empty() ? copied : mapped; }
};

// One piece of a document, valid during the call.
using TextVisitor = std::function<void(std::string_view text, bool starts_document)>;

// Called while a long pass is made, with the bytes since the last call.
using Advance = std::function<void(uint64_t bytes)>;

class TextInput {
public:
    // Opens the files, like open_text_source(). Positions are bytes of the concatenated files, decompressed; a Parquet
    // file counts as the strings of its column and a byte behind each.
    explicit TextInput(const std::vector<std::string>& paths, std::optional<TextFormat> format = std::nullopt,
                       const std::string& field = "");

    // Reads the files whose size is not known before: those that are compressed, and Parquet.
    void count(const Advance& advance = [](uint64_t) {});

    uint64_t size() const { return begins_.back(); }  // bytes of all files; needs count()
    const std::vector<TextSource>& sources() const { return sources_; }
    uint64_t source_begin(size_t source) const { return begins_[source]; }
    void set_sizes(const std::vector<uint64_t>& sizes);  // instead of count()

    // Where texts are cut into pieces from now on: as GPT-2's pattern allows unless this is called.
    void set_cut(SafeCut cut) {
        for (TextSource& source : sources_) source.cut = cut;
    }

    // Returns the byte where the held-out part begins: the first record (a line of a text) at or after byte
    // floor((1 - fraction) * size()), or size() if there is none. The start of a file is a record's. Requires
    // `fraction` in [0, 1).
    uint64_t held_out_begin(double fraction) const;

    // Visits the documents of a block. Fails with Exit::data, naming file and line, for a record without the field.
    void visit(const TextBlock& block, const TextVisitor& visit) const;

    // Visits the bytes [begin, end), both record starts or size(). The first piece starts a document even if `begin`
    // lies within one.
    void read(uint64_t begin, uint64_t end, const TextVisitor& visit) const;

private:
    std::vector<TextSource> sources_;
    std::vector<uint64_t> begins_{0};  // (sources + 1)
};

// Cuts [begin, end) of an input, both record starts or size(), into blocks. Where one ends depends on where it begins
// and on the text only, so a reader that starts at the end of a block finds the same blocks as one that has read them.
class TextReader {
public:
    TextReader(const TextInput& input, uint64_t begin, uint64_t end, uint64_t start);

    // Reads the next block; false at the end.
    bool next(TextBlock& block);

private:
    bool open_next();
    bool next_bytes(TextBlock& block);
    bool next_values(TextBlock& block);

    const TextInput& input_;
    uint64_t begin_, end_, position_;
    size_t source_ = 0;  // the next to be opened
    std::optional<ByteSource> bytes_;
    std::shared_ptr<class ParquetColumn> column_;
    std::optional<std::string> value_;  // of the column, read ahead
};

// Text files as a stream of documents, in bounded memory.
//
// A file NAME.jsonl holds one JSON object per line, whose string "text" is a document; blank lines are skipped. Any
// other file is one document of UTF-8 text.
#pragma once

#include "runtime/io/io.h"

// Lines of a JSONL file may be this long.
inline constexpr size_t kMaxJsonLineBytes = size_t(64) << 20;
// A document is visited in pieces of about this size, split between pre-tokens; text without white space for 64 times
// that size is split anywhere.
inline constexpr size_t kTextPieceBytes = size_t(1) << 20;

// One piece of a document, valid during the call.
using TextVisitor = std::function<void(std::string_view text, bool starts_document)>;

class TextInput {
public:
    // Maps the files. Fails with Exit::data for a file that is not text, saying what it looks like.
    explicit TextInput(const std::vector<std::string>& paths);

    uint64_t size() const { return begins_.back(); }  // bytes of all files
    const std::vector<MappedFile>& files() const { return files_; }

    // Returns the byte of the concatenated files where the held-out part begins: the first line start at or after byte
    // floor((1 - fraction) * size()), or size() if there is none. The start of a file is a line start. Requires
    // `fraction` in [0, 1).
    uint64_t held_out_begin(double fraction) const;

    // Visits the bytes [begin, end), both line starts or size(). The first piece starts a document even if `begin` lies
    // within one. Fails with Exit::data, naming file and line, if a line of a .jsonl file is not a JSON object with a
    // string "text".
    void read(uint64_t begin, uint64_t end, const TextVisitor& visit) const;

private:
    std::vector<MappedFile> files_;
    std::vector<uint64_t> begins_{0};  // (files + 1)
};

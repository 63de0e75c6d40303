// Token shards: files of token ids behind a header of 1024 bytes, read by mapping and written in llm.c's format.
//
// Formats, recognized by their first words (little-endian int32):
//   20240520, 1, count            uint16 ids: llm.c's GPT-2 shards, which most published data sets use
//   20240801, 7, count            uint32 ids: llm.c's Llama 3 shards
//   278895051, 1, count, width    ids of 2 or 4 bytes: NeMo Automodel
//   "BIN.TOK\n", 2, 4, count, vocabulary, masked    int32 ids: LLM.Q. A loss mask is ignored
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/io/io.h"

inline constexpr size_t kShardHeaderBytes = 1024;
inline constexpr uint64_t kDefaultShardTokens = 100'000'000;

// The little-endian int32 at position 4 * `index` of a file; 0 beyond its end.
int32_t header_word(std::string_view bytes, size_t index);

// The description of the tokens in a header.
struct ShardLayout {
    const char* name = "";  // "llm.c token shard (GPT-2)"
    uint64_t token_count = 0;
    int token_bytes = 0;      // width of an id: 2 or 4
    uint64_t mask_bytes = 0;  // behind the tokens
    uint64_t file_bytes() const { return kShardHeaderBytes + token_count * uint64_t(token_bytes) + mask_bytes; }
};

// A mapped shard. The constructor fails with Exit::data if the file is not a shard or its size differs from what the
// header says.
class TokenShard {
public:
    explicit TokenShard(const std::string& path);
    const std::string& path() const { return file_.path(); }
    const ShardLayout& layout() const { return layout_; }
    uint64_t token_count() const { return layout_.token_count; }
    std::string_view bytes() const { return file_.text(); }  // the whole file

    // out[i] = id of token begin + i. Requires begin + count <= token_count(). An id of 2^31 or more becomes negative,
    // so one unsigned comparison with the vocabulary's size finds every id that is out of range.
    void copy(uint64_t begin, size_t count, int32_t* out) const;

private:
    MappedFile file_;
    ShardLayout layout_;
};

// Whether a file with these first bytes is meant to be a token shard of any format, sound or not.
bool is_token_shard(std::string_view first_bytes);

// Writes DIRECTORY/SPLIT_000000.bin, SPLIT_000001.bin, ... of at most `shard_tokens` tokens each: uint16 ids, or uint32
// if the vocabulary exceeds 65,536. A header is written last, so an incomplete shard is never taken for a whole one.
// The directory must exist and must not have files of these names.
class ShardWriter {
public:
    ShardWriter(const std::string& directory, const std::string& split, int vocab_size,
                uint64_t shard_tokens = kDefaultShardTokens);
    void append(std::span<const int32_t> ids);  // each in [0, vocab_size)
    void finish();                              // all tokens are on disk when this returns

    uint64_t token_count() const { return token_count_; }
    const std::vector<std::string>& names() const { return names_; }  // of the files, without the directory

private:
    void open_next();
    void flush();
    void close_current();

    std::string directory_, split_;
    int vocab_size_, token_bytes_;
    uint64_t shard_tokens_, token_count_ = 0, shard_fill_ = 0;
    std::vector<std::string> names_;
    OutputFile file_;
    std::vector<std::byte> buffer_;
};

// Token shards: files of token ids behind a header of 1024 bytes, read by mapping and written in llm.c's layout.
//
// Recognised by their first words (little-endian int32):
//   20240520, 1, count            uint16 ids: llm.c's GPT-2 shards, what most published data sets use
//   20240801, 7, count            uint32 ids: llm.c's Llama 3 shards
//   278895051, 1, count, width    ids of 2 or 4 bytes: NeMo Automodel
//   "BIN.TOK\n", 2, 4, count, vocabulary, masked    int32 ids: LLM.Q. Its loss mask, if there is one, is not used
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/io/io.h"

inline constexpr size_t kShardHeaderBytes = 1024;
inline constexpr uint64_t kDefaultShardTokens = 100'000'000;

// What a header says about the tokens behind it.
struct ShardLayout {
    const char* name = "";  // "llm.c token shard (GPT-2)"
    uint64_t token_count = 0;
    int token_bytes = 0;      // width of an id: 2 or 4
    uint64_t mask_bytes = 0;  // behind the tokens
    uint64_t file_bytes() const { return kShardHeaderBytes + token_count * uint64_t(token_bytes) + mask_bytes; }
};

// A shard, mapped. Opening checks the header against the file's size and fails with Exit::data, saying what the file
// looks like and how long it is against how long it should be.
class TokenShard {
public:
    explicit TokenShard(const std::string& path);
    const std::string& path() const { return file_.path(); }
    const ShardLayout& layout() const { return layout_; }
    uint64_t token_count() const { return layout_.token_count; }
    std::string_view bytes() const { return file_.text(); }  // the whole file

    // out[i] = id of token begin + i, for begin + count <= token_count(). An id from 2^31 on comes out negative, so one
    // unsigned comparison with the vocabulary finds everything that is out of range.
    void copy(uint64_t begin, size_t count, int32_t* out) const;

private:
    MappedFile file_;
    ShardLayout layout_;
};

// Does the file begin like a token shard of any kind? For a reader that has to find out what it was given.
bool is_token_shard(std::string_view first_bytes);

// Writes DIRECTORY/SPLIT_000000.bin, SPLIT_000001.bin, ... of at most `shard_tokens` tokens each: uint16 ids, or uint32
// where the vocabulary exceeds 65,536. A header is written last, so no reader takes a shard that was cut short for a
// whole one. The directory must exist and must not have files of these names.
class ShardWriter {
public:
    ShardWriter(const std::string& directory, const std::string& split, int vocab_size,
                uint64_t shard_tokens = kDefaultShardTokens);
    void append(std::span<const int32_t> ids);  // each in [0, vocab_size)
    void finish();                              // everything is on disk when this returns

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

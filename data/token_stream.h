// Concatenated shards as one stream of tokens with 64-bit positions.
//
// Window i of length T, one training sample, is the tokens [i T, i T + T] of the stream: T + 1 tokens, of which the
// last is also the first of window i + 1, so every token but the first is a target exactly once. Windows may span
// shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data/shards.h"

class TokenStream {
public:
    // Maps the shards in the order given; ids must be below `vocab_size`. Fails like TokenShard.
    TokenStream(const std::vector<std::string>& paths, int vocab_size);

    uint64_t token_count() const { return begins_.back(); }
    int vocab_size() const { return vocab_size_; }
    const std::vector<TokenShard>& shards() const { return shards_; }

    // Number of complete windows of seq_len + 1 tokens.
    uint64_t window_count(int seq_len) const;

    // out[i] = token position + i. Requires position + count <= token_count(). Fails with Exit::data, naming the file
    // and the token's index in it, if an id is outside the vocabulary. Threads may read at the same time.
    void read(uint64_t position, size_t count, int32_t* out) const;

    // 32 hex digits over the number and order of the shards and each one's name (without directory), size and content:
    // all of it up to 4 MiB; of a longer file the first and last MiB and 64 blocks of 4 KiB spread evenly between, so
    // that hashing a thousand shards takes seconds. Detects renamed, reordered, replaced or grown shards; a change of a
    // few bytes in the middle of a large shard can go undetected.
    std::string digest() const;

    // "train_000000.bin and 2 more", for messages.
    std::string description() const;

private:
    std::vector<TokenShard> shards_;
    std::vector<uint64_t> begins_;  // (shards + 1), position of each shard's first token, then the total
    int vocab_size_;
};

// Files of token ids without a header, as written by nanoGPT: little-endian uint16.
#pragma once

#include "data/shards/shards.h"
#include "runtime/io/files.h"

// Appends the tokens [begin, end) of the file to the shards. Calls advance(ids) for each part. Returns the number of
// `eot` tokens. Fails with Exit::data if an id is outside the vocabulary.
uint64_t append_raw_tokens(const MappedFile& file, uint64_t begin, uint64_t end, int vocab_size, int eot,
                           ShardWriter& writer, const std::function<void(std::span<const int32_t> ids)>& advance);

// Returns the number of tokens in the file. Fails with Exit::data for an odd size, and for a token shard, which does
// not need conversion.
uint64_t raw_token_count(const MappedFile& file);

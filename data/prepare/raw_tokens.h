// Files of token ids without a header, as nanoGPT writes them: little-endian uint16.
#pragma once

#include "data/shards/shards.h"
#include "data/tokenizer/tokenizer.h"

// Appends the tokens [begin, end) of the file to the shards; returns how many of them are `eot`. Calls advance(ids) for
// each part. Fails with Exit::data for an id outside the vocabulary.
uint64_t append_raw_tokens(const MappedFile& file, uint64_t begin, uint64_t end, int vocab_size, int eot,
                           ShardWriter& writer, const std::function<void(std::span<const int32_t> ids)>& advance);

// Tokens of the file. Fails with Exit::data for an odd size and for a token shard, which needs no conversion.
uint64_t raw_token_count(const MappedFile& file);

// What a run reads: the tokens of its two splits and the tokenizer that made them.
#pragma once

#include <optional>
#include <string>

#include "data/token_stream.h"
#include "data/tokenizer.h"

struct Dataset {
    TokenStream train;
    std::optional<TokenStream> val;
    std::optional<Tokenizer> tokenizer;
};

// Opens data.train, data.val (globs) and data.tokenizer (a file); the last two may be empty for none. Errors name the
// key: Exit::no_input where nothing matches, Exit::data for a file that is not a shard, Exit::config for a tokenizer
// that has more tokens than `vocab_size` or that is not the one the shards were made with, as far as they say: prepare
// leaves a dataset.json beside them.
Dataset open_dataset(const std::string& train_glob, const std::string& val_glob, const std::string& tokenizer_path,
                     int vocab_size);

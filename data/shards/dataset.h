// A run's input: the tokens of its two splits and the tokenizer that made them.
#pragma once

#include "data/shards/mixture.h"
#include "data/tokenizer/tokenizer.h"

// One part of data.train: the shards that a pattern matches, and their weight among the parts.
struct WeightedGlob {
    std::string glob;
    double weight = 1;
};

struct Dataset {
    Mixture train;
    std::optional<TokenStream> val;
    std::optional<Tokenizer> tokenizer;
    std::string tokenizer_digest;  // as check_tokenizer() returns it
};

// Opens data.train, data.val (a glob) and data.tokenizer (a file); the last two may be empty. Errors name the key:
// fails with Exit::no_input if nothing matches, Exit::data for a file that is not a shard, and Exit::config if the
// tokenizer has more tokens than `vocab_size` or differs from the one in the dataset.json that prepare wrote beside the
// shards, and as Mixture() does.
Dataset open_dataset(const std::vector<WeightedGlob>& train, const std::string& val_glob,
                     const std::string& tokenizer_path, int vocab_size);

// What open_dataset() checks of the tokenizer, as far as the files are there: for `plan`, which needs no data. Returns
// the digest of the tokenizer that made the tokens: that of data.tokenizer, else the one that dataset.json records; ""
// if it is not known.
std::string check_tokenizer(const std::vector<WeightedGlob>& train, const std::string& tokenizer_path,
                            int vocab_size);

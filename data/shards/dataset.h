// The input of a run: the tokens of both splits and their tokenizer.
#pragma once

#include "data/shards/mixture.h"
#include "data/shards/shards.h"        // IWYU pragma: export
#include "data/tokenizer/tokenizer.h"  // IWYU pragma: export

// One part of data.train: the shards that match a pattern, and the weight of the part.
struct WeightedGlob {
    std::string glob;
    double weight = 1;
};

struct Dataset {
    Mixture train;
    std::optional<TokenStream> val;
    std::optional<Tokenizer> tokenizer;
    std::string tokenizer_digest;  // see check_tokenizer()
};

// Opens data.train, data.val (a glob) and data.tokenizer (a file); the last two may be empty. Errors name the key.
// Fails with Exit::no_input if no file matches, Exit::data if a file is not a shard, Exit::config if the tokenizer has
// more than `vocab_size` tokens or differs from the one in the dataset.json next to the shards, and like Mixture().
Dataset open_dataset(const std::vector<WeightedGlob>& train, const std::string& val_glob,
                     const std::string& tokenizer_path, int vocab_size);

// Makes the tokenizer checks of open_dataset() on the files that exist. `plan` uses it, because it needs no data.
// Returns the digest of data.tokenizer, or else the digest recorded in dataset.json; "" if unknown.
std::string check_tokenizer(const std::vector<WeightedGlob>& train, const std::string& tokenizer_path, int vocab_size);

#include "data/shards/dataset.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "data/shards/dataset_record.h"
#include "runtime/io/files.h"

// Returns the digest of the tokenizer that produced the shards; "" if unknown.
static std::string check_tokenizer(const std::optional<Tokenizer>& tokenizer, const std::string& path, int vocab_size,
                                   const std::vector<std::string>& shards) {
    if (tokenizer && tokenizer->vocab_size() > vocab_size)
        fail(Exit::config, "data.tokenizer: %s has %d tokens, but model.vocab_size is %d", path,
             tokenizer->vocab_size(), vocab_size);
    std::string digest = tokenizer ? tokenizer->digest() : "";
    std::set<std::string> directories;
    for (const std::string& shard : shards) {
        if (!directories.insert(directory_of(shard)).second) continue;
        const auto record = find_dataset_record(directory_of(shard));
        const std::string recorded = record ? record->tokenizer_digest : "";
        if (tokenizer && !recorded.empty() && recorded != digest)
            fail(Exit::config, "data.tokenizer: %s (digest %s) is not the tokenizer that %s was made with (digest %s)",
                 path, digest, shard, recorded);
        if (digest.empty()) digest = recorded;
    }
    return digest;
}

std::string check_tokenizer(const std::vector<WeightedGlob>& train, const std::string& tokenizer_path, int vocab_size) {
    std::vector<std::string> shards;
    for (const WeightedGlob& part : train) {
        try {
            std::ranges::move(expand_glob(part.glob, "data.train"), std::back_inserter(shards));
        } catch (const Error& error) {
            if (error.code != Exit::no_input) throw;
        }
    }
    std::optional<Tokenizer> tokenizer;
    if (file_exists(tokenizer_path)) tokenizer = Tokenizer::load(tokenizer_path);
    return check_tokenizer(tokenizer, tokenizer_path, vocab_size, shards);
}

Dataset open_dataset(const std::vector<WeightedGlob>& train, const std::string& val_glob,
                     const std::string& tokenizer_path, int vocab_size) {
    std::vector<std::string> shards;
    std::vector<TokenStream> streams;
    std::vector<double> weights;
    for (const WeightedGlob& part : train) {
        std::vector<std::string> paths = find_shards(part.glob, "data.train");
        streams.emplace_back(paths, vocab_size);
        weights.push_back(part.weight);
        std::ranges::move(paths, std::back_inserter(shards));
    }
    Dataset dataset{Mixture(std::move(streams), weights), std::nullopt, std::nullopt, ""};
    if (!val_glob.empty()) dataset.val.emplace(find_shards(val_glob, "data.val"), vocab_size);
    if (!tokenizer_path.empty()) dataset.tokenizer = Tokenizer::load(tokenizer_path);
    dataset.tokenizer_digest = check_tokenizer(dataset.tokenizer, tokenizer_path, vocab_size, shards);
    return dataset;
}

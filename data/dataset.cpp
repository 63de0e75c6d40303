#include "data/dataset.h"

#include <nlohmann/json.hpp>

#include "kernels/check.h"
#include "runtime/io/io.h"

namespace {

// The digest of the tokenizer that `prepare` made the shards in this directory with; empty if it did not make them.
std::string recorded_tokenizer(const std::string& directory) {
    const std::string path = directory + "/dataset.json";
    if (!file_exists(path)) return "";
    const nlohmann::ordered_json record = parse_json(read_file(path), path, Exit::data);
    const auto tokenizer = record.find("tokenizer");
    if (tokenizer == record.end() || !tokenizer->is_object()) return "";
    return tokenizer->value("xxh3", "");
}

void check_tokenizer(const Tokenizer& tokenizer, const std::string& path, const TokenStream& stream) {
    if (tokenizer.vocab_size() > stream.vocab_size())
        fail(Exit::config, "data.tokenizer: %s has %d tokens, but model.vocab_size is %d", path.c_str(),
             tokenizer.vocab_size(), stream.vocab_size());
    for (const TokenShard& shard : stream.shards()) {
        const size_t slash = shard.path().rfind('/');
        const std::string recorded =
            recorded_tokenizer(slash == std::string::npos ? "." : shard.path().substr(0, slash));
        if (!recorded.empty() && recorded != tokenizer.digest())
            fail(Exit::config, "data.tokenizer: %s (digest %s) is not the tokenizer that %s was made with (digest %s)",
                 path.c_str(), tokenizer.digest().c_str(), shard.path().c_str(), recorded.c_str());
    }
}

}  // namespace

Dataset open_dataset(const std::string& train_glob, const std::string& val_glob, const std::string& tokenizer_path,
                     int vocab_size) {
    Dataset dataset{TokenStream(expand_glob(train_glob, "data.train"), vocab_size), std::nullopt, std::nullopt};
    if (!val_glob.empty()) dataset.val.emplace(expand_glob(val_glob, "data.val"), vocab_size);
    if (!tokenizer_path.empty()) {
        dataset.tokenizer = Tokenizer::load(tokenizer_path);
        check_tokenizer(*dataset.tokenizer, tokenizer_path, dataset.train);
    }
    return dataset;
}

#include "data/dataset.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/io/io.h"

// The digest of the tokenizer that `prepare` made the shards in this directory with; "" without a dataset.json.
static std::string recorded_tokenizer(const std::filesystem::path& directory) {
    const std::string path = directory / "dataset.json";
    if (!file_exists(path)) return "";
    const nlohmann::ordered_json record = parse_json(read_file(path), path, Exit::data);
    const nlohmann::ordered_json::json_pointer digest("/tokenizer/xxh3");
    return record.contains(digest) && record[digest].is_string() ? record[digest].get<std::string>() : "";
}

static void check_tokenizer(const Tokenizer& tokenizer, const std::string& path, int vocab_size,
                            const std::vector<TokenShard>& shards) {
    if (tokenizer.vocab_size() > vocab_size)
        fail(Exit::config, "data.tokenizer: %s has %d tokens, but model.vocab_size is %d", path, tokenizer.vocab_size(),
             vocab_size);
    for (const TokenShard& shard : shards) {
        const std::string recorded = recorded_tokenizer(std::filesystem::path(shard.file.path()).parent_path());
        if (!recorded.empty() && recorded != tokenizer.digest())
            fail(Exit::config, "data.tokenizer: %s (digest %s) is not the tokenizer that %s was made with (digest %s)",
                 path, tokenizer.digest(), shard.file.path(), recorded);
    }
}

Dataset open_dataset(const std::string& train_glob, const std::string& val_glob, const std::string& tokenizer_path,
                     int vocab_size) {
    Dataset dataset{TokenStream(find_shards(train_glob, "data.train"), vocab_size), std::nullopt, std::nullopt};
    if (!val_glob.empty()) dataset.val.emplace(find_shards(val_glob, "data.val"), vocab_size);
    if (!tokenizer_path.empty()) {
        dataset.tokenizer = Tokenizer::load(tokenizer_path);
        check_tokenizer(*dataset.tokenizer, tokenizer_path, vocab_size, dataset.train.shards());
    }
    return dataset;
}

#include "data/inspect.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <vector>

#include "data/reject_file.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "kernels/check.h"

using PrintLine = std::function<void(const std::string&)>;

static constexpr uint64_t kFirstTokens = 32;

struct IdSummary {
    uint32_t smallest = UINT32_MAX, largest = 0;
    uint64_t largest_at = 0, eot_count = 0;
};

static IdSummary summarize_ids(const TokenShard& shard, int32_t eot) {
    IdSummary summary;
    std::vector<int32_t> ids(size_t(1) << 16);
    for (uint64_t begin = 0; begin < shard.token_count(); begin += ids.size()) {
        ids.resize(size_t(std::min<uint64_t>(ids.size(), shard.token_count() - begin)));
        shard.copy(begin, ids.size(), ids.data());
        for (size_t i = 0; i < ids.size(); i++) {
            const uint32_t id = uint32_t(ids[i]);
            summary.smallest = std::min(summary.smallest, id);
            if (id > summary.largest) summary.largest = id, summary.largest_at = begin + i;
            summary.eot_count += ids[i] == eot;
        }
    }
    return summary;
}

static std::optional<Tokenizer> tokenizer_beside(const std::string& path) {
    const std::string tokenizer = std::filesystem::path(path).replace_filename("tokenizer.json");
    if (!file_exists(tokenizer)) return std::nullopt;
    return Tokenizer::load(tokenizer);
}

static void inspect_shard(const std::string& path, const PrintLine& print) {
    TokenShard shard(path);
    const ShardLayout& layout = shard.layout();
    print(format("%s: %s", path.c_str(), layout.name));
    print(format("%llu tokens of %d bytes, %llu bytes with the header", (unsigned long long)layout.token_count,
                 layout.token_bytes, (unsigned long long)layout.file_bytes()));
    if (layout.mask_bytes > 0) print("it has a loss mask, which training ignores");
    if (shard.token_count() == 0) return;

    std::optional<Tokenizer> tokenizer = tokenizer_beside(path);
    const IdSummary ids = summarize_ids(shard, tokenizer ? tokenizer->eot() : -1);
    print(format("ids from %u to %u", ids.smallest, ids.largest));
    if (!tokenizer) return;
    if (ids.largest >= uint32_t(tokenizer->vocab_size()))
        reject_file(path, "token %llu is %u, but tokenizer.json beside it has %d tokens",
                    (unsigned long long)ids.largest_at, ids.largest, tokenizer->vocab_size());
    std::vector<int32_t> first(size_t(std::min(kFirstTokens, shard.token_count())));
    shard.copy(0, first.size(), first.data());
    print(format("%llu x %s", (unsigned long long)ids.eot_count, kEndOfText));
    print("begins with " + quoted(tokenizer->decode(first), 200));
}

static void inspect_tokenizer(const std::string& path, const PrintLine& print) {
    Tokenizer tokenizer = Tokenizer::load(path);
    int32_t longest = 0;
    for (int32_t id = 0; id < tokenizer.vocab_size(); id++)
        if (tokenizer.token(id).size() > tokenizer.token(longest).size()) longest = id;
    print(format("%s: byte-level BPE tokenizer", path.c_str()));
    print(format("%d tokens, %zu merges, %s is %d", tokenizer.vocab_size(), tokenizer.merges().size(), kEndOfText,
                 tokenizer.eot()));
    print(format("the longest token is %d, %s", longest, quoted(tokenizer.token(longest), 80).c_str()));
    print("xxh3 " + tokenizer.digest());
}

bool inspect_data_file(const std::string& path, const PrintLine& print) {
    MappedFile file(path);
    bool is_shard = is_token_shard(file.text());
    bool is_tokenizer = is_tokenizer_file(file.text()) || path.ends_with("vocab.json");
    if (is_shard) inspect_shard(path, print);
    if (is_tokenizer) inspect_tokenizer(path, print);
    return is_shard || is_tokenizer;
}

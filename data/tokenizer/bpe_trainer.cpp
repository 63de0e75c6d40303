#include "data/tokenizer/bpe_trainer.h"

#include <algorithm>
#include <optional>
#include <queue>
#include <vector>

// Longer words are counted in parts of this size to bound memory; tokens are far shorter.
static constexpr size_t kMaxWordBytes = 1024;

void WordCounter::add(std::string_view text) {
    text_bytes_ += text.size();
    pretokenizer_.split(text, [&](std::string_view word) {
        for (; !word.empty(); word.remove_prefix(std::min(word.size(), kMaxWordBytes))) {
            const std::string_view part = word.substr(0, kMaxWordBytes);
            auto known = counts_.find(part);
            if (known == counts_.end()) known = counts_.try_emplace(std::string(part)).first;
            known->second++;
        }
    });
}

void BpeTrainer::add(const WordMap<int64_t>& counts, uint64_t text_bytes) {
    text_bytes_ += text_bytes;
    for (const auto& [word, count] : counts) counts_[word] += count;
    if (counts_.size() <= max_words_) return;
    while (counts_.size() > max_words_ / 2) {
        rare_below_++;
        std::erase_if(counts_, [&](const auto& known) { return known.second < rare_below_; });
    }
}

namespace {

using PairKey = uint64_t;  // Merge::key()

// The words as sequences of tokens, and the count of each pair of adjacent tokens, updated by each merge.
class PairCounts {
public:
    void add_word(const std::vector<int32_t>& ids, int64_t count) {
        for (size_t i = 0; i + 1 < ids.size(); i++) add_pair({ids[i], ids[i + 1]}, count, uint32_t(words_.size()));
        words_.push_back({symbols_.size(), ids.size(), count});
        symbols_.insert(symbols_.end(), ids.begin(), ids.end());
    }

    // Removes and returns the most frequent pair. Ties go to the smallest key. Returns nullopt if no pair occurs twice.
    std::optional<Merge> take_most_frequent() {
        for (PairKey key : new_pairs_) queue_.push({pairs_[key].count, ~key});
        new_pairs_.clear();
        while (!queue_.empty() && queue_.top().first >= 2) {
            const auto [queued_count, inverted_key] = queue_.top();
            queue_.pop();
            const PairKey key = ~inverted_key;
            const int64_t count = pairs_[key].count;
            if (count == queued_count) return Merge{int32_t(key >> 32), int32_t(key)};
            queue_.push({count, inverted_key});  // the count has decreased since it was queued
        }
        return std::nullopt;
    }

    // Replaces the pair by token `id` in all words, from left to right. The pair cannot occur again, because no later
    // merge produces one of its tokens.
    void merge(Merge pair, int32_t id) {
        const std::vector<uint32_t> affected = std::move(pairs_[pair.key()].words);
        for (uint32_t word : affected) merge_in_word(word, pair, id);
    }

private:
    struct Word {
        size_t begin, length;
        int64_t count;
    };
    struct Pair {
        int64_t count = 0;
        std::vector<uint32_t> words;  // words that contain the pair now or did before a merge
    };

    // Adds `delta`, which may be negative, to the count of a pair in a word. The count of a pair increases only before
    // the next take_most_frequent(): later merges only create pairs with newer tokens.
    void add_pair(Merge merge, int64_t delta, uint32_t word) {
        const auto [known, is_new] = pairs_.try_emplace(merge.key());
        if (is_new) new_pairs_.push_back(merge.key());
        Pair& pair = known->second;
        pair.count += delta;
        if (delta > 0 && (pair.words.empty() || pair.words.back() != word)) pair.words.push_back(word);
    }

    void merge_in_word(uint32_t index, Merge pair, int32_t id) {
        auto& [begin, length, count] = words_[index];
        int32_t* ids = symbols_.data() + begin;
        size_t out = 0;
        for (size_t i = 0; i < length; i++) {
            if (i + 1 == length || ids[i] != pair.left || ids[i + 1] != pair.right) {
                ids[out++] = ids[i];
                continue;
            }
            if (out > 0) {
                add_pair({ids[out - 1], pair.left}, -count, index);
                add_pair({ids[out - 1], id}, count, index);
            }
            if (i + 2 < length) {
                add_pair({pair.right, ids[i + 2]}, -count, index);
                add_pair({id, ids[i + 2]}, count, index);
            }
            ids[out++] = id;
            i++;
        }
        length = out;
    }

    std::vector<int32_t> symbols_;  // of all words, concatenated
    std::vector<Word> words_;
    std::unordered_map<PairKey, Pair> pairs_;
    std::vector<PairKey> new_pairs_;  // pairs added since the last take_most_frequent()
    // (count, ~key) of all other pairs. An outdated count is too large.
    std::priority_queue<std::pair<int64_t, PairKey>> queue_;
};

}  // namespace

Tokenizer BpeTrainer::train(int vocab_size) const {
    std::vector<std::string> tokens;
    std::array<int32_t, 256> byte_ids;
    for (uint8_t byte : gpt2_byte_order()) {
        byte_ids[byte] = int32_t(tokens.size());
        tokens.emplace_back(1, char(byte));
    }
    PairCounts pairs;
    for (const auto& [word, count] : counts_) {
        std::vector<int32_t> ids;
        for (char byte : word) ids.push_back(byte_ids[uint8_t(byte)]);
        pairs.add_word(ids, count);
    }

    std::vector<Merge> merges;
    while (int(tokens.size()) + 1 < vocab_size) {
        const std::optional<Merge> pair = pairs.take_most_frequent();
        if (!pair) break;
        pairs.merge(*pair, int32_t(tokens.size()));
        tokens.push_back(tokens[size_t(pair->left)] + tokens[size_t(pair->right)]);
        merges.push_back(*pair);
    }
    tokens.emplace_back(kEndOfText);
    int32_t eot = int32_t(tokens.size()) - 1;
    return Tokenizer(std::move(tokens), std::move(merges), {eot}, "the trained tokenizer");
}

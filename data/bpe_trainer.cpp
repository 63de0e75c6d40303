#include "data/bpe_trainer.h"

#include <algorithm>
#include <queue>
#include <vector>

#include "kernels/check.h"

// Longer words are counted in parts of this size: it bounds memory, and a token is never longer by far.
static constexpr size_t kMaxWordBytes = 1024;

void BpeTrainer::add(std::string_view text) {
    pretokenizer_.split(text, [&](std::string_view word) {
        for (; !word.empty(); word.remove_prefix(std::min(word.size(), kMaxWordBytes))) {
            std::string_view part = word.substr(0, kMaxWordBytes);
            auto known = counts_.find(part);
            if (known == counts_.end()) known = counts_.emplace(part, 0).first;
            known->second++;
        }
        if (counts_.size() > max_words_) drop_rare_words();
    });
}

void BpeTrainer::drop_rare_words() {
    while (counts_.size() > max_words_ / 2) {
        rare_below_++;
        std::erase_if(counts_, [&](const auto& word) { return word.second < rare_below_; });
    }
}

namespace {

using PairKey = uint64_t;  // left id, right id: keys compare like pairs

PairKey key_of(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

// The words as sequences of tokens, and how often each pair of neighbours occurs, kept up to date from merge to merge.
class PairCounts {
public:
    void add_word(const std::vector<int32_t>& ids, int64_t count) {
        uint32_t word = uint32_t(words_.size());
        words_.push_back({symbols_.size(), ids.size(), count});
        symbols_.insert(symbols_.end(), ids.begin(), ids.end());
        for (size_t i = 0; i + 1 < ids.size(); i++) change(ids[i], ids[i + 1], count, word);
    }

    // The most frequent pair, of equals the one with the smallest key; count 0 if no pair is left.
    struct Best {
        Merge pair;
        int64_t count;
    };
    Best take_best() {
        queue_grown_pairs();
        while (!queue_.empty()) {
            auto [count, key] = queue_.top();
            queue_.pop();
            int64_t now = pairs_[key].count;
            if (now == count && now > 0) return {{int32_t(key >> 32), int32_t(key)}, now};
            if (now < count && now > 0) queue_.push({now, key});  // it has shrunk since it was queued
        }
        return {{0, 0}, 0};
    }

    // Replaces the pair by token `id` in all words, from left to right. It will never come back: its parts are
    // neighbours nowhere any more, and no other pair makes one of them.
    void merge(Merge pair, int32_t id) {
        std::vector<uint32_t> affected = std::move(pairs_[key_of(pair.left, pair.right)].words);
        for (uint32_t word : affected) merge_in_word(word, pair, id);
    }

private:
    struct Word {
        size_t begin, length;
        int64_t count;
    };
    struct Pair {
        int64_t count = 0;
        std::vector<uint32_t> words;  // that have it, or had it
    };
    struct QueueEntry {
        int64_t count;
        PairKey key;
        bool operator<(const QueueEntry& other) const {
            return count != other.count ? count < other.count : key > other.key;
        }
    };

    void change(int32_t left, int32_t right, int64_t delta, uint32_t word) {
        PairKey key = key_of(left, right);
        Pair& pair = pairs_[key];
        pair.count += delta;
        if (delta < 0 || (!pair.words.empty() && pair.words.back() == word)) return;
        pair.words.push_back(word);
        grown_.push_back(key);
    }

    void merge_in_word(uint32_t index, Merge pair, int32_t id) {
        Word& word = words_[index];
        int32_t* symbols = symbols_.data() + word.begin;
        size_t out = 0;
        for (size_t i = 0; i < word.length; i++) {
            if (i + 1 == word.length || symbols[i] != pair.left || symbols[i + 1] != pair.right) {
                symbols[out++] = symbols[i];
                continue;
            }
            if (out > 0) {
                change(symbols[out - 1], pair.left, -word.count, index);
                change(symbols[out - 1], id, word.count, index);
            }
            if (i + 2 < word.length) {
                change(pair.right, symbols[i + 2], -word.count, index);
                change(id, symbols[i + 2], word.count, index);
            }
            symbols[out++] = id;
            i++;
        }
        word.length = out;
    }

    // Every pair that occurs has a queue entry with its count or a larger one.
    void queue_grown_pairs() {
        std::sort(grown_.begin(), grown_.end());
        grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
        for (PairKey key : grown_) queue_.push({pairs_[key].count, key});
        grown_.clear();
    }

    std::vector<int32_t> symbols_;  // of all words, one after the other
    std::vector<Word> words_;
    std::unordered_map<PairKey, Pair> pairs_;
    std::vector<PairKey> grown_;  // pairs whose count has grown since the last take_best()
    std::priority_queue<QueueEntry> queue_;
};

}  // namespace

Tokenizer BpeTrainer::train(int vocab_size) const {
    require(vocab_size >= 257, "tokenizer: %d tokens are fewer than 256 bytes and %s", vocab_size, kEndOfText);
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
        auto [pair, count] = pairs.take_best();
        if (count < 2) break;
        pairs.merge(pair, int32_t(tokens.size()));
        tokens.push_back(tokens[size_t(pair.left)] + tokens[size_t(pair.right)]);
        merges.push_back(pair);
    }
    tokens.emplace_back(kEndOfText);
    int32_t eot = int32_t(tokens.size()) - 1;
    return Tokenizer(std::move(tokens), std::move(merges), {eot}, "the trained tokenizer");
}

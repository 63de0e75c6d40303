#include "data/encoder.h"

#include <algorithm>
#include <cstring>

#include "kernels/numeric.h"

static constexpr uint32_t kNone = UINT32_MAX;
static constexpr size_t kMaxKnownWords = size_t(1) << 17, kMaxKnownWordBytes = 48;
static constexpr int kShortWordBits = 16;

Encoder::Encoder(const Tokenizer& tokenizer, double dropout, uint64_t seed)
    : tokenizer_(tokenizer), dropout_(dropout), seed_(seed), short_words_(size_t(1) << kShortWordBits) {}

std::vector<int32_t> Encoder::encode(std::string_view text, uint64_t stream) {
    std::vector<int32_t> ids;
    append(text, ids, stream);
    return ids;
}

void Encoder::append(std::string_view text, std::vector<int32_t>& ids, uint64_t stream) {
    stream_ = stream;
    drawn_ = 0;
    pretokenizer_.split(text, [&](std::string_view word) {
        if (dropout_ > 0 || word.size() > kMaxKnownWordBytes)
            for (; !word.empty(); word.remove_prefix(std::min(word.size(), kMaxWordBytes)))
                merge_word(word.substr(0, kMaxWordBytes), ids);
        else if (word.size() <= ShortWord::kMaxBytes)
            append_short_word(word, ids);
        else
            append_long_word(word, ids);
    });
}

void Encoder::append_short_word(std::string_view word, std::vector<int32_t>& ids) {
    char padded[16] = {};
    for (size_t i = 0; i < word.size(); i++) padded[i] = word[i];
    padded[15] = char(word.size());
    uint64_t low, high;
    std::memcpy(&low, padded, 8);
    std::memcpy(&high, padded + 8, 8);
    const uint64_t hash = (low ^ (high * 0x9e3779b97f4a7c15u)) * 0xd6e8feb86659fd93u;
    ShortWord& slot = short_words_[hash >> (64 - kShortWordBits)];
    if (slot.low == low && slot.high == high) {
        ids.insert(ids.end(), slot.ids, slot.ids + slot.count);
        return;
    }
    const size_t before = ids.size(), count = (append_long_word(word, ids), ids.size() - before);
    if (count > ShortWord::kMaxIds) return;
    slot.low = low, slot.high = high, slot.count = int32_t(count);
    std::copy(ids.begin() + ptrdiff_t(before), ids.end(), slot.ids);
}

void Encoder::append_long_word(std::string_view word, std::vector<int32_t>& ids) {
    if (known_words_.size() >= kMaxKnownWords) known_words_.clear();
    auto known = known_words_.find(word);
    if (known == known_words_.end()) {
        known = known_words_.try_emplace(std::string(word)).first;
        merge_word(word, known->second);
    }
    ids.insert(ids.end(), known->second.begin(), known->second.end());
}

bool Encoder::drops_merge() {
    if (dropout_ == 0) return false;
    const uint64_t purpose = uint64_t(RandomPurpose::bpe_dropout) << 48 ^ stream_;
    return double(uniform_from_bits(philox(seed_, purpose, drawn_++).word[0])) < dropout_;
}

void Encoder::find_candidate(uint32_t left, uint32_t right) {
    if (left == kNone || right == kNone) return;
    const int32_t left_id = symbols_[left].id, right_id = symbols_[right].id;
    if (const Tokenizer::Merged* merged = tokenizer_.merged(left_id, right_id))
        candidates_.push({merged->rank, left, right, merged->id, left_id, right_id});
}

// Merges in a linked list with a heap of candidates: n log n, so that a word of a megabyte does no harm.
void Encoder::merge_word(std::string_view word, std::vector<int32_t>& ids) {
    constexpr int32_t kMerged = -1;  // into its left neighbor
    uint32_t count = uint32_t(word.size());
    symbols_.resize(count);
    for (uint32_t i = 0; i < count; i++)
        symbols_[i] = {tokenizer_.byte_id(uint8_t(word[i])), i - 1, i + 1 < count ? i + 1 : kNone};
    dropped_.clear();
    for (uint32_t i = 0; i + 1 < count; i++) find_candidate(i, i + 1);

    while (!candidates_.empty()) {
        const Candidate next = candidates_.top();
        candidates_.pop();
        Symbol &left = symbols_[next.left], &right = symbols_[next.right];
        if (left.id != next.left_id || right.id != next.right_id) continue;  // one of them has been merged meanwhile
        if (drops_merge()) {
            dropped_.push_back(next);
            continue;
        }
        for (const Candidate& candidate : dropped_) candidates_.push(candidate);
        dropped_.clear();
        left.id = next.id;
        left.next = right.next;
        right.id = kMerged;
        if (left.next != kNone) symbols_[left.next].previous = next.left;
        find_candidate(left.previous, next.left);
        find_candidate(next.left, left.next);
    }
    for (const Symbol& symbol : symbols_)
        if (symbol.id != kMerged) ids.push_back(symbol.id);
}

#include "data/encoder.h"

#include <algorithm>

#include "kernels/numeric.h"

static constexpr uint32_t kNone = UINT32_MAX;
static constexpr size_t kMaxKnownWords = size_t(1) << 17, kMaxKnownWordBytes = 48;

std::vector<int32_t> Encoder::encode(std::string_view text) {
    std::vector<int32_t> ids;
    encode(text, ids);
    return ids;
}

void Encoder::encode(std::string_view text, std::vector<int32_t>& ids) {
    pretokenizer_.split(text, [&](std::string_view word) { encode_word(word, ids); });
}

void Encoder::encode_word(std::string_view word, std::vector<int32_t>& ids) {
    if (dropout_ > 0) return merge_word(word, ids);
    if (auto known = known_words_.find(word); known != known_words_.end()) {
        auto first = known_ids_.begin() + known->second.begin;
        ids.insert(ids.end(), first, first + known->second.count);
        return;
    }
    size_t begin = ids.size();
    merge_word(word, ids);
    if (word.size() <= kMaxKnownWordBytes) remember(word, ids.data() + begin, ids.size() - begin);
}

void Encoder::remember(std::string_view word, const int32_t* ids, size_t count) {
    if (known_words_.size() >= kMaxKnownWords) {
        known_words_.clear();
        known_ids_.clear();
    }
    known_words_.emplace(word, Span{uint32_t(known_ids_.size()), uint32_t(count)});
    known_ids_.insert(known_ids_.end(), ids, ids + count);
}

// The heap's order: the merge of the lowest rank, of equals the leftmost, comes out first.
template <class Candidate> static bool comes_later(const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

bool Encoder::leaves_out() {
    if (dropout_ == 0) return false;
    const uint64_t purpose = uint64_t(RandomPurpose::bpe_dropout) << 32;
    return double(uniform_from_bits(philox(seed_, purpose, drawn_++).word[0])) < dropout_;
}

void Encoder::propose(uint32_t left, uint32_t right) {
    if (left == kNone || right == kNone) return;
    const Tokenizer::Merged* merged = tokenizer_.merged(symbols_[left].id, symbols_[right].id);
    if (!merged) return;
    candidates_.push_back({merged->rank, merged->id, left, right, symbols_[left].id, symbols_[right].id});
    std::push_heap(candidates_.begin(), candidates_.end(), comes_later<Candidate>);
}

// Merges in a linked list with a heap of candidates: n log n, so that a word of a megabyte does no harm.
void Encoder::merge_word(std::string_view word, std::vector<int32_t>& ids) {
    constexpr int32_t kGone = -1;
    uint32_t count = uint32_t(word.size());
    symbols_.resize(count);
    for (uint32_t i = 0; i < count; i++)
        symbols_[i] = {tokenizer_.byte_id(uint8_t(word[i])), i - 1, i + 1 < count ? i + 1 : kNone};
    candidates_.clear();
    left_out_.clear();
    for (uint32_t i = 0; i + 1 < count; i++) propose(i, i + 1);

    while (!candidates_.empty()) {
        std::pop_heap(candidates_.begin(), candidates_.end(), comes_later<Candidate>);
        Candidate next = candidates_.back();
        candidates_.pop_back();
        Symbol &left = symbols_[next.left], &right = symbols_[next.right];
        if (left.id != next.left_id || right.id != next.right_id) continue;  // one of them has been merged meanwhile
        if (leaves_out()) {
            left_out_.push_back(next);
            continue;
        }
        for (const Candidate& candidate : left_out_) {
            candidates_.push_back(candidate);
            std::push_heap(candidates_.begin(), candidates_.end(), comes_later<Candidate>);
        }
        left_out_.clear();
        left.id = next.id;
        left.next = right.next;
        right.id = kGone;
        if (left.next != kNone) symbols_[left.next].previous = next.left;
        propose(left.previous, next.left);
        propose(next.left, left.next);
    }
    for (const Symbol& symbol : symbols_)
        if (symbol.id != kGone) ids.push_back(symbol.id);
}

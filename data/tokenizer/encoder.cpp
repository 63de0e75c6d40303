#include "data/tokenizer/encoder.h"

#include <algorithm>
#include <cstring>

#include "data/tokenizer/nfc.h"
#include "data/tokenizer/text_rules.h"
#include "kernels/numeric.h"
#include "runtime/io/utf8.h"

static constexpr uint32_t kNone = UINT32_MAX;
static constexpr size_t kMaxKnownWords = size_t(1) << 17, kFirstKnownWords = size_t(1) << 12;  // powers of two
static constexpr size_t kMaxKnownWordBytes = 48;
static constexpr int kShortWordBits = 16;
static constexpr size_t kFewSymbols = 32;

// Normalizes the added tokens that are matched in normalized text.
static std::vector<AddedToken> normalized_tokens(const TextRules& rules) {
    std::vector<AddedToken> tokens = rules.added;
    for (AddedToken& token : tokens) {
        if (!token.is_normalized) continue;
        if (rules.normalization == Normalization::nfc) token.text = to_nfc(token.text);
        if (rules.normalization == Normalization::spaces) token.text = with_spaces(token.text);
        if (rules.prefix == SpacePrefix::always) token.text.insert(0, 1, ' ');
    }
    return tokens;
}

Encoder::Encoder(const Tokenizer& tokenizer, double dropout, uint64_t seed)
    : tokenizer_(tokenizer),
      dropout_(dropout),
      seed_(seed),
      pretokenizer_(tokenizer.rules().steps),
      added_(tokenizer.rules().added, false),
      added_normalized_(normalized_tokens(tokenizer.rules()), true),
      is_plain_(added_.is_empty() && added_normalized_.is_empty() &&
                tokenizer.rules().normalization == Normalization::none),
      short_words_(size_t(1) << kShortWordBits) {}

std::vector<int32_t> Encoder::encode(std::string_view text, uint64_t stream) {
    std::vector<int32_t> ids;
    append(text, ids, stream);
    return ids;
}

void Encoder::append(std::string_view text, std::vector<int32_t>& ids, uint64_t stream, bool begins_text) {
    stream_ = stream;
    drawn_ = 0;
    if (is_plain_) return append_words(text, ids);
    added_.split(text, ids, [&](std::string_view stretch) {
        const bool is_first = stretch.data() == text.data();  // of the text's stretches and added tokens
        append_stretch(stretch, is_first, begins_text, ids);
    });
}

// Encodes a stretch of text between added tokens.
void Encoder::append_stretch(std::string_view text, bool is_first, bool begins_text, std::vector<int32_t>& ids) {
    const TextRules& rules = tokenizer_.rules();
    std::string changed;
    if (rules.normalization == Normalization::nfc && !is_certainly_nfc(text)) text = changed = to_nfc(text);
    if (rules.normalization == Normalization::spaces) {
        changed = with_spaces(text);
        const bool goes_on = is_first && !begins_text, has_space = changed.starts_with(' ');
        const bool is_prefixed = rules.prefix == SpacePrefix::always               ? true
                                 : rules.prefix == SpacePrefix::unless_space       ? !has_space
                                 : rules.prefix == SpacePrefix::first_unless_space ? is_first && !has_space
                                                                                   : false;
        if (is_prefixed && !goes_on) changed.insert(0, 1, ' ');
        text = changed;
    }
    added_normalized_.split(text, ids, [&](std::string_view stretch) { append_words(stretch, ids); });
}

void Encoder::append_words(std::string_view text, std::vector<int32_t>& ids) {
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

Encoder::KnownWord& Encoder::slot_of(std::string_view word, uint64_t hash) {
    const size_t mask = known_words_.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        KnownWord& slot = known_words_[at];
        const bool is_it = slot.hash == hash && slot.n_bytes == word.size() &&
                           std::memcmp(known_bytes_.data() + slot.bytes_begin, word.data(), word.size()) == 0;
        if (is_it || slot.n_bytes == 0) return slot;
    }
}

void Encoder::make_room_for_word() {
    if (2 * n_known_words_ < known_words_.size()) return;
    if (n_known_words_ >= kMaxKnownWords) {
        known_words_.assign(known_words_.size(), {});
        known_bytes_.clear();
        known_ids_.clear();
        n_known_words_ = 0;
        return;
    }
    std::vector<KnownWord> before(std::max<size_t>(4 * known_words_.size(), kFirstKnownWords));
    known_words_.swap(before);
    for (const KnownWord& word : before)
        if (word.n_bytes > 0)
            slot_of(std::string_view(known_bytes_).substr(word.bytes_begin, word.n_bytes), word.hash) = word;
}

void Encoder::append_long_word(std::string_view word, std::vector<int32_t>& ids) {
    make_room_for_word();
    const uint64_t hash = WordHash()(word);
    KnownWord& known = slot_of(word, hash);
    if (known.n_bytes > 0) {
        const auto begin = known_ids_.begin() + ptrdiff_t(known.ids_begin);
        ids.insert(ids.end(), begin, begin + known.n_ids);
        return;
    }
    const size_t before = ids.size();
    merge_word(word, ids);
    known = {hash, known_bytes_.size(), known_ids_.size(), uint32_t(word.size()), uint32_t(ids.size() - before)};
    known_bytes_.append(word);
    known_ids_.insert(known_ids_.end(), ids.begin() + ptrdiff_t(before), ids.end());
    n_known_words_++;
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

// Starts with the bytes of the word. For a tokenizer with byte tokens, starts with its characters, and with the bytes
// of characters that are not tokens.
void Encoder::start_symbols(std::string_view word) {
    symbols_.clear();
    auto push = [&](int32_t id) {
        if (id >= 0) symbols_.push_back({id, uint32_t(symbols_.size()) - 1, uint32_t(symbols_.size()) + 1});
    };
    if (tokenizer_.rules().byte_tokens.empty()) {
        for (const char byte : word) push(tokenizer_.byte_id(uint8_t(byte)));
    } else {
        for (size_t length; !word.empty(); word.remove_prefix(length)) {
            length = std::max<size_t>(utf8_length(word), 1);
            const int32_t id = tokenizer_.find(word.substr(0, length));
            if (id >= 0) push(id);
            for (size_t i = 0; id < 0 && i < length; i++) push(tokenizer_.byte_id(uint8_t(word[i])));
        }
    }
    if (!symbols_.empty()) symbols_.back().next = kNone;
}

void Encoder::merge_word(std::string_view word, std::vector<int32_t>& ids) {
    if (tokenizer_.rules().whole_words_first && (dropout_ == 0 || tokenizer_.merges().empty()))
        if (const int32_t id = tokenizer_.find(word); id >= 0) return ids.push_back(id);
    start_symbols(word);
    if (dropout_ == 0 && symbols_.size() <= kFewSymbols)
        merge_few(ids);
    else
        merge_many(ids);
}

// Merges in arrays: repeatedly applies the leftmost merge of the lowest rank. Fastest for short words, i.e. most words.
void Encoder::merge_few(std::vector<int32_t>& ids) {
    int32_t symbol[kFewSymbols + 1], rank[kFewSymbols + 1], merged[kFewSymbols + 1];  // merge with the next symbol
    size_t count = symbols_.size();
    auto look_up = [&](size_t i) {
        const Tokenizer::Merged* found = i + 1 < count ? tokenizer_.merged(symbol[i], symbol[i + 1]) : nullptr;
        rank[i] = found ? found->rank : INT32_MAX;
        merged[i] = found ? found->id : -1;
    };
    for (size_t i = 0; i < count; i++) symbol[i] = symbols_[i].id;
    for (size_t i = 0; i < count; i++) look_up(i);
    while (count > 1) {
        const size_t best = size_t(std::min_element(rank, rank + count) - rank);
        if (rank[best] == INT32_MAX) break;
        symbol[best] = merged[best];
        count--;
        for (size_t i = best + 1; i < count; i++)
            symbol[i] = symbol[i + 1], rank[i] = rank[i + 1], merged[i] = merged[i + 1];
        look_up(best);
        if (best > 0) look_up(best - 1);
    }
    ids.insert(ids.end(), symbol, symbol + count);
}

// Merges in a linked list with a heap of candidates. Takes O(n log n), so that long words stay fast.
void Encoder::merge_many(std::vector<int32_t>& ids) {
    constexpr int32_t kMerged = -1;  // merged into its left neighbor
    dropped_.clear();
    for (uint32_t i = 0; i + 1 < symbols_.size(); i++) find_candidate(i, i + 1);

    while (!candidates_.empty()) {
        const Candidate next = candidates_.top();
        candidates_.pop();
        Symbol &left = symbols_[next.left], &right = symbols_[next.right];
        if (left.id != next.left_id || right.id != next.right_id) continue;  // outdated: one of them was merged
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

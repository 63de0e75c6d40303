#include "data/tokenizer/tokenizer.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "kernels/base/check.h"
#include "runtime/io/digest.h"
#include "runtime/io/reject_file.h"
#include "runtime/io/utf8.h"

std::array<uint8_t, 256> gpt2_byte_order() {
    auto prints = [](int byte) {
        return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    };
    std::array<uint8_t, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_partition(order.begin(), order.end(), prints);
    return order;
}

std::string quoted(std::string_view bytes, size_t max_bytes) {
    std::string text = "\"";
    for (char byte : bytes.substr(0, max_bytes)) {
        bool prints = byte >= ' ' && byte <= '~';
        text += prints ? std::string(1, byte) : format("\\x%02x", uint8_t(byte));
    }
    return text + (bytes.size() > max_bytes ? "...\"" : "\"");
}

Tokenizer::Tokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, std::vector<int32_t> special,
                     const std::string& origin, TextRules rules)
    : tokens_(std::move(tokens)), merges_(std::move(merges)), special_(tokens_.size()), rules_(std::move(rules)) {
    auto exists = [&](int32_t id) { return id >= 0 && size_t(id) < tokens_.size(); };
    for (int32_t id : special) {
        if (!exists(id)) reject_file(origin, "the special token %d does not exist", id);
        special_[size_t(id)] = true;
    }
    auto special_called = [&](std::string_view name) {
        for (int32_t id : special)
            if (!name.empty() && token(id) == name) return int(id);  // unused ids of a vocabulary have no name
        return -1;
    };
    eot_ = special_called(rules_.document_end);
    for (const char* name : kEndNames)
        if (eot_ < 0) eot_ = special_called(name);
    if (const int chosen = special_called(rules_.chosen_end); chosen >= 0)
        has_chosen_end_ = std::exchange(eot_, chosen) != chosen;
    if (eot_ < 0)
        reject_file(origin,
                    "no special token is called %s; set the end of text with --end-of-text TOKEN, or with eos_token in "
                    "tokenizer_config.json in the same directory",
                    kEndOfText);
    document_start_ = rules_.document_start.empty() ? eot_ : special_called(rules_.document_start);
    if (document_start_ < 0) reject_file(origin, "no special token is called %s", rules_.document_start);
    prefix_ = {eot_};
    if (document_start_ != eot_) prefix_.push_back(document_start_);

    // Maps bytes to tokens, without special and byte tokens; vocabulary tokens take precedence over added tokens.
    enum Source : char { vocabulary, added, byte };
    std::vector<Source> sources(tokens_.size(), vocabulary);
    for (const AddedToken& one : rules_.added) sources[size_t(one.id)] = added;
    for (int32_t id : rules_.byte_tokens) sources[size_t(id)] = byte;
    std::unordered_map<std::string_view, int32_t> ids;
    for (Source source : {vocabulary, added})
        for (int32_t id = 0; id < vocab_size(); id++) {
            if (is_special(id) || sources[size_t(id)] != source) continue;
            auto [known, is_new] = ids.emplace(token(id), id);
            if (!is_new && source == vocabulary)
                reject_file(origin, "the tokens %d and %d are both %s", known->second, id, quoted(token(id)));
        }
    for (size_t value = 0; value < 256; value++) {
        auto known = ids.find(std::string(1, char(value)));
        const int32_t id = known == ids.end() ? -1 : known->second;
        byte_ids_[value] = rules_.byte_tokens.empty() ? id : rules_.byte_tokens[value];
        if (byte_ids_[value] < 0 && !rules_.drops_bytes)
            reject_file(origin, "the byte 0x%02x has no token", unsigned(value));
    }

    slot_shift_ = 64 - std::bit_width(2 * merges_.size() + 1);
    slots_.resize(size_t(1) << (64 - slot_shift_));
    for (size_t rank = 0; rank < merges_.size(); rank++) {
        auto [left, right] = merges_[rank];
        if (!exists(left) || !exists(right) || is_special(left) || is_special(right))
            reject_file(origin, "merge %zu joins the tokens %d and %d, but one does not exist or is special", rank,
                        left, right);
        const std::string both = token(left) + token(right);
        auto known = ids.find(both);
        if (known == ids.end()) reject_file(origin, "merge %zu gives %s, which is not a token", rank, quoted(both));
        check_boundaries(both, rank, origin);
        const uint64_t key = merges_[rank].key();
        size_t at = slot_of(key);
        while (slots_[at].merged.id >= 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
        slots_[at] = {key, {int32_t(rank), known->second}};  // the last of equal pairs wins
    }
    words_.assign(std::bit_ceil(2 * ids.size() + 1), -1);
    for (const auto& [bytes, id] : ids) {
        size_t at = WordHash()(bytes) & (words_.size() - 1);
        while (words_[at] >= 0) at = (at + 1) & (words_.size() - 1);
        words_[at] = id;
    }
}

// SentencePiece merges whole texts. Text can be cut into words if no merge gives a token with a space or a line end
// after another character.
void Tokenizer::check_boundaries(const std::string& merged_bytes, size_t rank, const std::string& origin) const {
    if (rules_.byte_tokens.empty()) return;
    const size_t word = std::min(merged_bytes.find_first_not_of(' '), merged_bytes.size());
    if (merged_bytes.find_first_of(" \r\n", word) != std::string::npos)
        reject_file(origin,
                    "merge %zu gives %s, which has a space or a line end after another character; this is not "
                    "supported",
                    rank, quoted(merged_bytes));
}

Tokenizer Tokenizer::bytes() {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; byte++) tokens.emplace_back(1, char(byte));
    tokens.emplace_back(kEndOfText);
    return Tokenizer(std::move(tokens), {}, {256}, "the byte tokenizer");
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool begins_text) const {
    std::string text;
    for (int32_t id : ids) {
        require(id >= 0 && id < vocab_size(), "tokenizer: no token %d in a vocabulary of %d", id, vocab_size());
        text += token(id);
    }
    if (begins_text && rules_.prefix != SpacePrefix::none && text.starts_with(' ')) text.erase(0, 1);
    return text;
}

std::string Tokenizer::warning() const {
    const auto count = std::ranges::count(byte_ids_, -1);
    const bool is_of_characters = merges_.empty() && rules_.whole_words_first;  // has few bytes by design
    return count == 0 || is_of_characters ? ""
                                          : format("%d of 256 bytes have no token: encoding drops them", int(count));
}

// Returns the length of an incomplete character at the end of the text.
static size_t incomplete_length(std::string_view text) {
    for (size_t length = 1; length <= std::min<size_t>(3, text.size()); length++) {
        const std::string_view end = text.substr(text.size() - length);
        const uint8_t first = uint8_t(end[0]);
        if ((first & 0xc0) == 0x80) continue;  // a continuation byte
        const size_t whole = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
        if (first > 0xf4 || whole <= length) return 0;
        // Any continuation bytes complete the character, unless the second byte is out of range.
        for (const char* rest : {"\x80\x80\x80", "\xbf\xbf\xbf"})
            if (utf8_length(std::string(end).append(rest, whole - length)) > 0) return length;
        return 0;
    }
    return 0;
}

std::string StreamDecoder::add(std::string_view text) {
    held_ += text;
    const size_t complete = held_.size() - incomplete_length(held_);
    std::string characters = held_.substr(0, complete);
    held_.erase(0, complete);
    return characters;
}

std::string Tokenizer::digest() const {
    Digest digest;
    for (int32_t id = 0; id < vocab_size(); id++) {
        digest.add_number(token(id).size());
        digest.add_number(is_special(id));
        digest.add(token(id));
    }
    digest.add(merges_.data(), merges_.size() * sizeof(Merge));
    digest.add(rules_.identity);
    if (has_chosen_end_) digest.add(token(eot_));
    return digest.hex();
}

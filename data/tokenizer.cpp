#include "data/tokenizer.h"

#include <algorithm>
#include <numeric>

#include "data/digest.h"
#include "data/reject_file.h"

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
                     const std::string& origin)
    : tokens_(std::move(tokens)), merges_(std::move(merges)), special_(tokens_.size()) {
    auto exists = [&](int32_t id) { return id >= 0 && size_t(id) < tokens_.size(); };
    for (int32_t id : special) {
        if (!exists(id)) reject_file(origin, "the special token %d does not exist", id);
        special_[size_t(id)] = true;
        if (token(id) == kEndOfText) eot_ = id;
    }
    if (eot_ < 0) reject_file(origin, "no special token is called %s", kEndOfText);

    std::unordered_map<std::string_view, int32_t> ids;
    for (int32_t id = 0; id < vocab_size(); id++) {
        if (is_special(id)) continue;
        auto [known, is_new] = ids.emplace(token(id), id);
        if (!is_new) reject_file(origin, "the tokens %d and %d are both %s", known->second, id, quoted(token(id)));
    }
    for (int byte = 0; byte < 256; byte++) {
        auto known = ids.find(std::string(1, char(byte)));
        if (known == ids.end()) reject_file(origin, "no token stands for the byte 0x%02x", byte);
        byte_ids_[size_t(byte)] = known->second;
    }
    merged_.reserve(merges_.size());
    for (size_t rank = 0; rank < merges_.size(); rank++) {
        auto [left, right] = merges_[rank];
        if (!exists(left) || !exists(right) || is_special(left) || is_special(right))
            reject_file(origin, "merge %zu joins the tokens %d and %d, of which one does not exist or is special", rank,
                        left, right);
        auto known = ids.find(token(left) + token(right));
        if (known == ids.end())
            reject_file(origin, "merge %zu makes %s, which is not a token", rank, quoted(token(left) + token(right)));
        merged_[merges_[rank].key()] = {int32_t(rank), known->second};  // the last one of equal pairs counts
    }
}

Tokenizer Tokenizer::bytes() {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; byte++) tokens.emplace_back(1, char(byte));
    tokens.emplace_back(kEndOfText);
    return Tokenizer(std::move(tokens), {}, {256}, "the byte tokenizer");
}

const Tokenizer::Merged* Tokenizer::merged(int32_t left, int32_t right) const {
    auto found = merged_.find(Merge{left, right}.key());
    return found == merged_.end() ? nullptr : &found->second;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
    std::string text;
    for (int32_t id : ids) {
        require(id >= 0 && id < vocab_size(), "tokenizer: no token %d in a vocabulary of %d", id, vocab_size());
        text += token(id);
    }
    return text;
}

std::string Tokenizer::digest() const {
    Digest digest;
    for (int32_t id = 0; id < vocab_size(); id++) {
        digest.add_number(token(id).size());
        digest.add_number(is_special(id));
        digest.add(token(id));
    }
    digest.add(merges_.data(), merges_.size() * sizeof(Merge));
    return digest.hex();
}

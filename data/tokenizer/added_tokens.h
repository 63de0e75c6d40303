// Finds added tokens in text.
#pragma once

#include <algorithm>
#include <array>

#include "data/tokenizer/text_rules.h"
#include "data/tokenizer/white_space.h"

// If several tokens match at a position, the longest one wins, as in Hugging Face's tokenizers. Special tokens are not
// found, but hide the tokens inside them.
class AddedTokenFinder {
public:
    // Uses only the tokens whose is_normalized equals `normalized`.
    AddedTokenFinder(const std::vector<AddedToken>& tokens, bool normalized) {
        for (const AddedToken& token : tokens)
            if (token.is_normalized == normalized) tokens_.push_back(token);
        if (std::ranges::all_of(tokens_, &AddedToken::is_special)) tokens_.clear();
        std::ranges::stable_sort(tokens_, std::ranges::greater(), [](const AddedToken& t) { return t.text.size(); });
        for (const AddedToken& token : tokens_) may_begin_[uint8_t(token.text[0])] = true;
    }

    bool is_empty() const { return tokens_.empty(); }

    // Appends the id of each token found, and calls visit(text) for each nonempty stretch of text between tokens.
    template <class Visit> void split(std::string_view text, std::vector<int32_t>& ids, const Visit& visit) const {
        size_t done = 0;
        for (size_t at = 0; !tokens_.empty() && at < text.size(); at++) {
            if (!may_begin_[uint8_t(text[at])]) continue;
            const auto found = std::ranges::find_if(
                tokens_, [&](const AddedToken& token) { return text.substr(at).starts_with(token.text); });
            if (found == tokens_.end()) continue;
            size_t begin = at, end = at + found->text.size();
            at = end - 1;
            if (found->is_special) continue;
            if (found->strips_left) begin = std::max(done, right_stripped(text.substr(0, begin)).size());
            while (found->strips_right && white_space_length(text.substr(end)) > 0)
                end += white_space_length(text.substr(end));
            if (begin > done) visit(text.substr(done, begin - done));
            ids.push_back(found->id);
            done = end;
            at = end - 1;
        }
        if (done < text.size()) visit(text.substr(done));
    }

private:
    std::vector<AddedToken> tokens_;  // longest first
    std::array<bool, 256> may_begin_{};
};

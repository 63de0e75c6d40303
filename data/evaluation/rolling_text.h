// Windows over a text that predict each of its tokens once, for rolling perplexity.
#pragma once

#include "data/text/text_input.h"
#include "data/tokenizer/tokenizer.h"
#include "kernels/base/batch.h"

// The windows match loglikelihood_rolling of lm-evaluation-harness (lm_eval/utils.py, get_rolling_token_windows). The
// first window predicts the first T tokens of a document after kEndOfText. Each later window predicts the next `stride`
// tokens (0: T) and has T tokens; if fewer tokens are left to predict, it starts earlier.
class RollingText {
public:
    // Reads and tokenizes the whole input; takes four bytes of memory per token. Fails like TextInput, and with
    // Exit::data if the input has no tokens.
    RollingText(TextInput input, const Tokenizer& tokenizer, int seq_len, int stride);

    uint64_t windows() const { return windows_.size(); }
    uint64_t tokens() const { return tokens_; }  // predicted tokens

    // Returns batch `number` of `rows` windows, padded with target -1 after the last window. Valid until the next call.
    Batch batch(uint64_t number, int rows);

private:
    struct Window {
        uint64_t begin;            // index in ids_
        uint32_t inputs, targets;  // the targets belong to the last inputs
    };
    void add_windows(uint64_t begin);

    const uint64_t seq_len_, stride_;
    std::vector<int32_t> ids_;  // the documents, each after kEndOfText
    std::vector<Window> windows_;
    uint64_t tokens_ = 0;
    std::vector<int32_t> inputs_, targets_;
};

// Text for its perplexity: windows that predict each of its tokens once.
#pragma once

#include "data/text/text_input.h"
#include "data/tokenizer/tokenizer.h"
#include "kernels/base/batch.h"

// The windows are those of lm-evaluation-harness's loglikelihood_rolling (lm_eval/utils.py,
// get_rolling_token_windows): the first predicts the first T tokens of a document behind kEndOfText, each further one
// `stride` more (0: T), and all but the first have T tokens. So the last one begins earlier where less is left.
class RollingText {
public:
    // Reads and tokenizes all of it: four bytes of memory per token. Fails like TextInput, and with
    // Exit::data if there is no token.
    RollingText(TextInput input, const Tokenizer& tokenizer, int seq_len, int stride);

    uint64_t windows() const { return windows_.size(); }
    uint64_t tokens() const { return tokens_; }  // that are predicted
    // As lm-evaluation-harness counts them, the pieces between runs of white space: len(re.split(r"\s+", document)).
    uint64_t words() const { return words_; }

    // Batch `number` of `rows` windows; behind the last one comes padding with target -1. Valid until the next call.
    Batch batch(uint64_t number, int rows);

private:
    struct Window {
        uint64_t begin;            // in ids_
        uint32_t inputs, targets;  // the targets are those of the last inputs
    };
    void add_windows(uint64_t begin);

    const uint64_t seq_len_, stride_;
    std::vector<int32_t> ids_;  // kEndOfText and a document, one behind the other
    std::vector<Window> windows_;
    uint64_t tokens_ = 0, words_ = 0;
    std::vector<int32_t> inputs_, targets_;
};

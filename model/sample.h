// Sampling text from a model, token by token.
#pragma once

#include <functional>

#include "model/gpt.h"

struct SampleOptions {
    int tokens = 128;          // maximum number of new tokens
    double temperature = 1.0;  // divides the logits; 0: always the most likely token
    int top_k = 0;             // keep the k most likely tokens; 0: all
    double top_p = 1.0;        // keep the smallest top set whose probabilities reach this; 1: all
    double min_p = 0.0;        // keep tokens at least this times as likely as the top one
    uint64_t seed = 0;
    int stop_token = -1;  // ends the text and is not passed to the caller; -1: none
};

// Continues each prompt (at least one token). Passes each new token to on_token, which returns whether the text of
// prompt number `prompt` continues; on_end follows the text's last token. A text depends only on the weights, its
// prompt and the options, not on the other prompts, except for ties within rounding errors. With
// options().cached_sequences, that many texts grow in parallel, and each token is computed from itself and the KV
// cache. Without a cache, texts grow in turn, and the whole visible text is recomputed for each token. If a text grows
// beyond seq_len = T, the model sees the last part: whenever the text would not fit, it loses its first T / 2 tokens.
// Overwrites the model's activations.
void sample(Gpt& gpt, const std::vector<std::vector<int>>& prompts, const SampleOptions& options,
            const std::function<bool(size_t prompt, int token)>& on_token,
            const std::function<void(size_t prompt)>& on_end);

// Returns the token that a uniform number in (0, 1) picks from softmax(logits / temperature). The candidates are
// restricted in three steps: to the top_k largest logits; of these, renormalized, to the smallest top set whose
// probabilities reach top_p (nucleus sampling; Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv
// 1904.09751, section 3.1); and to tokens that reach min_p times the largest probability (Nguyen et al., "Turning Up
// the Heat", arXiv 2407.01082, section 3). Ties go to the smaller id. The most likely token always remains. `logits` is
// used as working memory.
int pick_token(std::vector<float>& logits, const SampleOptions& options, float uniform);

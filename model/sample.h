// Sampling text from a model, token by token.
#pragma once

#include <functional>

#include "model/gpt.h"

struct SampleOptions {
    int tokens = 128;          // new ones, at most
    double temperature = 1.0;  // divides the logits; 0: always the likeliest token
    int top_k = 0;             // only the k likeliest may follow; 0: all may
    double top_p = 1.0;        // only the fewest likeliest whose probabilities sum to this may follow; 1: all may
    double min_p = 0.0;        // only those may follow that are at least this times as likely as the likeliest
    uint64_t seed = 0;
    int stop_token = -1;  // ends the text and is not passed on; -1: none
};

// Continues each prompt (at least one token) and passes each new token to the caller's function, which returns whether
// the text of prompt number `prompt` goes on; on_end follows the text's last token. A text is a function of the
// weights, its prompt and the options alone, whatever the other prompts are, but for ties within rounding errors.
// With options().cached_sequences that many texts grow at once, each token computed from itself and the keys and values
// of those before; without, one after another, and all that is seen is computed again for each token. Of a text longer
// than seq_len = T the model sees the last part: T / 2 tokens at its beginning are lost whenever it would not fit.
// Overwrites the model's activations.
void sample(Gpt& gpt, const std::vector<std::vector<int>>& prompts, const SampleOptions& options,
            const std::function<bool(size_t prompt, int token)>& on_token,
            const std::function<void(size_t prompt)>& on_end);

// The token that a uniform number in (0, 1) picks from softmax(logits / temperature), restricted first to the top_k
// largest logits; of these, whose probabilities then sum to 1, to the fewest that reach top_p (Holtzman et al., "The
// Curious Case of Neural Text Degeneration", arXiv 1904.09751, section 3.1); and to those that reach min_p times the
// largest probability (Nguyen et al., "Turning Up the Heat", arXiv 2407.01082, section 3). Of equal logits the one with
// the smaller id goes first. The likeliest token always remains. `logits` is used as working memory.
int pick_token(std::vector<float>& logits, const SampleOptions& options, float uniform);

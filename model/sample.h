// Sampling text from a model, token by token.
#pragma once

#include <functional>

#include "model/gpt.h"

struct SampleOptions {
    int tokens = 128;          // new ones, at most
    double temperature = 1.0;  // divides the logits; 0: always the likeliest token
    int top_k = 0;             // only the k likeliest may follow; 0: all may
    uint64_t seed = 0;
    int stop_token = -1;  // ends the text and is not passed on; -1: none
};

// Continues `prompt` (at least one token; only the last seq_len are seen) and passes each new token to the caller's
// function. A function of the weights, the prompt and the options alone. Overwrites the model's activations.
void sample(Gpt& gpt, std::vector<int> prompt, const SampleOptions& options, const std::function<void(int)>& on_token);

// The token that a uniform number in (0, 1) picks from softmax(logits / temperature), restricted to the top_k largest
// logits; ties go to the smaller id. `logits` is used as working memory.
int pick_token(std::vector<float>& logits, double temperature, int top_k, float uniform);

// The validation loss, and how likely a model finds given texts.
#pragma once

#include <functional>
#include <optional>

#include "kernels/base/batch.h"
#include "model/gpt.h"

struct Validation {
    double loss = 0;                      // nats per token
    std::optional<double> bits_per_byte;  // if the lengths of tokens are given
    double targets = 0;                   // how many tokens were predicted
    // If asked for, by the number of tokens before the target in its window, minus 1: the sum of the losses, and the
    // number of targets. (T)
    std::vector<double> position_loss, position_targets;
};

// The mean loss over all ranks' `batches` micro-batches from next(), each target counted once; token_bytes, if there is
// one, gives the length of a token. The ranks' micro-batches being one rank's in turn, the bits are the same for any
// number of ranks. Before each micro-batch all ranks call `between`, which may throw on all of them to end this.
Validation evaluate(
    Gpt& gpt, uint64_t batches, const std::function<Batch()>& next, const std::function<int(int token)>& token_bytes,
    bool by_position = false, const std::function<void()>& between = [] {});

// Two parts of a text. Neither is empty, and what is predicted has at most T tokens.
struct Continuation {
    std::span<const int> context, predicted;
    size_t tokens() const { return context.size() + predicted.size(); }
};

// The logarithm of the probability of each `predicted` behind its context, in nats. Of a text of more than T + 1 tokens
// the model reads the last T + 1. The ranks share the work and all have the result; its bits do not depend on their
// number. `between` as in evaluate().
std::vector<double> log_likelihoods(
    Gpt& gpt, const std::vector<Continuation>& texts, const std::function<void()>& between = [] {});

// The validation loss, and the log-likelihoods that a model assigns to given texts.
#pragma once

#include <functional>
#include <optional>

#include "kernels/base/batch.h"
#include "model/gpt.h"

struct Validation {
    double loss = 0;                      // nats per token
    std::optional<double> bits_per_byte;  // if the lengths of tokens are given
};

// Returns the mean loss over all ranks' `batches` micro-batches from next(), each target counted once. `token_bytes`,
// if given, returns the length of a token. Ranks take micro-batches round-robin, so the result has the same bits for
// any number of ranks. All ranks call `between` before each micro-batch; it may throw on all of them to stop the
// evaluation.
Validation evaluate(
    Gpt& gpt, uint64_t batches, const std::function<Batch()>& next, const std::function<int(int token)>& token_bytes,
    const std::function<void()>& between = [] {});

// A text in two parts, neither of them empty. `predicted` has at most T tokens.
struct Continuation {
    std::span<const int> context, predicted;
    size_t tokens() const { return context.size() + predicted.size(); }
};

// Returns the log-probability of each `predicted` after its context, in nats. If a text has more than T + 1 tokens, the
// model reads the last T + 1. The ranks share the work and all return the result; its bits do not depend on their
// number. `between` as in evaluate().
std::vector<double> log_likelihoods(
    Gpt& gpt, const std::vector<Continuation>& texts, const std::function<void()>& between = [] {});

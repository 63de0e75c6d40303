// The validation loss.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "model/gpt.h"

struct Validation {
    double loss = 0;                      // nats per token
    std::optional<double> bits_per_byte;  // where the tokens' bytes are known
};

// One micro-batch of this rank, as Gpt::evaluate() takes it: (B, T) each, targets -1 where nothing is to be predicted.
struct EvalBatch {
    const int* inputs;
    const int* targets;
};

// The mean loss over all ranks' `batches` micro-batches from next(), each target counted once; token_bytes, if there is
// one, gives the length of a token.
Validation evaluate(Gpt& gpt, uint64_t batches, const std::function<EvalBatch()>& next,
                    const std::function<int(int token)>& token_bytes);

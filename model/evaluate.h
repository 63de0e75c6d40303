// The validation loss.
#pragma once

#include <functional>
#include <optional>

#include "kernels/batch.h"
#include "model/gpt.h"

struct Validation {
    double loss = 0;                      // nats per token
    std::optional<double> bits_per_byte;  // if the lengths of tokens are given
};

// The mean loss over all ranks' `batches` micro-batches from next(), each target counted once; token_bytes, if there is
// one, gives the length of a token. The ranks' micro-batches being one rank's in turn, the bits are the same for any
// number of ranks.
Validation evaluate(Gpt& gpt, uint64_t batches, const std::function<Batch()>& next,
                    const std::function<int(int token)>& token_bytes);

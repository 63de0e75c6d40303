// The batch that the data loader passes to the model.
#pragma once

#include <cstdint>

// One micro-batch of one rank in host memory.
struct Batch {
    const int32_t* inputs;   // (batch, seq_len)
    const int32_t* targets;  // (batch, seq_len), the next token, or -1 for no target (the input is then 0)
};

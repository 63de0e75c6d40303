// A batch as the data loader passes it to the model.
#pragma once

#include <cstdint>

// One micro-batch of one rank in host memory.
struct Batch {
    const int32_t* inputs;   // (batch, seq_len)
    const int32_t* targets;  // (batch, seq_len), the token that follows, or -1 for none (its input is then 0)
};

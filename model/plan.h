// The memory plan of a rank, made before anything is allocated.
#pragma once

#include "model/gpt.h"

// Bytes that Gpt allocates on the device: its one allocation.
size_t planned_bytes(const GptOptions& options);

// Bytes of Gpt::saved_tensors(), this rank's part of a checkpoint.
size_t saved_bytes(const GptOptions& options);

// Fails with Exit::os, the plan's table and the keys that would make it smaller, if the device has less memory free
// than the plan needs.
void check_fits(const GptOptions& options);

// What the arithmetic of a token is counted from: the parameters that take part in products, to which the learned
// positions and the vocabulary's padding are counted, but not an embedding that is looked up only; and, summed over
// layers, the channels of attention times the keys that a query sees on average. These are T / 2, or with a window W
// below T, W - W^2 / (2 T).
struct TokenWork {
    int64_t parameters;
    double attended;
};
TokenWork token_work(const GptShape& shape, int seq_len);

// A table for the terminal: bytes by category and by buffer, the total, the number of parameters.
std::string plan_table(const GptOptions& options);

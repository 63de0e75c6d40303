// Times the algorithms that the library proposes for a product, once, on numbers and in memory of its own.
#pragma once

#include "kernels/cuda/matmul/matmul_library.h"

struct TimedAlgorithm {
    int index = -1;       // in the proposals; -1: none was timed, for lack of memory or because none ran
    float ms = -1;        // the chosen one's, in steady state
    float apart_ms = -1;  // with Epilogue::bias_gradient: what the column sums take as a kernel of their own
    bool is_short_of_memory = false;
};

// Chooses among the proposals for `product`, whose own memory is neither read nor written. Waits for the stream. Keeps
// the GPU busy for at most about half a second (matmul_tune.cu), longer only where a single product takes tens of
// milliseconds.
TimedAlgorithm fastest_of(const std::vector<MatmulAlgorithm>& proposals, ProductDescription& description,
                          const Product& product, cublasLtHandle_t handle, const MatmulWorkspace& workspace,
                          Stream stream);

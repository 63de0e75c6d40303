// Autotuning: times the algorithms that the library proposes for a GEMM, on random numbers in separate memory.
#pragma once

#include "kernels/cuda/matmul/matmul_library.h"

struct TimedAlgorithm {
    int index = -1;       // of the proposal; -1: none was timed, because memory was insufficient or none ran
    float ms = -1;        // of the chosen algorithm, in steady state
    float apart_ms = -1;  // with Epilogue::bias_gradient: time of the column sums as a separate kernel
    bool is_short_of_memory = false;
};

// Returns the fastest proposal for `product`. Does not access the product's memory. Waits for the stream. Keeps the GPU
// busy for at most about half a second (matmul_tune.cu), or longer if a single GEMM takes tens of milliseconds.
TimedAlgorithm fastest_of(const std::vector<MatmulAlgorithm>& proposals, ProductDescription& description,
                          const Product& product, cublasLtHandle_t handle, const MatmulWorkspace& workspace,
                          Stream stream);

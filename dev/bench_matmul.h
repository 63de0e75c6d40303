// The matrix products of a training step on a GPU: which of the library's algorithms is chosen for each, what those
// that are never chosen would reach, and whether both give the same bits each time.
#pragma once

#include <functional>
#include <optional>

#include "dev/bench_workloads.h"

struct AlgorithmResult {
    std::string algorithm;  // its configuration, in one line
    double ms, tflops;
    int repeats, mismatches;  // runs on the same numbers; those of them whose result is not the first one's, bit by bit
};

struct ProductResult {
    std::string name;
    int m, n, k;  // to the library: kernels/cuda/matmul/matmul_plan.h
    std::string epilogue, in, out;
    bool accumulate;
    double calls;
    int candidates = 0, excluded_candidates = 0;
    std::optional<AlgorithmResult> chosen{}, excluded{};  // the fastest of each; none where no candidate runs
    // With the bias gradient as epilogue: the product without it, and our sums of columns, which together replace it.
    std::optional<double> plain_ms{}, column_sums_ms{};
    // The fastest algorithm under the assumption that addresses are aligned to 256 bytes, not 16; none if the library
    // then proposes the same ones.
    std::optional<double> aligned_ms{};
    // Where GELU follows: the product with the library's GELU, and our pass over the chosen one's result.
    std::optional<double> gelu_ms{}, gelu_pass_ms{};
};

// A product of a training step in bf16. In a micro-step after the first, weight gradients are added to.
struct ProductCase {
    std::string name;
    double calls;  // in a micro-step
    double flops;  // of one call
    // Allocates what it needs. `repeats`: of the chosen and the excluded algorithm each, for the comparison of bits.
    std::function<ProductResult(int repeats)> measure;
};

// All products that a step of the workload launches, those with the most arithmetic in a micro-step first.
std::vector<ProductCase> product_cases(const Workload& work);

// "cuBLASLt 13.1.0".
std::string library_name();

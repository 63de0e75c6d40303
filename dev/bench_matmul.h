// The GEMMs of a training step on a GPU: the chosen algorithm of the library, the speed of other algorithms, and
// whether each gives the same bits every time.
#pragma once

#include <functional>
#include <optional>

#include "dev/bench_workloads.h"

struct AlgorithmResult {
    std::string algorithm;  // its configuration, in one line
    double ms, tflops;
    int repeats, mismatches;  // runs on the same numbers; runs whose bits differ from those of the first run
};

struct ProductResult {
    std::string name;
    int m, n, k;  // to the library: kernels/cuda/matmul/matmul_plan.h
    std::string epilogue, in, out;
    bool accumulate;
    double calls;
    int candidates = 0, excluded_candidates = 0;
    // The first candidate that runs, as in training; the fastest one; the fastest excluded one. Empty if none runs.
    std::optional<AlgorithmResult> chosen{}, fastest{}, excluded{};
    // With the bias gradient as epilogue: the GEMM without it and our column sums, which together replace it.
    std::optional<double> plain_ms{}, column_sums_ms{};
    // If GELU follows: the GEMM with the library's GELU, and our pass over the result of the chosen one.
    std::optional<double> gelu_ms{}, gelu_pass_ms{};
};

// A GEMM of a training step in bf16. Micro-steps after the first accumulate weight gradients.
struct ProductCase {
    std::string name;
    double calls;  // per micro-step
    double flops;  // per call
    // Allocates its arrays. `repeats`: runs of each reported algorithm, to compare their bits.
    std::function<ProductResult(int repeats)> measure;
};

// All GEMMs that a step of the workload launches; those with the most arithmetic per micro-step first.
std::vector<ProductCase> product_cases(const Workload& work);

// "cuBLASLt 13.1.0".
std::string library_name();

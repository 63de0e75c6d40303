// The algorithms that `train_gpt tune` chose for the GEMMs of a run, and their text:
//
//     train_gpt GEMM choices 1, cuBLASLt 130100, NVIDIA H200
//     GEMM: 1b 14 0 0 0 0 0 0, 0.8649 ms instead of 1.0395 ms    the library's numbers of an algorithm, in hex
//     GEMM: apart, 0.5509 ms instead of 0.5876 ms                separate kernels are faster than the epilogue
//
// A line ends after the first time if the library's first proposal is the fastest one.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "kernels/cuda/matmul/matmul_library.h"

struct MatmulChoice {
    std::optional<MatmulAlgorithm> algorithm;  // empty: separate kernels for the epilogue
    std::string times;
};

// Keyed by text_key().
using MatmulChoices = std::map<std::string, MatmulChoice>;

std::string text_of(const MatmulChoices& choices);

// Fails with Exit::config if the text is none of text_of(), or of another GPU or version of the library.
MatmulChoices matmul_choices_of(const std::string& text);

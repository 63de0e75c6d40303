// The operands of linear layers in 8 bits, which exist only during a GEMM. Each has one scale, from the largest
// magnitude (amax) that the ops before the GEMM give in View::amax.
#pragma once

#include <string>

#include "kernels/tensor.h"
#include "model/arena.h"
#include "model/options.h"

struct LayerContext;

inline constexpr const char* kFp8Operands = "FP8 operands";  // in the memory plan

// A matrix in 8 bits, by rows, by columns (transposed), or both, with one scale.
struct Fp8Matrix {
    View rows, columns;
    float *amax = nullptr, *scale = nullptr;  // amax: of an array without one
};

// The buffers of the GEMM that runs, each large enough for every linear layer of a block.
struct Fp8Buffers {
    Fp8Matrix input;              // of the layer, in E4M3
    Fp8Matrix weight;             // in E4M3
    Fp8Matrix gradient;           // of the layer's output, in options.fp8_gradients
    double* saturated = nullptr;  // ops::Quantize::saturated of a step
};

// Returns why the model's GEMMs cannot have operands of 8 bits, naming configuration keys; empty if they can.
std::string fp8_problem(const GptOptions& options);

// Allocates them; none without options.fp8.
Fp8Buffers place_fp8(const GptOptions& options, const GptShape& part, Arena& arena);

// Whether activations and gradients whose ops give an amax have one. They have none if several ops compute an operand,
// or other ranks compute parts of it. Then each conversion first reads the operand to find it.
bool keeps_amax(const GptOptions& options);

// Converts `from` (rows, cols), and returns the copy by rows or by columns. with_rows: stores `to.rows` in the same
// pass.
ConstView fp8_rows(const LayerContext& x, const Fp8Matrix& to, ConstView from, int rows, int cols);
ConstView fp8_columns(const LayerContext& x, const Fp8Matrix& to, ConstView from, int rows, int cols,
                      bool with_rows = false);

// Muon and NorMuon: the momentum of a matrix, orthogonalized. Their sources are in model/muon.cpp.
#pragma once

#include "kernels/tensor.h"
#include "model/matrices.h"
#include "model/options.h"

MatrixMemory muon_memory(const GptOptions& options, const Matrix& matrix);

// out (rows, n) = a (rows, k) b (n, k)^T
void multiply_by_transposed(const GptState& s, View out, View a, View b, int rows, int n, int k);
// out (rows, n) = a (rows, k) b (k, n)
void multiply(const GptState& s, View out, View a, View b, int rows, int k, int n);
// out (n, cols) = a (rows, n)^T b (rows, cols). out: FP32. Uses MatrixState::scratch.
void multiply_transposed(const GptState& s, View out, View a, View b, int rows, int n, int cols);

// Replaces the momentum of an own matrix by the direction of the step: see MatrixFunctions::direct.
void muon_direction(const GptState& s, size_t number, View values);
void normuon_direction(const GptState& s, size_t number, View values);

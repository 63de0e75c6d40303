// The matrix products of ops.h with a free choice of who multiplies: for tests and benchmarks of the choices.
// ops::matmul_forward and its siblings are these with fastest_product_path().
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/ops.h"

void matmul_forward_by(ProductPath path, const ops::MatmulForward& op);
void matmul_backward_input_by(ProductPath path, const ops::MatmulBackwardInput& op);
void matmul_backward_weight_by(ProductPath path, const ops::MatmulBackwardWeight& op);

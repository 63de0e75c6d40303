// The GEMMs of ops.h with an explicit choice of implementation, for tests and benchmarks. ops::matmul_forward and its
// siblings call them with fastest_product_path().
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/ops.h"

void matmul_forward_by(ProductPath path, const ops::MatmulForward& op);
void matmul_backward_input_by(ProductPath path, const ops::MatmulBackwardInput& op);
void matmul_backward_weight_by(ProductPath path, const ops::MatmulBackwardWeight& op);

// The scalars of an AdamW update. They have the same bits on every device.
#pragma once

#include "kernels/ops.h"

namespace ops {

// Scalar arguments of the update of one chunk. Like torch, computes in double and rounds to float for the kernel.
struct AdamwScalars {
    float grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2;
    float keep;  // 1 - learning rate * weight decay; 1 without decay
    float step_size, root_bias_correction2, eps;
};

HOST_DEVICE inline AdamwScalars adamw_scalars(const AdamwUpdate& op, bool decayed) {
    const StepScalars step = *op.scalars;
    const double decay = decayed ? double(step.learning_rate) * op.weight_decay : 0.0;
    return {.grad_scale = op.grad_norm->scale,
            .beta1 = float(op.beta1),
            .beta2 = float(op.beta2),
            .one_minus_beta1 = float(1.0 - op.beta1),
            .one_minus_beta2 = float(1.0 - op.beta2),
            .keep = float(1.0 - decay),
            .step_size = float(double(step.learning_rate) / step.bias_correction1),
            .root_bias_correction2 = float(std::sqrt(double(step.bias_correction2))),
            .eps = op.eps};
}

}  // namespace ops

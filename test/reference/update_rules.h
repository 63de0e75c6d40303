// The formulas of elementwise updates as the literature has them, for `double` or another number type.
#pragma once

#include "kernels/ops.h"

namespace ref {

// Updates a master weight and its state. g: the clipped gradient.
template <class Number>
void update_element(OptimizerKind rule, const ops::UpdateScalars& s, Number g, Number& master, Number* state) {
    using std::sqrt;
    const Number lr = s.learning_rate, decay = s.weight_decay;
    switch (rule) {
        // m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        // master = master - lr decay master - lr / correction1 m / (sqrt(v) / sqrt(correction2) + eps)
        case OptimizerKind::adamw: {
            Number &m = state[0], &v = state[1];
            m = Number(s.beta1) * m + Number(s.one_minus_beta1) * g;
            v = Number(s.beta2) * v + Number(s.one_minus_beta2) * (g * g);
            master = master - lr * decay * master -
                     Number(s.step_size) * (m / (sqrt(v) / Number(s.root_bias_correction2) + Number(s.eps)));
            break;
        }
        // m = momentum m + g;  master = master - lr (m + decay master)
        case OptimizerKind::sgd: {
            Number& m = state[0];
            m = Number(s.momentum) * m + g;
            master = master - lr * (m + decay * master);
            break;
        }
    }
}

}  // namespace ref

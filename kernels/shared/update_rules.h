// The formulas of elementwise_update, written once for all backends.
//
// A rule is a struct with kStates, the number of its state arrays, and update(), which changes one master weight and
// its state. `g` is the gradient after clipping. Products that feed sums are fused explicitly, so that all devices
// round at the same places.
#pragma once

#include <array>

#include "kernels/base/check.h"
#include "kernels/ops.h"

namespace ops {

// AdamW as in torch.optim.AdamW: decoupled weight decay, bias-corrected moments, eps outside the root
// (Loshchilov, Hutter, arXiv 1711.05101, algorithm 2).
struct AdamwRule {
    static constexpr int kStates = 2;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [m, v] = state;
        m = std::fma(m, s.beta1, g * s.one_minus_beta1);
        v = std::fma(v, s.beta2, g * g * s.one_minus_beta2);
        const float denominator = std::sqrt(v) / s.root_bias_correction2 + s.eps;
        master = std::fma(master, s.keep, -s.step_size * (m / denominator));
    }
};

// SGD with momentum as in torch.optim.SGD (dampening 0, no Nesterov), with decoupled weight decay like AdamW:
// m = momentum m + g; master -= lr (m + weight_decay master).
struct SgdRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [m] = state;
        m = std::fma(s.momentum, m, g);
        master = std::fma(-s.learning_rate, std::fma(s.weight_decay, master, m), master);
    }
};

// Calls body.operator()<Rule>().
template <class Body> void dispatch(OptimizerKind rule, Body&& body) {
    switch (rule) {
        case OptimizerKind::adamw: return body.template operator()<AdamwRule>();
        case OptimizerKind::sgd: return body.template operator()<SgdRule>();
    }
    fail(Exit::internal, "elementwise_update: rule %d is not elementwise", int(rule));
}

}  // namespace ops

// The formulas of updates as the literature has them, for `double` or another number type.
#pragma once

#include "kernels/ops.h"

namespace ref {

inline double sign(double x) { return double(x > 0) - double(x < 0); }

// Returns an element of the vector whose norm decides a layer's trust ratio, and updates LAMB's state.
template <class Number>
Number direction_of_layer(OptimizerKind rule, const ops::UpdateScalars& s, Number g, Number master, Number* state) {
    using std::sqrt;
    if (rule == OptimizerKind::lars) return g;
    Number &m = state[0], &v = state[1];
    m = Number(s.beta1) * m + Number(s.one_minus_beta1) * g;
    v = Number(s.beta2) * v + Number(s.one_minus_beta2) * (g * g);
    return m / Number(s.bias_correction1) / (sqrt(v) / Number(s.root_bias_correction2) + Number(s.eps)) +
           Number(s.weight_decay) * master;
}

// Returns a layer's trust ratio, given the norms of its weights and of the direction: LAMB's |w| / |u|, LARS's
// coefficient |w| / (|g| + decay |w|), or 1 if a norm is 0.
inline double trust_ratio(OptimizerKind rule, const ops::UpdateScalars& s, double weights, double direction) {
    const double numerator = rule == OptimizerKind::lars ? double(s.trust_coefficient) * weights : weights;
    const double denominator = rule == OptimizerKind::lars ? direction + double(s.weight_decay) * weights : direction;
    return numerator > 0 && denominator > 0 ? numerator / denominator : 1;
}

// Adafactor's average of a row or a column after its mean square (torch.optim.Adafactor's lerp).
template <class Number> Number factored_average(const ops::UpdateScalars& s, Number mean_square, Number v) {
    return v + Number(s.one_minus_beta2) * (mean_square - v);
}

// Returns Adafactor's g / max(sqrt(variance), eps). mean: of the averages of the layer's rows.
template <class Number>
Number factored_element(const ops::UpdateScalars& s, bool is_factored, Number g, Number row_v, Number col_v,
                        Number mean) {
    using std::sqrt;
    const auto at_least_eps = [&](Number x) {
        if constexpr (requires { x.value; })
            x.value = std::max(x.value, double(s.eps));
        else
            x = std::max(x, double(s.eps));
        return x;
    };
    return g / at_least_eps(sqrt(is_factored ? row_v / at_least_eps(mean) * col_v : col_v));
}

// Returns Adafactor's max(0.001, RMS of the weights) / max(1, RMS of the direction / clip_threshold), given norms.
inline double factored_ratio(const ops::UpdateScalars& s, size_t count, double weights, double direction) {
    const double root = std::sqrt(double(count));
    return std::max(0.001, weights / root) / std::max(1.0, direction / root / double(s.clip_threshold));
}

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
        // The same with the penalty's gradient decay master in place of decoupled decay.
        case OptimizerKind::adam: {
            Number &m = state[0], &v = state[1];
            g = g + decay * master;
            m = Number(s.beta1) * m + Number(s.one_minus_beta1) * g;
            v = Number(s.beta2) * v + Number(s.one_minus_beta2) * (g * g);
            master = master - Number(s.step_size) * (m / (sqrt(v) / Number(s.root_bias_correction2) + Number(s.eps)));
            break;
        }
        // g = g + decay master;  m = momentum m + g;  master = master - lr m, or with Nesterov lr (g + momentum m)
        case OptimizerKind::sgd: {
            Number& m = state[0];
            g = g + decay * master;
            m = Number(s.momentum) * m + g;
            const bool nesterov = s.step_gradient != 0;
            master = master - lr * (nesterov ? g + Number(s.momentum) * m : m);
            break;
        }
        // c = beta1 m + (1 - beta1) g;  master = master - lr (sign(c) + decay master);  m = beta2 m + (1 - beta2) g
        case OptimizerKind::lion: {
            Number& m = state[0];
            const Number c = Number(s.beta1) * m + Number(s.one_minus_beta1) * g;
            master = master - lr * (sign(c) + decay * master);
            m = Number(s.beta2) * m + Number(s.one_minus_beta2) * g;
            break;
        }
        // g = g + decay master;  v = alpha v + (1 - alpha) g^2;  master = master - lr g / (sqrt(v) + eps)
        case OptimizerKind::rmsprop: {
            Number& v = state[0];
            g = g + decay * master;
            v = Number(s.alpha) * v + Number(s.one_minus_alpha) * (g * g);
            master = master - lr * (g / (sqrt(v) + Number(s.eps)));
            break;
        }
        // m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        // u = (m / correction1) / (sqrt(v) / sqrt(correction2) + eps) + decay master;  master = master - lr ratio u
        case OptimizerKind::lamb: {
            master = master - lr * Number(s.trust_ratio) * direction_of_layer(rule, s, g, master, state);
            break;
        }
        // m = momentum m + lr ratio (g + decay master);  master = master - m
        case OptimizerKind::lars: {
            Number& m = state[0];
            m = Number(s.momentum) * m + lr * Number(s.trust_ratio) * (g + decay * master);
            master = master - m;
            break;
        }
        case OptimizerKind::adafactor:
        case OptimizerKind::muon:
        case OptimizerKind::normuon:
        case OptimizerKind::soap:
        case OptimizerKind::soap_muon:
            break;  // not elementwise
        // g = g + decay master;  v = v + g^2;  master = master - lr g / (sqrt(v) + eps)
        case OptimizerKind::adagrad: {
            Number& v = state[0];
            g = g + decay * master;
            v = v + g * g;
            master = master - lr * (g / (sqrt(v) + Number(s.eps)));
            break;
        }
    }
}

// Updates an element's momentum, and returns its direction. g: the clipped gradient.
// m = lerp(m, g, 1 - momentum);  direction = lerp(g, m, momentum) or m, where lerp(a, b, w) = a + w (b - a)
template <class Number> Number direct_element(const ops::UpdateScalars& s, bool nesterov, Number g, Number& m) {
    m = m + (Number(1) - Number(s.momentum)) * (g - m);
    return nesterov ? g + Number(s.momentum) * (m - g) : m;
}

// Adam's direction: v = beta2 v + (1 - beta2) g^2;  (m / correction1) / (sqrt(v) / sqrt(correction2) + eps)
template <class Number> Number adam_element(const ops::UpdateScalars& s, Number m, Number g, Number& v) {
    v = Number(s.beta2) * v + Number(s.one_minus_beta2) * (g * g);
    return m / Number(s.bias_correction1) / (sqrt(v) / Number(s.root_bias_correction2) + Number(s.eps));
}

// Returns the master weight after a step: (1 - lr decay) master - lr direction, or without decay
// master - lr direction.
template <class Number>
Number apply_element(const ops::UpdateScalars& s, bool decays, Number direction, Number master) {
    const Number kept = decays ? Number(s.keep) * master : master;
    return kept - Number(s.learning_rate) * direction;
}

}  // namespace ref

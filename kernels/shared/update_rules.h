// The formulas of the updates, written once for all backends.
//
// A rule is a struct with kStates, the number of its state arrays, and update(), which changes one master weight and
// its state. `g` is the gradient after clipping. Products that feed sums are fused explicitly, so that all devices
// round at the same places.
#pragma once

#include "kernels/base/check.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

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

// The gradient with weight decay as a penalty on the squared weights, in rules without decoupled decay.
HOST_DEVICE inline float penalized(const UpdateScalars& s, float g, float master) {
    return std::fma(s.weight_decay, master, g);
}

// Adam as in torch.optim.Adam (Kingma, Ba, arXiv 1412.6980, algorithm 1).
struct AdamRule {
    static constexpr int kStates = 2;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        UpdateScalars undecayed = s;
        undecayed.keep = 1;
        AdamwRule::update(undecayed, penalized(s, g, master), master, state);
    }
};

// SGD as in torch.optim.SGD, with dampening 0: m = momentum m + g; the step is m or, with Nesterov's momentum,
// g + momentum m (Sutskever et al., "On the importance of initialization and momentum in deep learning", section 2).
struct SgdRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [m] = state;
        g = penalized(s, g, master);
        m = std::fma(s.momentum, m, g);
        master = std::fma(-s.learning_rate, std::fma(s.step_momentum, m, s.step_gradient * g), master);
    }
};

// Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al., arXiv 2302.06675, algorithm 2).
struct LionRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [m] = state;
        const float direction = std::fma(m, s.beta1, g * s.one_minus_beta1);
        m = std::fma(m, s.beta2, g * s.one_minus_beta2);
        const float sign = float(direction > 0) - float(direction < 0);
        master = std::fma(master, s.keep, -s.learning_rate * sign);
    }
};

// RMSprop as in torch.optim.RMSprop, not centered and without momentum (Tieleman, Hinton, "Neural Networks for Machine
// Learning", lecture 6e).
struct RmspropRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [v] = state;
        g = penalized(s, g, master);
        v = std::fma(v, s.alpha, g * g * s.one_minus_alpha);
        master = std::fma(-s.learning_rate, g / (std::sqrt(v) + s.eps), master);
    }
};

// Adagrad as in torch.optim.Adagrad, with a constant rate (Duchi, Hazan, Singer, JMLR 12, 2011, section 1.3).
struct AdagradRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [v] = state;
        g = penalized(s, g, master);
        v = std::fma(g, g, v);
        master = std::fma(-s.learning_rate, g / (std::sqrt(v) + s.eps), master);
    }
};

// A layerwise rule also has direction(), whose norm over a layer decides the layer's trust ratio. Norms are Euclidean.

// The ratio if both norms are positive, else 1.
HOST_DEVICE inline double ratio_of_norms(double numerator, double denominator) {
    return numerator > 0 && denominator > 0 ? numerator / denominator : 1;
}

// Updates v and returns Adam's direction.
HOST_DEVICE inline float adam_step(const UpdateScalars& s, float m, float g, float& v) {
    v = std::fma(v, s.beta2, g * g * s.one_minus_beta2);
    return m / s.bias_correction1 / (std::sqrt(v) / s.root_bias_correction2 + s.eps);
}

// LAMB: Adam's direction with decoupled decay, scaled to the norm of the layer's weights (You et al., arXiv 1904.00962,
// algorithm 2, with phi(z) = z).
struct LambRule {
    static constexpr int kStates = 2;
    HOST_DEVICE static float direction(const UpdateScalars& s, float g, float master, float (&state)[kStates]) {
        auto& [m, v] = state;
        m = std::fma(m, s.beta1, g * s.one_minus_beta1);
        return std::fma(s.weight_decay, master, adam_step(s, m, g, v));
    }
    HOST_DEVICE static double trust_ratio(const UpdateScalars&, double weights, double direction) {
        return ratio_of_norms(weights, direction);
    }
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        master = std::fma(-s.learning_rate * s.trust_ratio, direction(s, g, master, state), master);
    }
};

// LARS: momentum of the gradient and its penalty, with a rate in proportion to the layer's weights (You, Gitman,
// Ginsburg, arXiv 1708.03888, algorithm 1). The direction is the gradient.
struct LarsRule {
    static constexpr int kStates = 1;
    HOST_DEVICE static float direction(const UpdateScalars&, float g, float, float (&)[kStates]) { return g; }
    HOST_DEVICE static double trust_ratio(const UpdateScalars& s, double weights, double direction) {
        return ratio_of_norms(double(s.trust_coefficient) * weights, direction + double(s.weight_decay) * weights);
    }
    HOST_DEVICE static void update(const UpdateScalars& s, float g, float& master, float (&state)[kStates]) {
        auto& [m] = state;
        m = std::fma(s.momentum, m, s.learning_rate * s.trust_ratio * penalized(s, g, master));
        master -= m;
    }
};

// Adafactor as in torch.optim.Adafactor: see FactorMoments, FactoredDirection and TrustRatios.
struct AdafactorRule {
    HOST_DEVICE static float average(const UpdateScalars& s, const double* sums, int count, float v) {
        return std::fma(s.one_minus_beta2, float((sums[0] + sums[1]) / count) - v, v);
    }
    // The factor of col_v in the variances of a row.
    HOST_DEVICE static float row_factor(const UpdateScalars& s, const FactorLayer& layer, float row_v, float mean) {
        return layer.is_factored ? row_v / (mean > s.eps ? mean : s.eps) : 1;
    }
    HOST_DEVICE static float direction(const UpdateScalars& s, float g, float variance) {
        const float root = std::sqrt(variance);
        return g / (root > s.eps ? root : s.eps);
    }
    HOST_DEVICE static double trust_ratio(const UpdateScalars& s, size_t count, double weights, double direction) {
        const double root = std::sqrt(double(count)), scale = weights / root;
        const double clipped = direction / (root * double(s.clip_threshold));
        return (scale > 1e-3 ? scale : 1e-3) / (clipped > 1 ? clipped : 1);
    }
};

// A square split into multiples of two powers of 2: of 2^-52 and of 2^-82 of a bound of the sum of all squares. Sums of
// either part, of at most 2^24 squares, are exact in double, and so have the same bits in any order (Demmel, Nguyen,
// "Fast reproducible floating-point summation", ARITH 2013). What is cut off is below 2^-82 of the bound.
struct ExactParts {
    double high, low;
    HOST_DEVICE ExactParts(float g, double unit) {
        const double square = double(g) * double(g), low_unit = unit * 0x1p-30;
        high = square + unit - unit;
        low = square - high + low_unit - low_unit;
    }
};
// The unit of ExactParts, whose neighbors in double have the distance of the high parts. norm: of all gradients.
HOST_DEVICE inline double exact_unit(float norm) {
    const int exponent = norm > 0 ? std::ilogb(norm < INFINITY ? norm : 0x1p127f) : -149;
    return std::ldexp(1.5, 2 * exponent + 4);
}

// Updates m and returns the direction of momentum_direction. The scaled gradient is a factor of multiply-adds, because
// compilers would fuse its product with a subtraction or not.
HOST_DEVICE inline float momentum_step(float momentum, bool nesterov, float grad, float grad_scale, float& m) {
    m = std::fma(1 - momentum, std::fma(grad, grad_scale, -m), m);
    return nesterov ? std::fma(momentum, std::fma(-grad, grad_scale, m), grad * grad_scale) : m;
}

// The master weight after a step along the direction. Compares signs, because a product could underflow.
HOST_DEVICE inline float stepped(float keep, bool cautious, float step, float direction, float master) {
    // Without short circuits, which keep the CPU's loop from being vectorized.
    const bool opposite = ((direction > 0) & (master < 0)) | ((direction < 0) & (master > 0));
    return std::fma(master, cautious & opposite ? 1 : keep, -step * direction);
}

// The divisor of frobenius_normalize. NaN if the norm is not finite, because a quotient by infinity would be 0.
HOST_DEVICE inline float frobenius_divisor(double squared_sum, float eps) {
    const float norm = float(std::sqrt(squared_sum));
    return norm < INFINITY ? (norm > eps ? norm : eps) : NAN;
}

// A row of row_normalize: its factor without the matrix's, and its share of the squared norm.
struct RowScale {
    double squared_sum;
    float factor;
};
// Updates v of a row whose squares have the given sum.
HOST_DEVICE inline RowScale row_scale(const RowNormalize& op, double squared_sum, float& v) {
    v = std::fma(v, op.beta2, op.one_minus_beta2 * float(squared_sum / op.cols));
    const float factor = 1 / (std::sqrt(v) + op.eps);
    return {double(factor) * double(factor) * squared_sum, factor};
}

// Calls body.operator()<Rule>().
template <class Body> void dispatch(OptimizerKind rule, Body&& body) {
    switch (rule) {
        case OptimizerKind::adamw: return body.template operator()<AdamwRule>();
        case OptimizerKind::adam: return body.template operator()<AdamRule>();
        case OptimizerKind::sgd: return body.template operator()<SgdRule>();
        case OptimizerKind::lion: return body.template operator()<LionRule>();
        case OptimizerKind::rmsprop: return body.template operator()<RmspropRule>();
        case OptimizerKind::adagrad: return body.template operator()<AdagradRule>();
        case OptimizerKind::lamb: return body.template operator()<LambRule>();
        case OptimizerKind::lars: return body.template operator()<LarsRule>();
        case OptimizerKind::adafactor:
        case OptimizerKind::muon:
        case OptimizerKind::normuon:
        case OptimizerKind::soap:
        case OptimizerKind::soap_muon: break;
    }
    fail(Exit::internal, "elementwise_update: rule %d is not elementwise", int(rule));
}

// Calls body.operator()<Master, Param>() for the types of the master weights, fp32 or bf16, and of the compute weights.
// Masters in bf16 are the compute weights.
template <class Body> void dispatch_weights(const char* op, View master, View param, Body&& body) {
    if (master.dtype == Dtype::fp32)
        return dispatch(op, param.dtype, [&]<class Param>() { body.template operator()<float, Param>(); });
    require(!param, "%s: master weights of type %s and separate compute weights", op, name_of(master.dtype));
    dispatch_state(op, master.dtype, [&]<class Master>() { body.template operator()<Master, bf16>(); });
}

// Calls body.operator()<Rule, State>() for a rule and the storage type of its state.
template <class Array, class Body> void dispatch(OptimizerKind rule, const Array (&state)[kMaxStates], Body&& body) {
    dispatch_state("elementwise_update", storage_type("elementwise_update", {state[0], state[1]}), [&]<class State>() {
        dispatch(rule, [&]<class Rule>() { body.template operator()<Rule, State>(); });
    });
}

// The same for a layerwise rule.
template <class Body> void dispatch_layerwise(OptimizerKind rule, const ConstView (&state)[kMaxStates], Body&& body) {
    dispatch_state("trust_sums", storage_type("trust_sums", {state[0], state[1]}), [&]<class State>() {
        if (rule == OptimizerKind::lamb) return body.template operator()<LambRule, State>();
        require(rule == OptimizerKind::lars, "trust_sums: rule %d is not layerwise", int(rule));
        body.template operator()<LarsRule, State>();
    });
}

// The scalars of a chunk's elements.
HOST_DEVICE inline UpdateScalars scalars_of(const ElementwiseUpdate& op, const Chunk& chunk) {
    UpdateScalars scalars = op.scalars[chunk.group];
    if (op.trust_ratios) scalars.trust_ratio = op.trust_ratios[chunk.layer];
    return scalars;
}

// The step of a chunk's elements along their direction.
HOST_DEVICE inline float step_of(const ApplyDirection& op, const Chunk& chunk) {
    return op.scalars[chunk.group].learning_rate * (op.trust_ratios ? op.trust_ratios[chunk.layer] : 1);
}

// A layer's ratio from its squared norms.
HOST_DEVICE inline float layer_ratio(const TrustRatios& op, const Layer& layer, double squared_weights,
                                     double squared_direction) {
    if (!layer.adapts) return 1;
    const UpdateScalars& s = op.scalars[layer.group];
    const double weights = std::sqrt(squared_weights), direction = std::sqrt(squared_direction);
    if (op.rule == OptimizerKind::adafactor)
        return float(AdafactorRule::trust_ratio(s, layer.count, weights, direction));
    return float(op.rule == OptimizerKind::lamb ? LambRule::trust_ratio(s, weights, direction)
                                                : LarsRule::trust_ratio(s, weights, direction));
}

}  // namespace ops

// Activation functions: standalone (for recomputation and GEMMs with an activation) and gated.
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// out (hidden) = f(gate) up.
template <ActivationFunction function, class T>
[[gnu::noinline]] void gated_row(T* out, const T* gate, const T* up, int hidden) {
#pragma omp simd
    for (int i = 0; i < hidden; i++) out[i] = from_float<T>(activation<function>(to_float(gate[i])) * to_float(up[i]));
}

// dgate (hidden) = dout up f'(gate), dup (hidden) = dout f(gate).
template <ActivationFunction function, class T>
[[gnu::noinline]] void gated_row_gradient(T* dgate, T* dup, const T* dout, const T* gate, const T* up, int hidden) {
#pragma omp simd
    for (int i = 0; i < hidden; i++) {
        const float gradient = to_float(dout[i]);
        const ActivationPair f = activation_pair<function>(to_float(gate[i]));
        dgate[i] = from_float<T>(gradient * to_float(up[i]) * f.gradient);
        dup[i] = from_float<T>(gradient * f.value);
    }
}

}  // namespace

void activation_forward(const ActivationForward& op, Stream) {
    constexpr const char* kName = "activation_forward";
    require(op.activation != ActivationFunction::relu2, "%s: relu2's output is stored, never recomputed", kName);
    dispatch(kName, {op.out, op.inp}, op.activation, [&]<class T, ActivationFunction function>() {
        if constexpr (function != ActivationFunction::relu2) {
            constexpr size_t kBlock = 1 << 14;  // elements
            parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
                activation_block<function>(op.out.as<T>() + begin, op.inp.as<T>() + begin, end - begin);
            });
        }
    });
    set_amax(op.out, op.count);
}

void gated_activation_forward(const GatedActivationForward& op, Stream) {
    dispatch("gated_activation_forward", {op.out, op.inp}, op.activation, [&]<class T, ActivationFunction function>() {
        const size_t hidden = size_t(op.hidden);
        parallel_for(size_t(op.rows), [&](size_t row) {
            const T* gate = op.inp.as<T>() + row * 2 * hidden;
            gated_row<function>(op.out.as<T>() + row * hidden, gate, gate + hidden, op.hidden);
        });
    });
    set_amax(op.out, size_t(op.rows) * size_t(op.hidden));
}

void gated_activation_backward(const GatedActivationBackward& op, Stream) {
    constexpr const char* kName = "gated_activation_backward";
    dispatch(kName, {op.dinp, op.dout, op.inp}, op.activation, [&]<class T, ActivationFunction function>() {
        const size_t hidden = size_t(op.hidden);
        parallel_for(size_t(op.rows), [&](size_t row) {
            const T* gate = op.inp.as<T>() + row * 2 * hidden;
            T* dgate = op.dinp.as<T>() + row * 2 * hidden;
            gated_row_gradient<function>(dgate, dgate + hidden, op.dout.as<T>() + row * hidden, gate, gate + hidden,
                                         op.hidden);
        });
    });
    set_amax(op.dinp, size_t(op.rows) * 2 * size_t(op.hidden));
}

}  // namespace ops

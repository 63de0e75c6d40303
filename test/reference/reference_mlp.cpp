// GEMMs and activations.
#include "test/reference/reference.h"

namespace ref {

// out[i] = f(inp[i])
void activation_forward(const ops::ActivationForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        const T* inp = op.inp.as<T>();
        for (size_t i = 0; i < op.count; i++) out[i] = store<T>(activation(op.activation, load(inp[i])));
    });
}

// out[r, j] = sum over i of inp[r, i] weight[j, i], plus bias[j]. With an activation out = f(pre_activation), where
// pre_activation is this sum as stored, or for relu2 the unrounded sum.
void matmul_forward(const ops::MatmulForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        T* pre_activation = op.pre_activation.as<T>();
        const T* inp = op.inp.as<T>();
        const T* weight = op.weight.as<T>();
        const T* bias = op.bias.as<T>();
        for (int row = 0; row < op.rows; row++)
            for (int j = 0; j < op.n; j++) {
                double sum = bias ? load(bias[j]) : 0;
                for (int i = 0; i < op.k; i++)
                    sum += load(inp[size_t(row) * op.k + i]) * load(weight[size_t(j) * op.k + i]);
                size_t place = size_t(row) * op.n + j;
                if (pre_activation) {
                    pre_activation[place] = store<T>(sum);
                    sum = load(pre_activation[place]);
                }
                out[place] = store<T>(activation(op.activation, sum));
            }
    });
}

// dinp[r, i] = sum over j of dout[r, j] weight[j, i]. With an activation times f'(kept[r, i]); for relu2, which keeps
// its output, times 2 sqrt(kept[r, i]).
void matmul_backward_input(const ops::MatmulBackwardInput& op) {
    by_storage(op.dinp, [&]<class T>(T) {
        T* dinp = op.dinp.as<T>();
        const T* dout = op.dout.as<T>();
        const T* weight = op.weight.as<T>();
        const T* kept = op.kept.as<T>();
        std::vector<double> sums(op.k);
        for (int row = 0; row < op.rows; row++) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int j = 0; j < op.n; j++)
                for (int i = 0; i < op.k; i++)
                    sums[i] += load(dout[size_t(row) * op.n + j]) * load(weight[size_t(j) * op.k + i]);
            for (int i = 0; i < op.k; i++) {
                size_t place = size_t(row) * op.k + i;
                double slope = op.activation == ActivationFunction::none ? 1
                               : op.activation == ActivationFunction::relu2
                                   ? 2 * std::sqrt(load(kept[place]))
                                   : activation_slope(op.activation, load(kept[place]));
                dinp[place] = store<T>(sums[i] * slope);
            }
        }
    });
}

// dweight[j, i] (+)= sum over r of dout[r, j] inp[r, i];  dbias[j] (+)= sum over r of dout[r, j]
void matmul_backward_weight(const ops::MatmulBackwardWeight& op) {
    by_storage(op.dout, [&]<class T>(T) {
        const T* dout = op.dout.as<T>();
        const T* inp = op.inp.as<T>();
        std::vector<double> sums(op.k);
        for (int j = 0; j < op.n; j++) {
            std::fill(sums.begin(), sums.end(), 0.0);
            double bias_sum = 0;
            for (int row = 0; row < op.rows; row++) {
                double gradient = load(dout[size_t(row) * op.n + j]);
                bias_sum += gradient;
                for (int i = 0; i < op.k; i++) sums[i] += gradient * load(inp[size_t(row) * op.k + i]);
            }
            for (int i = 0; i < op.k; i++) put(op.dweight[size_t(j) * op.k + i], sums[i], op.accumulate);
            if (op.dbias) put(op.dbias[j], bias_sum, op.accumulate);
        }
    });
}

// out[r, i] = f(gate) up with gate = inp[r, i], up = inp[r, hidden + i]
void gated_activation_forward(const ops::GatedActivationForward& op) {
    by_storage(op.out, [&]<class T>(T) {
        T* out = op.out.as<T>();
        const T* inp = op.inp.as<T>();
        for (int row = 0; row < op.rows; row++)
            for (int i = 0; i < op.hidden; i++) {
                double gate = load(inp[size_t(row) * 2 * op.hidden + i]);
                double up = load(inp[size_t(row) * 2 * op.hidden + op.hidden + i]);
                out[size_t(row) * op.hidden + i] = store<T>(activation(op.activation, gate) * up);
            }
    });
}

// dinp[r, i] = dout[r, i] up f'(gate);  dinp[r, hidden + i] = dout[r, i] f(gate)
void gated_activation_backward(const ops::GatedActivationBackward& op) {
    by_storage(op.dinp, [&]<class T>(T) {
        T* dinp = op.dinp.as<T>();
        const T* inp = op.inp.as<T>();
        for (int row = 0; row < op.rows; row++)
            for (int i = 0; i < op.hidden; i++) {
                size_t gate_at = size_t(row) * 2 * op.hidden + i, up_at = gate_at + op.hidden;
                double gate = load(inp[gate_at]), up = load(inp[up_at]);
                double dout = load(op.dout.as<T>()[size_t(row) * op.hidden + i]);
                dinp[gate_at] = store<T>(dout * up * activation_slope(op.activation, gate));
                dinp[up_at] = store<T>(dout * activation(op.activation, gate));
            }
    });
}

}  // namespace ref

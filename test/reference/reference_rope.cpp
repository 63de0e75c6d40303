// Reference of QK norm and rotary position embedding.
#include "test/reference/reference.h"

namespace ref {

namespace {

// Offsets of the query and key heads of a position: head h of qkv, which also holds values, and of arrays without them.
template <class Op> struct Heads {
    const Op& op;
    int heads = op.n_head + op.n_kv_head;

    size_t in_qkv(int b, int t, int h) const {
        return ((size_t(b) * op.seq_len + t) * (op.n_head + 2 * op.n_kv_head) + h) * op.head_size;
    }
    size_t alone(int b, int t, int h) const { return (size_t(b) * op.seq_len + t) * heads + h; }
    int position(int b, int t) const { return op.starts.start(b, op.batch) + t; }
    ConstView weight(int h) const { return h < op.n_head ? op.q_weight : op.k_weight; }

    template <class Body> void for_each(Body body) const {
        for (int b = 0; b < op.batch; b++)
            for (int t = 0; t < op.seq_len; t++)
                for (int h = 0; h < heads; h++) body(b, t, h);
    }
};

struct Turn {
    double cos, sin;
};

template <class Op> Turn turn_of(const Op& op, int position, int i) {
    const float* entry = op.table + 2 * (size_t(position) * (op.rotary / 2) + i);
    return {entry[0], entry[1]};
}

}  // namespace

// rstd = 1 / sqrt(sum(x^2) / head_size + eps);  y = x rstd weight
// with j = i + rotary / 2 for i < rotary / 2:  y_i, y_j = y_i cos - y_j sin, y_j cos + y_i sin
void qk_norm_rope_forward(const ops::QkNormRopeForward& op) {
    by_storage(op.qkv, [&]<class T>(T) {
        const Heads<ops::QkNormRopeForward> at{op};
        const int size = op.head_size;
        at.for_each([&](int b, int t, int h) {
            T* head = op.qkv.as<T>() + at.in_qkv(b, t, h);
            if (op.raw) std::copy(head, head + size, op.raw.as<T>() + at.alone(b, t, h) * size);
            double rstd = 1;
            if (op.rstd) {
                rstd = 1 / std::sqrt(dot(head, head, size) / size + op.eps);
                op.rstd[at.alone(b, t, h)] = float(rstd);
            }
            const T* weight = at.weight(h).template as<T>();
            std::vector<double> y(size);
            for (int c = 0; c < size; c++) y[c] = load(head[c]) * rstd * (weight ? load(weight[c]) : 1);
            for (int i = 0; i < op.rotary / 2; i++) {
                const Turn turn = turn_of(op, op.positions ? op.positions[b * op.seq_len + t] : at.position(b, t), i);
                double &first = y[i], &second = y[i + op.rotary / 2];
                const double turned = first * turn.cos - second * turn.sin;
                second = second * turn.cos + first * turn.sin;
                first = turned;
            }
            for (int c = 0; c < size; c++) head[c] = store<T>(y[c]);
        });
    });
}

// The gradient before the rotation, d, is the transposed rotation of the gradient after it. With normed = raw rstd, or
// without raw the forward op's result rotated back and divided by cos^2 + sin^2, and dnormed = d weight:
//   dhead = rstd (dnormed - normed average(dnormed normed));  dweight (+)= sum of d normed over positions and heads
void qk_norm_rope_backward(const ops::QkNormRopeBackward& op) {
    by_storage(op.dqkv, [&]<class T>(T) {
        const Heads<ops::QkNormRopeBackward> at{op};
        const int size = op.head_size, half = op.rotary / 2;
        std::vector<double> dq_weight(size), dk_weight(size);
        at.for_each([&](int b, int t, int h) {
            T* dhead = op.dqkv.as<T>() + at.in_qkv(b, t, h);
            std::vector<double> d(size), normed(size);
            for (int c = 0; c < size; c++) d[c] = load(dhead[c]);
            for (int i = 0; i < half; i++) {
                const Turn turn = turn_of(op, at.position(b, t), i);
                const double first = d[i], second = d[i + half];
                d[i] = first * turn.cos + second * turn.sin;
                d[i + half] = second * turn.cos - first * turn.sin;
            }
            if (op.rstd) {
                const double rstd = op.rstd[at.alone(b, t, h)];
                const T* result = op.qkv.as<T>() + at.in_qkv(b, t, h);
                for (int c = 0; c < size; c++)
                    normed[c] = op.raw ? load(op.raw.as<T>()[at.alone(b, t, h) * size + c]) * rstd : load(result[c]);
                for (int i = 0; i < half && !op.raw; i++) {
                    const Turn turn = turn_of(op, at.position(b, t), i);
                    const double square = turn.cos * turn.cos + turn.sin * turn.sin;
                    normed[i] = (load(result[i]) * turn.cos + load(result[i + half]) * turn.sin) / square;
                    normed[i + half] = (load(result[i + half]) * turn.cos - load(result[i]) * turn.sin) / square;
                }
                const T* weight = at.weight(h).template as<T>();
                std::vector<double>& dweight = h < op.n_head ? dq_weight : dk_weight;
                double average = 0;
                for (int c = 0; c < size; c++) {
                    dweight[c] += d[c] * normed[c];
                    d[c] *= weight ? load(weight[c]) : 1;
                    average += d[c] * normed[c] / size;
                }
                for (int c = 0; c < size; c++) d[c] = rstd * (d[c] - normed[c] * average);
            }
            for (int c = 0; c < size; c++) dhead[c] = store<T>(d[c]);
        });
        for (int c = 0; c < size; c++) {
            if (op.dq_weight) put(op.dq_weight[c], dq_weight[c], op.accumulate);
            if (op.dk_weight) put(op.dk_weight[c], dk_weight[c], op.accumulate);
        }
    });
}

}  // namespace ref

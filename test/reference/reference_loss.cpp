// Softmax, cross-entropy and its gradient, of a whole vocabulary or of a part.
#include "test/reference/reference.h"

namespace ref {

// The logits of a row after the soft cap, x[v] = softcap tanh(logits[v] / softcap), and the cap's derivative.
struct CappedRow {
    std::vector<double> x, slope;

    template <class T> CappedRow(const T* logits, int vocab, double softcap) : x(size_t(vocab)), slope(size_t(vocab)) {
        for (size_t v = 0; v < x.size(); v++) {
            const double tanh = softcap > 0 ? std::tanh(load(logits[v]) / softcap) : 0;
            x[v] = softcap > 0 ? softcap * tanh : load(logits[v]);
            slope[v] = 1 - tanh * tanh;
        }
    }
};

// max = the largest x;  sum = sum over the columns of exp(x - max);  target = the target's x
void vocabulary_sums(const ops::VocabularySumsOfRows& op) {
    by_storage(op.logits, [&]<class T>(T) {
        for (int row = 0; row < op.rows; row++) {
            const CappedRow row_of_part(op.logits.as<T>() + size_t(row) * op.padded_vocab, op.vocab, op.softcap);
            double max = -INFINITY, sum = 0, target = 0;
            for (double x : row_of_part.x) max = std::max(max, x);
            for (int v = 0; v < op.vocab; v++) {
                sum += std::exp(row_of_part.x[size_t(v)] - max);
                if (op.first_token + v == op.targets[row]) target = row_of_part.x[size_t(v)];
            }
            op.out[row] = {float(max), float(sum), float(target)};
        }
    });
}

// M + log(sum over the parts of sum exp(max - M)), M the largest maximum
static double lse_of_parts(const ops::CrossEntropy& op, int row) {
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < op.parts; i++) max = std::max(max, double(op.sums[size_t(i) * op.rows + row].max));
    for (int i = 0; i < op.parts; i++) {
        const ops::VocabularySums& part = op.sums[size_t(i) * op.rows + row];
        sum += part.sum * std::exp(part.max - max);
    }
    return max + std::log(sum);
}

static double target_of_parts(const ops::CrossEntropy& op, int row) {
    double target = 0;
    for (int i = 0; i < op.parts; i++) target += op.sums[size_t(i) * op.rows + row].target;
    return target;
}

// With p[v] = exp(x[v] - lse):
//   loss = lse - x[target]
//   dlogits[v] = (p[v] - (v is target) + 2 z_loss lse p[v]) x'[v] grad_scale loss_scale,  x' = 1 - tanh^2
// With the sums of parts, lse and x[target] are those of the whole vocabulary and v is a token of the part.
void cross_entropy(const ops::CrossEntropy& op) {
    by_storage(op.logits, [&]<class T>(T) {
        const double gradient_scale = double(op.grad_scale) * (op.loss_scale ? *op.loss_scale : 1);
        for (int row = 0; row < op.rows; row++) {
            T* logits = op.logits.as<T>() + size_t(row) * op.padded_vocab;
            const auto [x, slope] = CappedRow(logits, op.vocab, op.softcap);
            const int target = op.targets[row];
            op.loss[row] = 0;
            if (op.write_dlogits) std::fill_n(logits, op.padded_vocab, store<T>(0));
            if (target < 0) continue;
            const double lse = op.sums ? lse_of_parts(op, row) : log_sum_exp(x.data(), op.vocab);
            op.loss[row] = float(lse - (op.sums ? target_of_parts(op, row) : x[size_t(target)]));
            for (int v = 0; v < op.vocab && op.write_dlogits; v++) {
                const double p = std::exp(x[size_t(v)] - lse);
                const double gradient = p - (op.first_token + v == target) + 2 * op.z_loss * lse * p;
                logits[v] = store<T>(gradient * slope[size_t(v)] * gradient_scale);
            }
        }
    });
}

// *out (+)= sum of loss[i]
void loss_sum(const ops::LossSum& op) {
    double sum = 0;
    for (int i = 0; i < op.rows; i++) sum += std::nearbyint(double(op.loss[i]) * 0x1p26) * 0x1p-26;
    put(*op.out, sum, op.accumulate);
}

}  // namespace ref

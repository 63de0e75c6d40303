// Norms, and updates over chunks of flat arrays. An update reads and writes each element once.

#include <atomic>

#include "kernels/base/exact_squares.h"
#include "kernels/base/rounding.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

// Rounds a chunk of FP32 master weights to the compute weights, while it is in the cache.
template <class T> void store_param(View to, View from, const Chunk& chunk) {
    if (to) convert(to.as<T>() + chunk.begin, from.as<float>() + chunk.begin, size_t(chunk.count));
}

template <class T> double dot(const T* a, const T* b, int count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += double(to_float(a[i])) * double(to_float(b[i]));
    return sum;
}

template <class T> double squared_sum(const T* values, int count) { return dot(values, values, count); }

// Calls body(chunk) for each chunk, or for none if a gradient is not finite.
template <class Op, class Body> void for_chunks(const Op& op, Body&& body) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    parallel_blocks(op.n_chunks, 1, [&](size_t i, size_t) { body(op.chunks[i]); });
}

template <class Rule, class State, class Master> void update_chunk(const ElementwiseUpdate& op, const Chunk& chunk) {
    const UpdateScalars s = scalars_of(op, chunk);
    const RoundingBits random(s.rounding_key, chunk.tensor), random_master(s.rounding_key, chunk.tensor, true);
    const float grad_scale = op.grad_norm->scale;
    Master* master = op.master.as<Master>() + chunk.begin;
    State* states[Rule::kStates];
    for (int k = 0; k < Rule::kStates; k++) states[k] = op.state[k].template as<State>() + chunk.state_begin;
    const float* grad = op.grad + chunk.begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        float weight = to_float(master[i]), state[Rule::kStates];
        for (int k = 0; k < Rule::kStates; k++) state[k] = to_float(states[k][i]);
        Rule::update(s, grad[i] * grad_scale, weight, state);
        master[i] = round_stochastically<Master>(weight, random_master.of(chunk.first + uint32_t(i)) & 0xffffu);
        const uint32_t bits = random.of(chunk.first + uint32_t(i));
        for (int k = 0; k < Rule::kStates; k++)
            states[k][i] = round_stochastically<State>(state[k], bits >> 16 * k & 0xffffu);
    }
}

template <class Rule, class State, class Master> void sum_chunk(const TrustSums& op, const Chunk& chunk) {
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale;
    const Master* master = op.master.as<Master>() + chunk.begin;
    const State* states[Rule::kStates];
    for (int k = 0; k < Rule::kStates; k++) states[k] = op.state[k].template as<State>() + chunk.state_begin;
    const float* grad = op.grad + chunk.begin;
    double weights = 0, directions = 0;
#pragma omp simd reduction(+ : weights, directions)
    for (int i = 0; i < chunk.count; i++) {
        float state[Rule::kStates];
        for (int k = 0; k < Rule::kStates; k++) state[k] = to_float(states[k][i]);
        const float weight = to_float(master[i]);
        const double direction = Rule::direction(s, grad[i] * grad_scale, weight, state);
        weights += double(weight) * double(weight);
        directions += direction * direction;
    }
    op.out[2 * chunk.index] = weights, op.out[2 * chunk.index + 1] = directions;
}

template <class T, class State> void direct_chunk(const MomentumDirection& op, const Chunk& chunk) {
    const float momentum = op.scalars[chunk.group].momentum, grad_scale = op.grad_norm->scale;
    T* direction = op.direction.as<T>() + chunk.state_begin;
    const float* grad = op.grad + chunk.begin;
    if (!op.m) {
#pragma omp simd
        for (int i = 0; i < chunk.count; i++) direction[i] = from_float<T>(grad[i] * grad_scale);
        return;
    }
    const RoundingBits random(op.scalars[chunk.group].rounding_key, chunk.tensor);
    State* m = op.m.as<State>() + chunk.state_begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        float average = to_float(m[i]);
        direction[i] = from_float<T>(momentum_step(momentum, op.nesterov, grad[i], grad_scale, average));
        m[i] = round_stochastically<State>(average, random.of(chunk.first + uint32_t(i)) & 0xffffu);
    }
}

template <class T, class Master> void apply_chunk(const ApplyDirection& op, const Chunk& chunk) {
    const RoundingBits random(op.scalars[chunk.group].rounding_key, chunk.tensor, true);
    const float keep = op.scalars[chunk.group].keep;
    const float step = step_of(op, chunk);
    Master* master = op.master.as<Master>() + chunk.begin;
    const T* direction = op.direction.as<T>() + chunk.state_begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        const float weight = stepped(keep, op.cautious, step, to_float(direction[i]), to_float(master[i]));
        master[i] = round_stochastically<Master>(weight, random.of(chunk.first + uint32_t(i)) & 0xffffu);
    }
}

// Calls body(row, col, i, count) for the piece of each row in a chunk: its first column, its first element in the
// chunk and its length.
template <class Body> void for_rows(const Chunk& chunk, const FactorLayer& layer, Body&& body) {
    const size_t first = chunk.begin - size_t(layer.begin), cols = size_t(layer.cols);
    for (int i = 0, count; i < chunk.count; i += count) {
        const size_t row = (first + size_t(i)) / cols, col = (first + size_t(i)) % cols;
        count = int(std::min(cols - col, size_t(chunk.count - i)));
        body(row, col, i, count);
    }
}

// Another thread may add at the same time. The sums are exact, so the order does not matter.
void add_exactly(double* sum, double value) { std::atomic_ref(*sum).fetch_add(value, std::memory_order_relaxed); }

void add_exactly(double* sums, double high, double low) { add_exactly(sums, high), add_exactly(sums + 1, low); }

void add_squares(double* sum, const float* values, int count) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; i++) most = std::max(most, magnitude(values[i]));
    if (most >= kInfinityBits) return add_exactly(sum + kSquareBins, 1);
    const SquareBins bins(std::bit_cast<float>(most));
    double high = 0, middle = 0, low = 0;
#pragma omp simd reduction(+ : high, middle, low)
    for (int i = 0; i < count; i++) {
        const SquareParts parts(values[i], bins);
        high += parts.high, middle += parts.middle, low += parts.low;
    }
    add_exactly(sum + bins.first, high, middle), add_exactly(sum + bins.first + 2, low);
}

void add_chunk(const FactorSums& op, const Chunk& chunk, double unit) {
    const FactorLayer& layer = op.layers[chunk.layer];
    const float grad_scale = op.grad_norm->scale;
    const size_t cols = size_t(layer.cols);
    double *col_high = thread_scratch<double>(2 * cols), *col_low = col_high + cols;
    std::fill_n(col_high, 2 * cols, 0.0);
    for_rows(chunk, layer, [&](size_t row, size_t col, int first, int count) {
        const float* grad = op.grad + chunk.begin + first;
        double high = 0, low = 0;
#pragma omp simd reduction(+ : high, low)
        for (int i = 0; i < count; i++) {
            const ExactParts parts(grad[i] * grad_scale, unit);
            high += parts.high, low += parts.low;
            col_high[col + size_t(i)] += parts.high, col_low[col + size_t(i)] += parts.low;
        }
        add_exactly(op.rows + 2 * (layer.first_row + row), high, low);
    });
    for (size_t col = 0; col < cols; col++)
        if (col_high[col] != 0 || col_low[col] != 0)
            add_exactly(op.cols + 2 * (layer.first_col + col), col_high[col], col_low[col]);
}

template <class Master> void direct_chunk(const FactoredDirection& op, const Chunk& chunk) {
    const FactorLayer& layer = op.layers[chunk.layer];
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale;
    double weights = 0, directions = 0;
    for_rows(chunk, layer, [&](size_t row, size_t col, int first, int count) {
        const float factor = AdafactorRule::row_factor(s, layer, op.row_v[layer.first_row + row], op.mean[chunk.layer]);
        const float* col_v = op.col_v + layer.first_col + col;
        const Master* master = op.master.as<Master>() + chunk.begin + first;
        float* grad = op.grad + chunk.begin + first;
#pragma omp simd reduction(+ : weights, directions)
        for (int i = 0; i < count; i++) {
            grad[i] = AdafactorRule::direction(s, grad[i] * grad_scale, factor * col_v[i]);
            weights += double(to_float(master[i])) * double(to_float(master[i]));
            directions += double(grad[i]) * double(grad[i]);
        }
    });
    op.sums[2 * chunk.index] = weights, op.sums[2 * chunk.index + 1] = directions;
}

constexpr size_t kPart = 1 << 15;  // elements of a matrix that are summed at a time

}  // namespace

void squared_sums(const SquaredSums& op, Stream) {
    parallel_blocks(op.n_chunks, 1, [&](size_t i, size_t) {
        const Chunk& chunk = op.chunks[i];
        add_squares(op.out + chunk.tensor * kSquareEntries, op.values + chunk.begin, chunk.count);
    });
}

void grad_norm_finish(const GradNormFinish& op, Stream) {
    double sum = 0;
    int non_finite_tensor = -1;
    for (int i = 0; i < op.n_tensors; i++) {
        const double tensor = sum_of_bins(op.sums + i * kSquareEntries);
        sum += tensor;
        if (non_finite_tensor < 0 && !std::isfinite(tensor)) non_finite_tensor = i;
    }
    const double norm = std::sqrt(sum) / *op.loss_scale;
    const double coefficient = op.clip > 0 ? std::min(1.0, op.clip / (norm + 1e-6)) : 1.0;
    *op.out = {.norm = float(norm),
               .scale = float(coefficient / *op.loss_scale),
               .non_finite_tensor = non_finite_tensor,
               .reserved = 0};
}

void elementwise_update(const ElementwiseUpdate& op, Stream) {
    dispatch_weights("elementwise_update", op.master, op.param, [&]<class Master, class Param>() {
        dispatch(op.rule, op.state, [&]<class Rule, class State>() {
            for_chunks(op, [&](const Chunk& chunk) {
                update_chunk<Rule, State, Master>(op, chunk);
                store_param<Param>(op.param, op.master, chunk);
            });
        });
    });
}

void trust_sums(const TrustSums& op, Stream) {
    dispatch_state("trust_sums", op.master.dtype, [&]<class Master>() {
        dispatch_layerwise(op.rule, op.state, [&]<class Rule, class State>() {
            for_chunks(op, [&](const Chunk& chunk) { sum_chunk<Rule, State, Master>(op, chunk); });
        });
    });
}

void trust_ratios(const TrustRatios& op, Stream) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    for (int i = 0; i < op.n_layers; i++) {
        const Layer& layer = op.layers[i];
        double weights = 0, directions = 0;
        for (int k = 0; k < layer.n_sums; k++) {
            const double* sums = op.sums + 2 * (layer.first + k * layer.stride);
            weights += sums[0], directions += sums[1];
        }
        op.out[i] = layer_ratio(op, layer, weights, directions);
    }
}

void factor_sums(const FactorSums& op, Stream) {
    const double unit = exact_unit(op.grad_norm->norm);
    for_chunks(op, [&](const Chunk& chunk) { add_chunk(op, chunk, unit); });
}

void factor_moments(const FactorMoments& op, Stream) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    parallel_blocks(size_t(op.n_layers), 1, [&](size_t number, size_t) {
        const FactorLayer& layer = op.layers[number];
        const UpdateScalars& s = op.scalars[layer.group];
        double sum = 0;
        for (size_t row = layer.first_row; row < layer.first_row + size_t(layer.rows); row++) {
            op.row_v[row] = AdafactorRule::average(s, op.rows + 2 * row, layer.cols, op.row_v[row]);
            sum += double(op.row_v[row]);
        }
        for (size_t col = layer.first_col; col < layer.first_col + size_t(layer.cols); col++)
            op.col_v[col] = AdafactorRule::average(s, op.cols + 2 * col, layer.rows, op.col_v[col]);
        op.mean[number] = float(sum / layer.rows);
    });
}

void factored_direction(const FactoredDirection& op, Stream) {
    dispatch_state("factored_direction", op.master.dtype, [&]<class Master>() {
        for_chunks(op, [&](const Chunk& chunk) { direct_chunk<Master>(op, chunk); });
    });
}

void momentum_direction(const MomentumDirection& op, Stream) {
    dispatch("momentum_direction", {op.direction}, [&]<class T>() {
        dispatch_state("momentum_direction", op.m.dtype, [&]<class State>() {
            for_chunks(op, [&](const Chunk& chunk) { direct_chunk<T, State>(op, chunk); });
        });
    });
}

void apply_direction(const ApplyDirection& op, Stream) {
    dispatch_weights("apply_direction", op.master, op.param, [&]<class Master, class Param>() {
        dispatch("apply_direction", {op.direction}, [&]<class T>() {
            for_chunks(op, [&](const Chunk& chunk) {
                apply_chunk<T, Master>(op, chunk);
                store_param<Param>(op.param, op.master, chunk);
            });
        });
    });
}

void frobenius_normalize(const FrobeniusNormalize& op, Stream) {
    dispatch("frobenius_normalize", op.out, op.inp, [&]<class Out, class In>() {
        Out* out = op.out.template as<Out>();
        const In* inp = op.inp.template as<In>();
        double* sums = static_cast<double*>(op.scratch);
        parallel_blocks(op.count, kPart, [&](size_t begin, size_t end) {
            sums[begin / kPart] = squared_sum(inp + begin, int(end - begin));
        });
        double sum = 0;
        for (size_t part = 0; part * kPart < op.count; part++) sum += sums[part];
        const float divisor = frobenius_divisor(sum, op.eps);
        parallel_blocks(op.count, kPart, [&](size_t begin, size_t end) {
#pragma omp simd
            for (size_t i = begin; i < end; i++) out[i] = from_float<Out>(to_float(inp[i]) / divisor);
        });
    });
}

void row_normalize(const RowNormalize& op, Stream) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    dispatch("row_normalize", op.out, op.inp, [&]<class Out, class In>() {
        const size_t cols = size_t(op.cols);
        auto* rows = static_cast<RowScale*>(op.scratch);
        parallel_blocks(size_t(op.rows), 1, [&](size_t row, size_t) {
            rows[row] = row_scale(op, squared_sum(op.inp.template as<In>() + row * cols, op.cols), op.v[row]);
        });
        double sum = 0;
        for (int row = 0; row < op.rows; row++) sum += rows[row].squared_sum;
        const float scale = op.norm / frobenius_divisor(sum, op.eps);
        parallel_blocks(size_t(op.rows), 1, [&](size_t row, size_t) {
            const In* inp = op.inp.template as<In>() + row * cols;
            Out* out = op.out.template as<Out>() + row * cols;
            const float factor = rows[row].factor * scale;
#pragma omp simd
            for (size_t i = 0; i < cols; i++) out[i] = from_float<Out>(to_float(inp[i]) * factor);
        });
    });
}

size_t row_normalize_scratch_bytes(const RowNormalize& op) { return size_t(op.rows) * sizeof(RowScale); }

size_t frobenius_normalize_scratch_bytes(const FrobeniusNormalize& op) {
    return (op.count + kPart - 1) / kPart * sizeof(double);
}

void adam_direction(const AdamDirection& op, Stream) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    parallel_blocks(op.count, kPart, [&](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) op.out[i] = adam_step(op.scalars, op.m[i], op.grad[i], op.v[i]);
    });
}

// Subtracts from x its components along the orthonormal rows of q, and returns the norm of the rest.
static double subtract_components(float* x, const float* q, size_t rows, size_t cols) {
    constexpr size_t kBlock = 256;  // columns
    for (int pass = 0; pass < 2; pass++) {
        double component[kMaxOrthonormalized];
        parallel_blocks(rows, 4, [&](size_t begin, size_t end) {
            for (size_t r = begin; r < end; r++) component[r] = dot(x, q + r * cols, int(cols));
        });
        parallel_blocks(cols, kBlock, [&](size_t begin, size_t end) {
            double rest[kBlock];
            std::copy(x + begin, x + end, rest);
            for (size_t r = 0; r < rows; r++) {
                const float* row = q + r * cols + begin;
#pragma omp simd
                for (size_t i = 0; i < end - begin; i++) rest[i] = std::fma(-component[r], double(row[i]), rest[i]);
            }
            std::copy(rest, rest + (end - begin), x + begin);
        });
    }
    return std::sqrt(dot(x, x, int(cols)));
}

void orthonormalize_rows(const OrthonormalizeRows& op, Stream) {
    const size_t rows = size_t(op.rows), cols = size_t(op.cols);
    for (size_t row = 0; row < rows; row++) {
        float* out = op.out + row * cols;
        std::copy_n(op.inp + row * cols, cols, out);
        double norm = subtract_components(out, op.out, row, cols);
        if (!(norm > op.tolerance)) {
            std::copy_n(op.fallback + row * cols, cols, out);
            norm = subtract_components(out, op.out, row, cols);
        }
        const double factor = norm > 0 ? 1 / norm : 0;
        for (size_t i = 0; i < cols; i++) out[i] = float(out[i] * factor);
    }
}

}  // namespace ops

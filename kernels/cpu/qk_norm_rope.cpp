// QK norm and RoPE. A head is loaded into a row of floats, processed there and written back. The cosines and sines of a
// position are deinterleaved once for all of its heads, so that every loop vectorizes. The gradients of the norm
// weights are summed over fixed blocks of positions, then over the blocks in order.
#include "kernels/shared/qk_norm_rope.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// Thread-local rows: `kRows` rows for the floats of a head, and the angles of the position.
template <int kRows> struct Work {
    float *head[kRows], *cosine, *sine;

    Work(int head_size, int half) {
        float* memory = thread_scratch<float>(size_t(kRows) * head_size + 2 * half);
        for (float*& row : head) row = memory, memory += head_size;
        cosine = memory, sine = memory + half;
    }
    // Direction -1 gives the transposed rotation.
    void load_angles(const float* table, size_t position, int half, float direction) const {
        const float* entries = table + position * 2 * half;
        for (int i = 0; i < half; i++) cosine[i] = entries[2 * i], sine[i] = direction * entries[2 * i + 1];
    }
};

// (x_i cos - x_j sin, x_j cos + x_i sin) with j = i + half
void rotate(float* __restrict__ x, const float* __restrict__ cosine, const float* __restrict__ sine, int half) {
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half] = second * cosine[i] + first * sine[i];
    }
}

// The inverse of a scaled rotation is its transpose divided by cos^2 + sin^2.
void divide_by_squares(float* __restrict__ x, const float* __restrict__ cosine, const float* __restrict__ sine,
                       int half) {
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float square = cosine[i] * cosine[i] + sine[i] * sine[i];
        x[i] /= square;
        x[i + half] /= square;
    }
}

float rstd_of(const float* x, int size, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < size; c++) squares += x[c] * x[c];
    return 1.0f / std::sqrt(squares / size + eps);
}

template <class T> void scale(float* __restrict__ x, float factor, const T* __restrict__ weight, int size) {
    if (!weight) {
#pragma omp simd
        for (int c = 0; c < size; c++) x[c] *= factor;
        return;
    }
#pragma omp simd
    for (int c = 0; c < size; c++) x[c] = x[c] * factor * to_float(weight[c]);
}

// The row of the table for a row of the batch.
template <class Op> size_t position_of(const Op& op, size_t row) {
    return size_t(op.starts.start(int(row / op.seq_len), op.batch)) + row % op.seq_len;
}

template <class T> void forward_position(const QkNormRopeForward& op, size_t row) {
    const int heads = op.n_head + op.n_kv_head, size = op.head_size, half = op.rotary / 2;
    const Work<1> work(size, half);
    float* x = work.head[0];
    const size_t position = op.positions ? size_t(op.positions[row]) : position_of(op, row);
    if (half > 0) work.load_angles(op.table, position, half, 1.0f);
    T* qkv = op.qkv.as<T>() + row * (heads + op.n_kv_head) * size;
    if (op.raw) std::memcpy(op.raw.as<T>() + row * heads * size, qkv, size_t(heads) * size * sizeof(T));
    for (int h = 0; h < heads; h++) {
        convert(x, qkv + size_t(h) * size, size_t(size));
        if (op.rstd) {
            const float rstd = rstd_of(x, size, op.eps);
            op.rstd[row * heads + h] = rstd;
            scale(x, rstd, (h < op.n_head ? op.q_weight : op.k_weight).as<T>(), size);
        }
        rotate(x, work.cosine, work.sine, half);
        convert(qkv + size_t(h) * size, x, size_t(size));
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// dweight += d normed;  d = rstd (d weight - normed average(d weight normed)). Without a weight dweight is null.
template <class T>
void norm_gradient(float* __restrict__ d, float* __restrict__ dweight, const float* __restrict__ normed,
                   const T* __restrict__ weight, float rstd, int size) {
    float sum = 0;
    if (dweight) {
#pragma omp simd
        for (int c = 0; c < size; c++) dweight[c] += d[c] * normed[c];
    }
    if (weight) {
#pragma omp simd
        for (int c = 0; c < size; c++) d[c] *= to_float(weight[c]);
    }
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < size; c++) sum += d[c] * normed[c];
    const float average = sum / size;
#pragma omp simd
    for (int c = 0; c < size; c++) d[c] = (d[c] - normed[c] * average) * rstd;
}

// dweights (2, head_size): the block's sums for queries and keys.
template <class T> void backward_position(const QkNormRopeBackward& op, size_t row, float* dweights) {
    const int heads = op.n_head + op.n_kv_head, size = op.head_size, half = op.rotary / 2;
    const Work<2> work(size, half);
    auto [d, normed] = work.head;
    if (half > 0) work.load_angles(op.table, position_of(op, row), half, -1.0f);
    const size_t begin = row * (heads + op.n_kv_head) * size;
    for (int h = 0; h < heads; h++) {
        T* dhead = op.dqkv.as<T>() + begin + size_t(h) * size;
        convert(d, dhead, size_t(size));
        rotate(d, work.cosine, work.sine, half);
        if (op.rstd) {
            const bool is_query = h < op.n_head;
            const float rstd = op.rstd[row * heads + h];
            if (op.raw) {
                convert(normed, op.raw.as<T>() + (row * heads + h) * size, size_t(size));
                scale<T>(normed, rstd, nullptr, size);
            } else {
                convert(normed, op.qkv.as<T>() + begin + size_t(h) * size, size_t(size));
                rotate(normed, work.cosine, work.sine, half);
                divide_by_squares(normed, work.cosine, work.sine, half);
            }
            float* dweight = (is_query ? op.dq_weight : op.dk_weight) ? dweights + (is_query ? 0 : size) : nullptr;
            norm_gradient(d, dweight, normed, (is_query ? op.q_weight : op.k_weight).as<T>(), rstd, size);
        }
        convert(dhead, d, size_t(size));
    }
}

size_t rows_of(const QkNormRopeBackward& op) { return size_t(op.batch) * op.seq_len; }

}  // namespace

void qk_norm_rope_forward(const QkNormRopeForward& op, Stream) {
    dispatch("qk_norm_rope_forward", {op.qkv, op.raw, op.q_weight, op.k_weight}, [&]<class T>() {
        require_valid(op);
        parallel_for(size_t(op.batch) * op.seq_len, [&](size_t row) { forward_position<T>(op, row); });
    });
}

void qk_norm_rope_backward(const QkNormRopeBackward& op, Stream) {
    dispatch("qk_norm_rope_backward", {op.dqkv, op.qkv, op.raw, op.q_weight, op.k_weight}, [&]<class T>() {
        require_valid(op);
        float* partials = static_cast<float*>(op.scratch);  // (n_blocks, 2, head_size)
        const size_t rows = rows_of(op), block = rows_per_block(rows);
        parallel_blocks(rows, block, [&](size_t begin, size_t end) {
            float* dweights = partials + begin / block * 2 * op.head_size;
            if (op.dq_weight || op.dk_weight) std::fill(dweights, dweights + 2 * op.head_size, 0.0f);
            for (size_t row = begin; row < end; row++) backward_position<T>(op, row, dweights);
        });
        const int size = op.head_size;
        sum_blocks(op.dq_weight, partials, n_blocks(rows), size, 0, size, op.accumulate);
        sum_blocks(op.dk_weight, partials + size, n_blocks(rows), size, 0, size, op.accumulate);
        set_amax(op.dqkv, rows * (op.n_head + 2 * op.n_kv_head) * size);
    });
}

size_t qk_norm_rope_backward_scratch_bytes(const QkNormRopeBackward& op) {
    return n_blocks(rows_of(op)) * 2 * op.head_size * sizeof(float);
}

}  // namespace ops

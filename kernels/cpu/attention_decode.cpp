// Attention of one query per sequence with a KV cache; bound by the bandwidth of reading the cache.
//
// One task per row and key-value head. It appends the row's key and value to the cache. Then it computes, for each
// query head of the group, the scores of all keys, their softmax and the sum of the values. Arithmetic is float for all
// storage types. Dot products are summed over vector lanes, so the bits do not depend on the number of threads.
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

template <class T> float dot(const float* __restrict__ query, const T* __restrict__ key, int size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < size; c++) sum += query[c] * to_float(key[c]);
    return sum;
}

template <class T> void add_scaled(float* __restrict__ out, const T* __restrict__ value, float factor, int size) {
#pragma omp simd
    for (int c = 0; c < size; c++) out[c] += factor * to_float(value[c]);
}

// The keys and values of a row. The same for all query heads.
template <class T> struct Sequence {
    T* keys;  // of one key-value head, with stride `step`
    T* values;
    size_t step;
    int first, position;
};

template <class T>
void attend(T* __restrict__ out, const T* __restrict__ query, const Sequence<T>& at, const AttentionDecode& op) {
    const int size = op.head_size, count = at.position + 1 - at.first;
    float* const q = thread_scratch<float>(2 * size_t(size) + size_t(op.capacity));
    float *const sum = q + size, *const scores = sum + size;
    for (int c = 0; c < size; c++) q[c] = to_float(query[c]), sum[c] = 0;

    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    for (int j = 0; j < count; j++) {
        float score = op.scale * dot(q, at.keys + size_t(at.first + j) * at.step, size);
        if (op.softcap > 0) score = op.softcap * std::tanh(score / op.softcap);
        scores[j] = score;
        largest = std::max(largest, score);
    }
    for (int j = 0; j < count; j++) {
        scores[j] = std::exp(scores[j] - largest);
        total += scores[j];
        add_scaled(sum, at.values + size_t(at.first + j) * at.step, scores[j], size);
    }
    for (int c = 0; c < size; c++) out[c] = from_float<T>(sum[c] / total);
}

template <class T> void decode(const AttentionDecode& op) {
    const size_t size = size_t(op.head_size), group = size_t(op.n_head / op.n_kv_head);
    const size_t queries = size_t(op.n_head) * size, keys = size_t(op.n_kv_head) * size, step = 2 * keys;
    parallel_for(size_t(op.rows) * size_t(op.n_kv_head), [&](size_t task) {
        const size_t row = task / size_t(op.n_kv_head), kv_head = task % size_t(op.n_kv_head);
        const AttentionDecode::Place place = op.places[row];
        const T* const query = op.qkv.as<T>() + row * (queries + step);
        const T* const own = query + queries + kv_head * size;
        T* sequence = op.cache.as<T>() + size_t(place.sequence) * size_t(op.capacity) * step;
        Sequence<T> at{sequence + kv_head * size, sequence + keys + kv_head * size, step, place.first_key,
                       place.position};
        if (op.window > 0) at.first = std::max(at.first, place.position + 1 - op.window);
        std::copy_n(own, size, at.keys + size_t(place.position) * step);
        std::copy_n(own + keys, size, at.values + size_t(place.position) * step);
        for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            attend(op.out.as<T>() + row * queries + head * size, query + head * size, at, op);
    });
}

}  // namespace

void attention_decode(const AttentionDecode& op, Stream) {
    require(op.n_kv_head > 0 && op.n_head % op.n_kv_head == 0,
            "attention_decode: n_head %d is not a multiple of n_kv_head %d", op.n_head, op.n_kv_head);
    dispatch("attention_decode", {op.out, op.cache, op.qkv}, [&]<class T>() { decode<T>(op); });
}

size_t attention_decode_scratch_bytes(const AttentionDecode&) { return 0; }

}  // namespace ops

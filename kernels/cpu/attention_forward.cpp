// attention_forward: one task per (batch, heads, query block), which loops over the visible key blocks.
#include <cmath>
#include <limits>

#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/attention_layout.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// The online softmax of every query of a block.
struct OnlineSoftmax {
    float max[kQueries], sum[kQueries];
    float rescale[kQueries];  // factor on sums that used the previous maximum

    OnlineSoftmax() {
        std::fill(max, max + kQueries, std::numeric_limits<float>::lowest());
        std::fill(sum, sum + kQueries, 0.0f);
    }

    // Updates maxima and sums with a tile of scores and replaces the scores with exp(score - max).
    void add(float* scores, const ScoreTile& tile) {
        float before[kQueries];
        std::copy(max, max + kQueries, before);
        for (int key = 0; key < tile.n_keys(); key++) {
            const float* row = scores + key * kQueries;
#pragma omp simd
            for (int q = tile.first_lane(); q < tile.end_lane(); q++) max[q] = row[q] > max[q] ? row[q] : max[q];
        }
#pragma omp simd
        for (int q = tile.first_lane(); q < tile.end_lane(); q++) {
            rescale[q] = exp_approx(before[q] - max[q]);
            sum[q] *= rescale[q];
        }
        for (int key = 0; key < tile.n_keys(); key++) {
            float* row = scores + key * kQueries;
#pragma omp simd
            for (int q = tile.first_lane(); q < tile.end_lane(); q++) {
                row[q] = exp_approx(row[q] - max[q]);
                sum[q] += row[q];
            }
        }
    }
};

void rescale_rows(float* out, int step, const float* factor, const ScoreTile& tile) {
    for (int row = tile.first_lane(); row < tile.n_seeing; row++) {
#pragma omp simd
        for (int c = 0; c < step; c++) out[row * step + c] *= factor[row];
    }
}

// Forward for one block of queries of adjacent heads with the same keys (FlashAttention-2, algorithm 1).
template <class T> void attend(const AttentionForward& op, int b, int first_head, int n_heads, int query_begin) {
    const AttentionLayout at(op);
    const int step = round_up_to_tile(at.head_size), size = at.head_size, kv_head = first_head / at.group();
    const int n_queries = std::min(kQueries, at.seq_len - query_begin);

    Carver memory(thread_scratch<float>(size_t(2 * n_heads * kQueries + 2 * kKeys) * step + kKeys * kQueries));
    float* queries_t = memory.take(n_heads * step, kQueries);
    float* out = memory.take(n_heads * kQueries, step);
    float* keys = memory.take(kKeys, step);
    float* values = memory.take(kKeys, step);
    float* scores = memory.take(kKeys, kQueries);
    alignas(64) float factors[kKeys * kQueries];
    OnlineSoftmax softmax[kHeadsOfTask];
    const FirstKeys first(op, b, query_begin, n_queries);
    const KeyRows<T> rows = KeyRows<T>::of(op, b, kv_head);
    const bool continues = op.chunk && !op.chunk.is_first;

    for (int h = 0; h < n_heads; h++) {
        load_tile(out + h * kQueries * step, step, kQueries, op.qkv.as<T>() + at.query(b, first_head + h, query_begin),
                  at.qkv_step(), n_queries, size);
        tile_transpose({queries_t + h * kQueries * step, kQueries, out + h * kQueries * step, step, kQueries, step},
                       query_factor(op));
        if (!continues) continue;  // the first key of a query overwrites or rescales its `out` with 0
        const size_t place = at.lse(b, first_head + h, query_begin);
        std::copy_n(op.running.max + place, n_queries, softmax[h].max);
        std::copy_n(op.running.sum + place, n_queries, softmax[h].sum);
        load_tile(out + h * kQueries * step, step, kQueries, op.running.out + at.out(b, first_head + h, query_begin),
                  at.out_step(), n_queries, size);
    }
    for (int key_begin = first.first_tile(); key_begin < first.end(); key_begin += kKeys) {
        // Overwrites `out` for every query.
        const bool is_first = !continues && key_begin == first.first_tile();
        const ScoreTile tile = is_first ? first.tile_of_all_queries(key_begin) : first.tile(key_begin);
        load_tile(keys, step, tile.n_keys(), rows.keys + key_begin * rows.step, rows.step, tile.n_keys(), size);
        load_tile(values, step, tile.n_keys(), rows.values + key_begin * rows.step, rows.step, tile.n_keys(), size);
        for (int h = 0; h < n_heads; h++) {
            float* out_of_head = out + h * kQueries * step;
            keys_times_queries(scores, keys, queries_t + h * kQueries * step, step, size, tile);
            if (op.softcap > 0) cap_scores(scores, op.softcap, tile);
            mask(scores, tile, first);
            softmax[h].add(scores, tile);
            if (op.dropout) {
                fill_factors(factors, op.dropout, op.chunk.start, b, first_head + h, tile);
                multiply_scores(scores, factors, tile);
            }
            if (!is_first) rescale_rows(out_of_head, step, softmax[h].rescale, tile);
            add_over_keys(out_of_head, scores, values, step, tile, !is_first);
        }
    }
    if (op.chunk && !op.chunk.is_last) {
        for (int h = 0; h < n_heads; h++) {
            const size_t place = at.lse(b, first_head + h, query_begin);
            std::copy_n(softmax[h].max, n_queries, op.running.max + place);
            std::copy_n(softmax[h].sum, n_queries, op.running.sum + place);
            for (int q = 0; q < n_queries; q++)
                store_row(op.running.out + at.out(b, first_head + h, query_begin + q), out + (h * kQueries + q) * step,
                          size, 1.0f);
        }
        return;
    }
    for (int h = 0; h < n_heads; h++)
        for (int q = 0; q < n_queries; q++) {
            const int head = first_head + h, position = query_begin + q;
            store_row(op.out.as<T>() + at.out(b, head, position), out + (h * kQueries + q) * step, size,
                      1.0f / softmax[h].sum[q]);
            op.lse[at.lse(b, head, position)] = softmax[h].max[q] + std::log(softmax[h].sum[q]);
        }
}

}  // namespace

void attention_forward(const AttentionForward& op, Stream) {
    dispatch("attention_forward", {op.out, op.qkv, op.chunk.kv}, [&]<class T>() {
        require_valid(op);
        const int n_blocks = (op.seq_len + kQueries - 1) / kQueries;
        const int group = op.n_head / op.n_kv_head, parts = (group + kHeadsOfTask - 1) / kHeadsOfTask;
        parallel_blocks(size_t(op.batch) * op.n_kv_head * parts * n_blocks, 1, [&](size_t task, size_t) {
            const int block = int(task % n_blocks), part = int(task / n_blocks % parts);
            const size_t kv_head = task / n_blocks / parts;  // over all samples
            const int first = part * group / parts, n_heads = (part + 1) * group / parts - first;
            attend<T>(op, int(kv_head / op.n_kv_head), int(kv_head % op.n_kv_head) * group + first, n_heads,
                      block * kQueries);
        });
    });
    set_amax(op.out, size_t(op.batch) * op.seq_len * op.n_head * op.head_size);
}

}  // namespace ops

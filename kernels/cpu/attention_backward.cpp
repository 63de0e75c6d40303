// attention_backward: one task per (batch, key-value head), because dkey and dvalue are sums over queries. They are
// accumulated in `scratch`, dquery in a tile.
#include <array>
#include <optional>

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

// out (keys, size) += scores right, where scores is (keys, queries) and right (queries, size).
void add_over_queries(float* out, const float* scores, const float* right, int step, const ScoreTile& tile) {
    tile_product({.out = out,
                  .out_step = step,
                  .left = scores + tile.first_lane(),
                  .left_step = kQueries,
                  .right = right + tile.first_lane() * step,
                  .right_step = step,
                  .rows = tile.n_keys(),
                  .cols = step,
                  .depth = tile.rows_from_first_lane(),
                  .accumulate = true});
}

// The query tiles of one head in the backward op.
struct QueryTiles {
    float *queries, *queries_t;  // (kQueries, step), transposed and scaled
    float *dout, *dout_t;        // (kQueries, step), transposed
    float* dqueries;             // (kQueries, step)
    float *lse, *dout_out;       // (kQueries); dout_out is dout . out of each query

    static size_t elements(int step) { return size_t(5 * kQueries) * step + 2 * kQueries; }
    QueryTiles(Carver& memory, int step) {
        for (float** tile : {&queries, &queries_t, &dout, &dout_t, &dqueries}) *tile = memory.take(kQueries, step);
        for (float** lanes : {&lse, &dout_out}) *lanes = memory.take(1, kQueries);
    }
};

// The key tiles, and the scores with the queries of one head.
struct KeyTiles {
    float *keys, *values;     // (kKeys, step)
    float *scores, *dscores;  // (kKeys, kQueries)

    static size_t elements(int step) { return size_t(2 * kKeys) * step + 2 * kKeys * kQueries; }
    KeyTiles(Carver& memory, int step) {
        for (float** tile : {&keys, &values}) *tile = memory.take(kKeys, step);
        for (float** tile : {&scores, &dscores}) *tile = memory.take(kKeys, kQueries);
    }
};

template <class T>
void load_queries(const QueryTiles& tiles, const AttentionBackward& op, int b, int head, int begin, int count) {
    const AttentionLayout at(op);
    const int step = round_up_to_tile(at.head_size), size = at.head_size;
    const T* dout = op.dout.as<T>() + at.out(b, head, begin);
    const T* out = op.out.as<T>() + at.out(b, head, begin);
    load_tile(tiles.queries, step, kQueries, op.qkv.as<T>() + at.query(b, head, begin), at.qkv_step(), count, size);
    load_tile(tiles.dout, step, kQueries, dout, at.out_step(), count, size);
    tile_transpose({tiles.queries_t, kQueries, tiles.queries, step, kQueries, step}, query_factor(op));
    tile_transpose(TileTranspose{tiles.dout_t, kQueries, tiles.dout, step, kQueries, step});
    const bool continues = op.chunk && !op.chunk.is_first;
    load_tile(tiles.dqueries, step, kQueries, continues ? op.dquery + at.out(b, head, begin) : nullptr, at.out_step(),
              continues ? count : 0, size);
    std::fill(tiles.lse, tiles.lse + kQueries, 0.0f);
    std::fill(tiles.dout_out, tiles.dout_out + kQueries, 0.0f);
    std::copy_n(op.lse + at.lse(b, head, begin), count, tiles.lse);
    for (int q = 0; q < count; q++) {
        const T* out_row = out + q * at.out_step();
        const float* dout_row = tiles.dout + q * step;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < size; c++) sum += dout_row[c] * to_float(out_row[c]);
        tiles.dout_out[q] = sum;
    }
}

// scores = p = exp(score - lse); dscores = scale p (dp - dout . out). On entry, dscores holds dp, the gradient of p.
// With dropout, dp is the gradient of the dropped p times its factor; dout . out is still the sum of p dp. With a soft
// cap, scores hold the tanh on entry, and its derivative is 1 - tanh^2.
void scores_to_gradients(const KeyTiles& tiles, const QueryTiles& queries, const ScoreTile& tile, float scale,
                         float softcap) {
    for (int key = 0; key < tile.n_keys(); key++) {
        float* p = tiles.scores + key * kQueries;
        float* dscores = tiles.dscores + key * kQueries;
        const float *lse = queries.lse, *dout_out = queries.dout_out;
        if (softcap > 0) {
#pragma omp simd
            for (int q = tile.first_lane(); q < tile.end_lane(); q++) {
                const float tanh = p[q] < -1.0f ? -1.0f : p[q];  // masked scores are -infinity
                p[q] = exp_approx(softcap * p[q] - lse[q]);
                dscores[q] = scale * p[q] * (1.0f - tanh * tanh) * (dscores[q] - dout_out[q]);
            }
        } else {
#pragma omp simd
            for (int q = tile.first_lane(); q < tile.end_lane(); q++) {
                p[q] = exp_approx(p[q] - lse[q]);
                dscores[q] = scale * p[q] * (dscores[q] - dout_out[q]);
            }
        }
    }
}

// Adds the contribution of the keys in `tiles` to dkeys and dvalues (kKeys, step) and to the head's dqueries.
void backward_of_tile(const AttentionBackward& op, int b, int head, const QueryTiles& queries, const KeyTiles& tiles,
                      const ScoreTile& tile, const FirstKeys& first, float* dkeys, float* dvalues) {
    const int step = round_up_to_tile(op.head_size), size = op.head_size;
    alignas(64) float factors[kKeys * kQueries];
    keys_times_queries(tiles.scores, tiles.keys, queries.queries_t, step, size, tile);
    keys_times_queries(tiles.dscores, tiles.values, queries.dout_t, step, size, tile);
    if (op.dropout) {
        fill_factors(factors, op.dropout, op.chunk.start, b, head, tile);
        multiply_scores(tiles.dscores, factors, tile);
    }
    if (op.softcap > 0) cap_scores(tiles.scores, 1.0f, tile);
    mask(tiles.scores, tile, first);
    scores_to_gradients(tiles, queries, tile, op.scale, op.softcap);
    if (op.dropout) multiply_scores(tiles.scores, factors, tile);
    add_over_queries(dvalues, tiles.scores, queries.dout, step, tile);
    add_over_queries(dkeys, tiles.dscores, queries.queries, step, tile);
    add_over_keys(queries.dqueries, tiles.dscores, tiles.keys, step, tile, true);
}

// Backward for adjacent heads with the same keys (FlashAttention-2, algorithm 2, with the two loops exchanged).
// dkeys and dvalues are (seq_len, head_size rounded up to tiles) in float.
template <class T>
void backward_of_heads(const AttentionBackward& op, int b, int first_head, int n_heads, float* dkeys, float* dvalues) {
    const AttentionLayout at(op);
    const int step = round_up_to_tile(at.head_size), size = at.head_size, kv_head = first_head / at.group();
    Carver memory(thread_scratch<float>(n_heads * QueryTiles::elements(step) + KeyTiles::elements(step)));
    const KeyTiles tiles(memory, step);
    const KeyRows<T> rows = KeyRows<T>::of(op, b, kv_head);
    std::array<std::optional<QueryTiles>, kHeadsOfTask> queries;
    for (int h = 0; h < n_heads; h++) queries[h].emplace(memory, step);

    for (int query_begin = 0; query_begin < at.seq_len; query_begin += kQueries) {
        const int n_queries = std::min(kQueries, at.seq_len - query_begin);
        const FirstKeys first(op, b, query_begin, n_queries);
        for (int h = 0; h < n_heads; h++) load_queries<T>(*queries[h], op, b, first_head + h, query_begin, n_queries);
        for (int key_begin = first.first_tile(); key_begin < first.end(); key_begin += kKeys) {
            const ScoreTile tile = first.tile(key_begin);
            const size_t first_row = key_begin * rows.step;
            load_tile(tiles.keys, step, tile.n_keys(), rows.keys + first_row, rows.step, tile.n_keys(), size);
            load_tile(tiles.values, step, tile.n_keys(), rows.values + first_row, rows.step, tile.n_keys(), size);
            const size_t place = size_t(key_begin) * step;
            for (int h = 0; h < n_heads; h++)
                backward_of_tile(op, b, first_head + h, *queries[h], tiles, tile, first, dkeys + place,
                                 dvalues + place);
        }
        const bool is_sum = op.chunk && !op.chunk.is_last;
        for (int h = 0; h < n_heads; h++)
            for (int q = 0; q < n_queries; q++) {
                const float* dquery = queries[h]->dqueries + q * step;
                const int head = first_head + h, position = query_begin + q;
                if (is_sum)
                    store_row(op.dquery + at.out(b, head, position), dquery, size, 1.0f);
                else
                    store_row(op.dqkv.as<T>() + at.query(b, head, position), dquery, size, 1.0f);
            }
    }
}

// Backward for one key-value head and all of its queries.
template <class T>
void backward_of_kv_head(const AttentionBackward& op, int b, int kv_head, float* dkeys, float* dvalues) {
    const AttentionLayout at(op);
    const int step = round_up_to_tile(at.head_size), end = (kv_head + 1) * at.group();
    float* dkv_keys = op.chunk ? op.dkv + at.chunk_key(b, kv_head, 0) : nullptr;
    float* dkv_values = op.chunk ? op.dkv + at.chunk_value(b, kv_head, 0) : nullptr;
    const int n_sums = op.chunk && op.accumulate_dkv ? at.seq_len : 0;
    load_tile(dkeys, step, at.seq_len, dkv_keys, at.kv_step(), n_sums, at.head_size);
    load_tile(dvalues, step, at.seq_len, dkv_values, at.kv_step(), n_sums, at.head_size);
    for (int head = kv_head * at.group(); head < end; head += kHeadsOfTask)
        backward_of_heads<T>(op, b, head, std::min(kHeadsOfTask, end - head), dkeys, dvalues);
    for (int t = 0; t < at.seq_len; t++) {
        if (op.chunk) {
            store_row(dkv_keys + t * at.kv_step(), dkeys + size_t(t) * step, at.head_size, 1.0f);
            store_row(dkv_values + t * at.kv_step(), dvalues + size_t(t) * step, at.head_size, 1.0f);
            continue;
        }
        store_row(op.dqkv.as<T>() + at.key(b, kv_head, t), dkeys + size_t(t) * step, at.head_size, 1.0f);
        store_row(op.dqkv.as<T>() + at.value(b, kv_head, t), dvalues + size_t(t) * step, at.head_size, 1.0f);
    }
}

}  // namespace

void attention_backward(const AttentionBackward& op, Stream) {
    dispatch("attention_backward", {op.dqkv, op.dout, op.qkv, op.out, op.chunk.kv}, [&]<class T>() {
        require_valid(op);
        const size_t elements = size_t(op.seq_len) * round_up_to_tile(op.head_size);
        parallel_blocks(size_t(op.batch) * op.n_kv_head, 1, [&](size_t task, size_t) {
            float* dkeys = static_cast<float*>(op.scratch) + 2 * elements * task;
            backward_of_kv_head<T>(op, int(task / op.n_kv_head), int(task % op.n_kv_head), dkeys, dkeys + elements);
        });
        set_amax(op.dqkv, size_t(op.batch) * op.seq_len * AttentionLayout(op).qkv_step());
    });
}

size_t attention_backward_scratch_bytes(const AttentionBackward& op) {
    return size_t(op.batch) * op.n_kv_head * 2 * op.seq_len * round_up_to_tile(op.head_size) * sizeof(float);
}

}  // namespace ops

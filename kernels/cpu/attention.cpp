// Causal self-attention over tiles of kQueries x kKeys scores.
//
// Scores are computed transposed, keys by queries, with one query per vector lane. So the softmax needs no reductions
// across lanes, keys and values are used in their memory order, and only the queries (and dout) are transposed, once
// per query block. Tiles are float for all storage types.
//
// Forward: one task per (batch, heads, query block), which loops over the visible key blocks. Backward: one task per
// (batch, key-value head), because dkey and dvalue are sums over queries; they are accumulated in `scratch`, dquery in
// a tile. A key tile is loaded once for several query heads of its key-value head; the tiles of these heads stay in the
// L2 cache. The results of a head do not depend on the other heads of its task.
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "kernels/base/dropout.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// 64 queries amortize the loading of keys and values, and the operands still fit into an L1 cache of 32 KB for heads of
// 64. Few keys, so that little of the diagonal is computed and then masked.
constexpr int kQueries = 64;
constexpr int kKeys = 32;
constexpr int kHeadsOfTask = 4;  // query heads that share a key tile
static_assert(kQueries % kTileCols == 0, "tile_product needs whole vectors of queries");
static_assert(kTileCols % 16 == 0 && kKeys % 16 == 0, "the dropout mask consists of squares of 16");

// Splits one piece of memory into parts, each aligned to a cache line.
class Carver {
public:
    explicit Carver(float* memory) : next_(memory) {}
    float* take(int rows, int step) { return std::exchange(next_, next_ + size_t(rows) * step); }

private:
    float* next_;
};

// Copies `count` rows into the tile and pads it with zeros, below to `rows` rows and on the right.
template <class T> void load_tile(float* tile, int step, int rows, const T* inp, size_t inp_step, int count, int cols) {
    for (int row = 0; row < count; row++) {
        float* out = tile + row * step;
        const T* in = inp + row * inp_step;
#pragma omp simd
        for (int c = 0; c < cols; c++) out[c] = to_float(in[c]);
        std::fill(out + cols, out + step, 0.0f);
    }
    std::fill(tile + count * step, tile + rows * step, 0.0f);
}

// Not inlined: inside the loop over rows the compiler does not vectorize it for fp16.
template <class T> [[gnu::noinline]] void store_row(T* out, const float* row, int cols, float factor) {
#pragma omp simd
    for (int c = 0; c < cols; c++) out[c] = from_float<T>(row[c] * factor);
}

// The position of a score tile: a block of queries (lanes) and a block of keys (rows).
struct ScoreTile {
    int query_begin, n_queries, key_begin;
    int n_seeing;  // number of queries up to the last one that sees any of these keys

    int n_keys() const { return std::min(kKeys, query_begin + n_queries - key_begin); }
    // The first lane, rounded down to a tile, of the queries that see any of these keys.
    int first_lane() const { return round_down_to_tile(std::max(0, key_begin - query_begin)); }
    int end_lane() const { return round_up_to_tile(n_seeing); }
    int n_lanes() const { return end_lane() - first_lane(); }
    int rows_from_first_lane() const { return n_seeing - first_lane(); }
    // The lane of the query at the key's position: the first query that sees it.
    int diagonal_lane(int key) const { return std::min(key_begin + key - query_begin, end_lane()); }
};

// The first key that each query of a block sees, non-decreasing over the lanes.
class FirstKeys {
public:
    template <class Op>
    FirstKeys(const Op& op, int b, int query_begin, int n_queries) : query_begin_(query_begin), n_queries_(n_queries) {
        const VisibleKeys visible(op, b);
        for (int lane = 0; lane < kQueries; lane++)
            lanes[lane] = visible.first(query_begin + std::min(lane, n_queries - 1));
    }

    // Visible key tiles start at multiples of kKeys from first_tile() on. At least one query sees each tile.
    int first_tile() const { return lanes[0] / kKeys * kKeys; }
    int end() const { return query_begin_ + n_queries_; }
    ScoreTile tile(int key_begin) const {
        const int* end_seeing = std::upper_bound(lanes, lanes + n_queries_, key_begin + kKeys - 1);
        return {query_begin_, n_queries_, key_begin, int(end_seeing - lanes)};
    }
    ScoreTile tile_of_all_queries(int key_begin) const { return {query_begin_, n_queries_, key_begin, n_queries_}; }

    int lanes[kQueries];

private:
    int query_begin_, n_queries_;
};

// out (keys, queries) = left right_t, where left is (keys, size) and right_t (size, queries).
void keys_times_queries(float* out, const float* left, const float* right_t, int step, int size,
                        const ScoreTile& tile) {
    tile_product({.out = out + tile.first_lane(),
                  .out_step = kQueries,
                  .left = left,
                  .left_step = step,
                  .right = right_t + tile.first_lane(),
                  .right_step = kQueries,
                  .rows = tile.n_keys(),
                  .cols = tile.n_lanes(),
                  .depth = size,
                  .accumulate = false});
}

// out (queries, size) (+)= scores^T right, where scores is (keys, queries) and right (keys, size).
void add_over_keys(float* out, const float* scores, const float* right, int step, const ScoreTile& tile,
                   bool accumulate) {
    tile_product_of_transposed({.out = out + tile.first_lane() * step,
                                .out_step = step,
                                .left = scores + tile.first_lane(),
                                .left_step = kQueries,
                                .right = right,
                                .right_step = step,
                                .rows = tile.rows_from_first_lane(),
                                .cols = step,
                                .depth = tile.n_keys(),
                                .accumulate = accumulate});
}

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

// Sets the scores of keys that the query does not see to a value whose exp is 0.
void mask(float* scores, const ScoreTile& tile, const FirstKeys& first) {
    constexpr float kMasked = -std::numeric_limits<float>::infinity();
    for (int key = 0; key < tile.n_keys(); key++)
        for (int lane = tile.first_lane(); lane < tile.diagonal_lane(key); lane++)
            scores[key * kQueries + lane] = kMasked;
    if (first.lanes[tile.end_lane() - 1] <= tile.key_begin) return;
    for (int key = 0; key < tile.n_keys(); key++) {
        float* row = scores + key * kQueries;
#pragma omp simd
        for (int q = tile.first_lane(); q < tile.end_lane(); q++)
            row[q] = first.lanes[q] > tile.key_begin + key ? kMasked : row[q];
    }
}

// scores = factor tanh(scores).
void cap_scores(float* scores, float factor, const ScoreTile& tile) {
    for (int key = 0; key < tile.n_keys(); key++) {
#pragma omp simd
        for (int i = key * kQueries + tile.first_lane(); i < key * kQueries + tile.end_lane(); i++)
            scores[i] = factor * tanh_approx(scores[i]);
    }
}

// The factor on the queries before the GEMMs. With a soft cap, scores are in units of the cap.
template <class Op> float query_factor(const Op& op) { return op.softcap > 0 ? op.scale / op.softcap : op.scale; }

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

// Computes the dropout factors of a score tile. One call of philox() covers two keys of four rows of eight.
void fill_factors(float* factors, const DropoutMask& mask, int b, int head, const ScoreTile& tile) {
    const uint64_t sample_key = mask.keys[b];
    const float factor = mask.factor;
    const uint32_t first = mask.query_call(tile.query_begin);
    const int first_call = int(mask.query_call(tile.first_lane())), end_call = int(mask.query_call(tile.end_lane()));
    for (int begin = 0; begin < tile.n_keys(); begin += 16) {
        for (int pair = 0; pair < 8; pair += 2) {
            uint32_t word[4][kQueries / 2];
#pragma omp simd
            for (int call = first_call; call < end_call; call++) {
                const Philox random =
                    mask.words(sample_key, head, first + uint32_t(call), mask.key_call(tile.key_begin + begin + pair));
                for (int w = 0; w < 4; w++) word[w][call] = random.word[w];
            }
            for (int key : {pair, pair + 1, pair + 8, pair + 9})
                for (int lane = tile.first_lane(); lane < tile.end_lane(); lane += 8) {
                    const uint32_t* words = word[mask.word_of(lane, key)] + mask.query_call(lane);
                    float* lanes = factors + (begin + key) * kQueries + lane;
#pragma omp simd
                    for (int i = 0; i < 8; i++) lanes[i] = mask.keeps(words[i], key % 2) ? factor : 0.0f;
                }
        }
    }
}

void multiply_scores(float* scores, const float* factors, const ScoreTile& tile) {
    for (int key = 0; key < tile.n_keys(); key++) {
#pragma omp simd
        for (int i = key * kQueries + tile.first_lane(); i < key * kQueries + tile.end_lane(); i++)
            scores[i] *= factors[i];
    }
}

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

    for (int h = 0; h < n_heads; h++) {
        load_tile(out + h * kQueries * step, step, kQueries, op.qkv.as<T>() + at.query(b, first_head + h, query_begin),
                  at.qkv_step(), n_queries, size);
        tile_transpose({queries_t + h * kQueries * step, kQueries, out + h * kQueries * step, step, kQueries, step},
                       query_factor(op));
    }
    for (int key_begin = first.first_tile(); key_begin < first.end(); key_begin += kKeys) {
        const bool is_first = key_begin == first.first_tile();  // which overwrites `out` for every query
        const ScoreTile tile = is_first ? first.tile_of_all_queries(key_begin) : first.tile(key_begin);
        load_tile(keys, step, tile.n_keys(), op.qkv.as<T>() + at.key(b, kv_head, key_begin), at.qkv_step(),
                  tile.n_keys(), size);
        load_tile(values, step, tile.n_keys(), op.qkv.as<T>() + at.value(b, kv_head, key_begin), at.qkv_step(),
                  tile.n_keys(), size);
        for (int h = 0; h < n_heads; h++) {
            float* out_of_head = out + h * kQueries * step;
            keys_times_queries(scores, keys, queries_t + h * kQueries * step, step, size, tile);
            if (op.softcap > 0) cap_scores(scores, op.softcap, tile);
            mask(scores, tile, first);
            softmax[h].add(scores, tile);
            if (op.dropout) {
                fill_factors(factors, op.dropout, b, first_head + h, tile);
                multiply_scores(scores, factors, tile);
            }
            if (!is_first) rescale_rows(out_of_head, step, softmax[h].rescale, tile);
            add_over_keys(out_of_head, scores, values, step, tile, !is_first);
        }
    }
    for (int h = 0; h < n_heads; h++)
        for (int q = 0; q < n_queries; q++) {
            const int head = first_head + h, position = query_begin + q;
            store_row(op.out.as<T>() + at.out(b, head, position), out + (h * kQueries + q) * step, size,
                      1.0f / softmax[h].sum[q]);
            op.lse[at.lse(b, head, position)] = softmax[h].max[q] + std::log(softmax[h].sum[q]);
        }
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
    std::fill(tiles.dqueries, tiles.dqueries + kQueries * step, 0.0f);
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
        fill_factors(factors, op.dropout, b, head, tile);
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
    std::array<std::optional<QueryTiles>, kHeadsOfTask> queries;
    for (int h = 0; h < n_heads; h++) queries[h].emplace(memory, step);

    for (int query_begin = 0; query_begin < at.seq_len; query_begin += kQueries) {
        const int n_queries = std::min(kQueries, at.seq_len - query_begin);
        const FirstKeys first(op, b, query_begin, n_queries);
        for (int h = 0; h < n_heads; h++) load_queries<T>(*queries[h], op, b, first_head + h, query_begin, n_queries);
        for (int key_begin = first.first_tile(); key_begin < first.end(); key_begin += kKeys) {
            const ScoreTile tile = first.tile(key_begin);
            const T* keys = op.qkv.as<T>() + at.key(b, kv_head, key_begin);
            const T* values = op.qkv.as<T>() + at.value(b, kv_head, key_begin);
            load_tile(tiles.keys, step, tile.n_keys(), keys, at.qkv_step(), tile.n_keys(), size);
            load_tile(tiles.values, step, tile.n_keys(), values, at.qkv_step(), tile.n_keys(), size);
            const size_t place = size_t(key_begin) * step;
            for (int h = 0; h < n_heads; h++)
                backward_of_tile(op, b, first_head + h, *queries[h], tiles, tile, first, dkeys + place,
                                 dvalues + place);
        }
        for (int h = 0; h < n_heads; h++)
            for (int q = 0; q < n_queries; q++)
                store_row(op.dqkv.as<T>() + at.query(b, first_head + h, query_begin + q),
                          queries[h]->dqueries + q * step, size, 1.0f);
    }
}

// Backward for one key-value head and all of its queries.
template <class T>
void backward_of_kv_head(const AttentionBackward& op, int b, int kv_head, float* dkeys, float* dvalues) {
    const AttentionLayout at(op);
    const int step = round_up_to_tile(at.head_size), end = (kv_head + 1) * at.group();
    std::fill(dkeys, dkeys + size_t(at.seq_len) * step, 0.0f);
    std::fill(dvalues, dvalues + size_t(at.seq_len) * step, 0.0f);
    for (int head = kv_head * at.group(); head < end; head += kHeadsOfTask)
        backward_of_heads<T>(op, b, head, std::min(kHeadsOfTask, end - head), dkeys, dvalues);
    for (int t = 0; t < at.seq_len; t++) {
        store_row(op.dqkv.as<T>() + at.key(b, kv_head, t), dkeys + size_t(t) * step, at.head_size, 1.0f);
        store_row(op.dqkv.as<T>() + at.value(b, kv_head, t), dvalues + size_t(t) * step, at.head_size, 1.0f);
    }
}

template <class Op> void require_sizes(const Op& op) {
    require(op.n_head % op.n_kv_head == 0, "attention: n_head %d is not a multiple of n_kv_head %d", op.n_head,
            op.n_kv_head);
    require(op.window >= 0 && op.softcap >= 0, "attention: window %d and softcap %g must not be negative", op.window,
            double(op.softcap));
}

}  // namespace

void attention_forward(const AttentionForward& op, Stream) {
    dispatch("attention_forward", {op.out, op.qkv}, [&]<class T>() {
        require_sizes(op);
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
}

void attention_backward(const AttentionBackward& op, Stream) {
    dispatch("attention_backward", {op.dqkv, op.dout, op.qkv, op.out}, [&]<class T>() {
        require_sizes(op);
        require(reinterpret_cast<uintptr_t>(op.scratch) % 64 == 0,
                "attention_backward: scratch %p is not 64-byte aligned", op.scratch);
        const size_t elements = size_t(op.seq_len) * round_up_to_tile(op.head_size);
        parallel_blocks(size_t(op.batch) * op.n_kv_head, 1, [&](size_t task, size_t) {
            float* dkeys = static_cast<float*>(op.scratch) + 2 * elements * task;
            backward_of_kv_head<T>(op, int(task / op.n_kv_head), int(task % op.n_kv_head), dkeys, dkeys + elements);
        });
    });
}

size_t attention_backward_scratch_bytes(const AttentionBackward& op) {
    return size_t(op.batch) * op.n_kv_head * 2 * op.seq_len * round_up_to_tile(op.head_size) * sizeof(float);
}

}  // namespace ops

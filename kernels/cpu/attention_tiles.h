// Tiles of kQueries x kKeys scores for causal self-attention.
//
// Scores are computed transposed, keys by queries, with one query per vector lane. So the softmax needs no reductions
// across lanes, keys and values are used in their memory order, and only the queries (and dout) are transposed, once
// per query block. Tiles are float for all storage types. A key tile is loaded once for several query heads of its
// key-value head; the tiles of these heads stay in the L2 cache. The results of a head do not depend on the other heads
// of its task.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/base/dropout.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"

namespace ops {

// 64 queries amortize the loading of keys and values, and the operands still fit into an L1 cache of 32 KB for heads of
// 64. Few keys, so that little of the diagonal is computed and then masked.
inline constexpr int kQueries = 64;
inline constexpr int kKeys = 32;
inline constexpr int kHeadsOfTask = 4;  // query heads that share a key tile
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
        convert(out, inp + row * inp_step, size_t(cols));
        std::fill(out + cols, out + step, 0.0f);
    }
    std::fill(tile + count * step, tile + rows * step, 0.0f);
}

// Not inlined: inside the loop over rows the compiler does not vectorize it for fp16.
template <class T> [[gnu::noinline]] void store_row(T* out, const float* row, int cols, float factor) {
#pragma omp simd
    for (int c = 0; c < cols; c++) out[c] = from_float<T>(row[c] * factor);
}

// The position of a score tile: a block of queries (lanes) and a block of keys (rows). Both count from the first key.
struct ScoreTile {
    int query_begin, n_queries, key_begin, key_end;
    int n_seeing;  // number of queries up to the last one that sees any of these keys

    int n_keys() const { return std::min(kKeys, key_end - key_begin); }
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
    FirstKeys(const Op& op, int b, int query_begin, int n_queries)
        : query_begin_(query_begin + op.chunk.distance), n_queries_(n_queries) {
        const VisibleKeys visible = VisibleKeys::of(op, b);
        end_ = visible.end(query_begin + n_queries - 1);
        for (int lane = 0; lane < kQueries; lane++)
            lanes[lane] = visible.first(query_begin + std::min(lane, n_queries - 1));
    }

    // Visible key tiles start at multiples of kKeys from first_tile() on. At least one query sees each tile.
    int first_tile() const { return lanes[0] / kKeys * kKeys; }
    int end() const { return end_; }
    ScoreTile tile(int key_begin) const {
        const int* end_seeing = std::upper_bound(lanes, lanes + n_queries_, key_begin + kKeys - 1);
        return {query_begin_, n_queries_, key_begin, end_, int(end_seeing - lanes)};
    }
    ScoreTile tile_of_all_queries(int key_begin) const {
        return {query_begin_, n_queries_, key_begin, end_, n_queries_};
    }

    int lanes[kQueries];

private:
    int query_begin_, n_queries_, end_;
};

// out (keys, queries) = left right_t, where left is (keys, size) and right_t (size, queries).
inline void keys_times_queries(float* out, const float* left, const float* right_t, int step, int size,
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
inline void add_over_keys(float* out, const float* scores, const float* right, int step, const ScoreTile& tile,
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

// Sets the scores of keys that the query does not see to a value whose exp is 0.
inline void mask(float* scores, const ScoreTile& tile, const FirstKeys& first) {
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
inline void cap_scores(float* scores, float factor, const ScoreTile& tile) {
    for (int key = 0; key < tile.n_keys(); key++) {
#pragma omp simd
        for (int i = key * kQueries + tile.first_lane(); i < key * kQueries + tile.end_lane(); i++)
            scores[i] = factor * tanh_approx(scores[i]);
    }
}

// The factor on the queries before the GEMMs. With a soft cap, scores are in units of the cap.
template <class Op> float query_factor(const Op& op) { return op.softcap > 0 ? op.scale / op.softcap : op.scale; }

// Computes the dropout factors of a score tile of keys from position `start`. One call of philox() covers two keys of
// four rows of eight.
inline void fill_factors(float* factors, const DropoutMask& mask, int start, int b, int head, const ScoreTile& tile) {
    const uint64_t sample_key = mask.keys[b];
    const float factor = mask.factor;
    const uint32_t first = mask.query_call(start + tile.query_begin);
    const int first_call = int(mask.query_call(tile.first_lane())), end_call = int(mask.query_call(tile.end_lane()));
    for (int begin = 0; begin < tile.n_keys(); begin += 16) {
        for (int pair = 0; pair < 8; pair += 2) {
            uint32_t word[4][kQueries / 2];
#pragma omp simd
            for (int call = first_call; call < end_call; call++) {
                const Philox random = mask.words(sample_key, head, first + uint32_t(call),
                                                 mask.key_call(start + tile.key_begin + begin + pair));
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

inline void multiply_scores(float* scores, const float* factors, const ScoreTile& tile) {
    for (int key = 0; key < tile.n_keys(); key++) {
#pragma omp simd
        for (int i = key * kQueries + tile.first_lane(); i < key * kQueries + tile.end_lane(); i++)
            scores[i] *= factors[i];
    }
}

}  // namespace ops

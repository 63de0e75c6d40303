// Visible keys of a block's and a warp's queries, and soft caps, for the tensor-core kernels.
//
// With kMasks (AttentionKind::any and chunk), windows and documents apply; without it, only causality.
#pragma once

#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/shared/attention_layout.h"

namespace ops {

// The key tiles that a block of n_rows queries sees.
struct KeyTiles {
    int begin, end;
};
template <bool kMasks, class Rows>
__device__ __forceinline__ KeyTiles tiles_of_block(const Rows& rows, int n_rows, int tile_keys,
                                                   const VisibleKeys& visible, int seq_len) {
    const int end = min(visible.end(rows.position(n_rows - 1)), seq_len);
    return {kMasks ? visible.first(rows.position(0)) / tile_keys : 0, (end + tile_keys - 1) / tile_keys};
}

// The queries of a warp: kCount rows of the block, starting at `row`.
template <bool kMasks, int kCount, class Rows> class WarpKeys {
public:
    __device__ __forceinline__ WarpKeys(const Rows& rows, int row, const VisibleKeys& visible, int seq_len)
        : first_last_key_(visible.end(rows.position(row)) - 1),
          last_key_(visible.end(rows.position(row + kCount - 1)) - 1) {
        if (!kMasks) return;
        first_key_ = visible.first(min(rows.position(row), seq_len - 1));
        last_first_key_ = visible.first(min(rows.position(row + kCount - 1), seq_len - 1));
    }
    // Whether all of them precede the key. (Without masks, written so that no register holds the last one.)
    __device__ __forceinline__ bool is_before(int key) const {
        return kMasks ? last_key_ < key : distance(key) + kCount <= 0;
    }
    // Whether none of them sees the keys [key, key + count) anymore.
    __device__ __forceinline__ bool is_past(int key, int count) const { return kMasks && key + count <= first_key_; }
    __device__ __forceinline__ bool see_all(int key, int count) const {
        return key + count - 1 <= first_last_key_ && (!kMasks || last_first_key_ <= key);
    }
    __device__ __forceinline__ int distance(int key) const { return first_last_key_ - key; }

private:
    int first_last_key_, last_key_;  // the last keys that the first and the last query see
    int first_key_ = 0, last_first_key_ = 0;
};

// The value of masked scores.
inline constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Masks scores (16 kM queries, keys [key, key + 8 kN)) of keys that the query does not see. The queries are rows of the
// block, starting at `row`.
template <int kM, int kN, class Rows>
__device__ __forceinline__ void mask_unseen(float (&scores)[kM][kN][4], const Rows& rows, int row, int key,
                                            const VisibleKeys& visible, int seq_len) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int position = rows.position(row + 16 * m) + 8 * half + lane / 4;
            const int last = visible.end(position) - 1 - key, first = visible.first(min(position, seq_len - 1)) - key;
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int column = 8 * n + lane % 4 * 2 + i;
                    if (column < first || column > last) scores[m][n][2 * half + i] = kMasked;
                }
        }
}

// Masks scores (16 kM queries of the warp, keys [key, key + 8 kN)) of keys that the query does not see. The queries are
// rows of the block, starting at `row`.
template <bool kMasks, int kM, int kN, int kCount, class Rows>
__device__ __forceinline__ void mask_scores(float (&scores)[kM][kN][4], const WarpKeys<kMasks, kCount, Rows>& warp,
                                            const Rows& rows, int row, int key, const VisibleKeys& visible,
                                            int seq_len) {
    if (warp.see_all(key, 8 * kN)) return;
    if constexpr (kMasks)
        mask_unseen(scores, rows, row, key, visible, seq_len);
    else
        for_each_element<kM, kN>([&](int m, int n, int i, int query, int column) {
            if (column > query + warp.distance(key)) scores[m][n][i] = kMasked;
        });
}

// The first key that a query of a tile in shared memory sees.
struct TileFirstKeys {
    const int* of_documents;  // of the tile's queries, positions
    VisibleKeys visible;
    int begin;  // the key at the position of the tile's first query

    __device__ __forceinline__ int operator()(int row) const {
        const int of_window = visible.window > 0 ? begin + row - visible.window + 1 : 0;
        return visible.first_key ? max(of_window, of_documents[row] - visible.start) : of_window;
    }
};

// Masks scores (16 kM keys from `key`, 16 queries of the tile from `row`) of keys that the query does not see.
template <int kM>
__device__ __forceinline__ void mask_unseeing(float (&scores)[kM][2][4], int key, int row, const TileFirstKeys& first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int column = row + 8 * n + lane % 4 * 2 + odd;
            const int first_row = first(column) - key, last_row = first.begin + column - key;
#pragma unroll
            for (int m = 0; m < kM; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key_row = 16 * m + 8 * half + lane / 4;
                    if (key_row < first_row || key_row > last_row) scores[m][n][2 * half + odd] = kMasked;
                }
        }
}

// tanh. Up to 0.75: Lambert's continued fraction to x^8. Beyond: (1 - e) / (1 + e) with e = e^(-2 |x|), because 1 - e
// no longer cancels. Relative error below 2^-21.
__device__ __forceinline__ float tanh_of(float x) {
    const float size = fabsf(x), square = x * x, e = ptx::exp2_approx(size * (-2 * kLog2E));
    const bool is_small = size < 0.75f;
    const float over = is_small ? size * fmaf(square + 105.0f, square, 945.0f) : 1.0f - e;
    const float under = is_small ? fmaf(fmaf(15.0f, square, 420.0f), square, 945.0f) : 1.0f + e;
    return copysignf(__fdividef(over, under), x);
}

// Replaces scores with the tanh of a soft cap.
template <int kM, int kN> __device__ __forceinline__ void cap_scores(float (&scores)[kM][kN][4], float scale_over_cap) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = tanh_of(scores[m][n][i] * scale_over_cap);
}

}  // namespace ops

// Shared by the attention kernels for any head size up to 256 and any storage type: float tiles in shared memory.
//
// Eight adjacent lanes process one row (a query, or a key in the backward op): each lane every eighth score and every
// eighth column. So sums over a row need three shuffles, and a row never leaves its warp. There is about one shared
// memory read per multiplication: at best a quarter of the FP32 rate.
#pragma once

#include "kernels/base/dropout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/numeric.h"
#include "kernels/shared/attention_layout.h"

namespace ops {

inline constexpr int kRowLanes = 8;

// This thread's row and lane in the row.
struct RowLane {
    int row = threadIdx.x / kRowLanes, lane = threadIdx.x % kRowLanes;
};

template <int kMaxHeadSize> struct GeneralTile {
    static constexpr int kRows = kMaxHeadSize > 128 ? 16 : 32;  // four tiles fit into 99 KiB, available on every device
    static constexpr int kThreads = kRows * kRowLanes;
    static constexpr int kScores = kRows / kRowLanes;
    static constexpr int kColumns = kMaxHeadSize / kRowLanes;
    using Rows = float[kRows][kMaxHeadSize + 1];  // adjacent rows have a column in different banks
    using Scores = float[kRows][kRows + 1];

    // Copies the thread's row of head_size numbers, or zeros if the row does not exist. Pads the row with zeros to a
    // multiple of eight columns.
    template <class T> static __device__ void load_row(Rows& tile, const T* inp, bool exists, int head_size) {
        const auto [row, lane] = RowLane();
        for (int begin = 0; begin < head_size; begin += kRowLanes) {
            const int column = begin + lane;
            tile[row][column] = exists && column < head_size ? to_float(inp[column]) : 0.0f;
        }
    }

    // The same for `count` rows with stride `step`.
    template <class T>
    static __device__ void load_rows(Rows& tile, const T* inp, size_t step, int count, int head_size) {
        const int row = RowLane().row;
        load_row(tile, inp + row * step, row < count, head_size);
    }

    // dots[i] = the thread's row of `left` times row lane + 8 i of `right`.
    static __device__ void dot_products(float (&dots)[kScores], const Rows& left, const Rows& right, int head_size) {
        const auto [row, lane] = RowLane();
        for (float& dot : dots) dot = 0;
        for (int column = 0; column < head_size; column++) {
            const float x = left[row][column];
#pragma unroll
            for (int i = 0; i < kScores; i++) dots[i] = fmaf(x, right[lane + kRowLanes * i][column], dots[i]);
        }
    }

    // sums[i] += the thread's row of `weights` times column lane + 8 i of `rows`.
    static __device__ void add_weighted_rows(float (&sums)[kColumns], const Scores& weights, const Rows& rows,
                                             int head_size) {
        const auto [row, lane] = RowLane();
        for (int j = 0; j < kRows; j++) {
            const float weight = weights[row][j];
#pragma unroll
            for (int i = 0; i < kColumns; i++)
                if (kRowLanes * i < head_size) sums[i] = fmaf(weight, rows[j][lane + kRowLanes * i], sums[i]);
        }
    }
};

// out[column] = sums[column] * factor for the thread's columns of its row.
template <int kColumns, class T>
__device__ void store_row(T* out, const float (&sums)[kColumns], float factor, int head_size) {
    const int lane = RowLane().lane;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        const int column = lane + kRowLanes * i;
        if (column < head_size) out[column] = from_float<T>(sums[i] * factor);
    }
}

// The dropout factor of one probability. Calls philox() per element: these kernels are not optimized.
__device__ inline float dropout_factor(const DropoutMask& mask, int b, int head, const VisibleKeys& visible, int query,
                                       int key) {
    if (!mask) return 1.0f;
    const bool kept = mask.is_kept(mask.keys[b], head, visible.query_position(query), visible.key_position(key));
    return kept ? mask.factor : 0.0f;
}

// The capped score and the derivative of the cap; without a cap, the score and 1.
struct CappedScore {
    float score, derivative;
};
__device__ inline CappedScore capped_score(float score, float softcap) {
    if (!(softcap > 0)) return {score, 1};
    const float tanh = tanhf(score / softcap);
    return {softcap * tanh, 1 - tanh * tanh};
}

// out[column] = or += sums[column] * factor in the same way.
template <int kColumns>
__device__ void add_row(float* out, const float (&sums)[kColumns], float factor, bool accumulate, int head_size) {
    const int lane = RowLane().lane;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        const int column = lane + kRowLanes * i;
        if (column < head_size) out[column] = fmaf(sums[i], factor, accumulate ? out[column] : 0.0f);
    }
}

// sums[column] = inp[column].
template <int kColumns> __device__ void load_sums(float (&sums)[kColumns], const float* inp, int head_size) {
    const int lane = RowLane().lane;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        const int column = lane + kRowLanes * i;
        if (column < head_size) sums[i] = inp[column];
    }
}

// The key tiles that a block of queries sees.
template <int kTile, class Rows> __device__ int first_tile_begin(const Rows& rows, const VisibleKeys& visible) {
    return visible.first(rows.position(0)) / kTile * kTile;
}

}  // namespace ops

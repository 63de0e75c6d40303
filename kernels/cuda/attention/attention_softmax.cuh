// The online softmax of the rows of a warp (FlashAttention-2, algorithm 1), for the tensor-core kernels.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"

namespace ops {

// Maxima and sums in units of unscaled scores. A lane has rows 16 m + 8 half + g; the four lanes of a row hold the same
// maximum, but different parts of the sum.
template <int kM> struct OnlineSoftmax {
    float max[kM][2], sum[kM][2];

    __device__ __forceinline__ explicit OnlineSoftmax(float lowest) {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) max[m][half] = lowest, sum[m][half] = 0;
    }
};

// Updates maxima and sums with a tile of scores, and replaces the scores with exp(scale (score - max)). Earlier
// weighted sums must be multiplied by `rescale`. Until a query has seen a key, its maximum is the finite initial value,
// so that masked scores give 0.
template <int kN, int kM>
__device__ __forceinline__ void add_to_softmax(OnlineSoftmax<kM>& softmax, float (&rescale)[kM][2],
                                               float (&scores)[kM][kN][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = softmax.max[m][half];
#pragma unroll
            for (int n = 0; n < kN; n++)
                largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            largest = lanes_reduce<4>(largest, Max());
            rescale[m][half] = ptx::exp2_approx((softmax.max[m][half] - largest) * scale_log2);
            const float shift = largest * scale_log2;
            float sum = softmax.sum[m][half] * rescale[m][half];
            softmax.max[m][half] = largest;
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[m][n][i] = ptx::exp2_approx(fmaf(scores[m][n][i], scale_log2, -shift));
                    sum += scores[m][n][i];
                }
            softmax.sum[m][half] = sum;
        }
}

// acc *= factor for each row.
template <int kN, int kM>
__device__ __forceinline__ void scale_rows(float (&acc)[kM][kN][4], const float (&factor)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] *= factor[m][i / 2];
}

}  // namespace ops

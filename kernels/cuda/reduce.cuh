// Sums and maxima over a warp and over a block. The order is fixed, and every thread gets the same bits.
#pragma once

#include "kernels/cuda/launch.cuh"

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Butterflies: a + b and b + a have the same bits, so all lanes end with the same sum.
template <class V> __device__ inline V warp_sum(V value) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kAllLanes, value, lanes);
    return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, lanes));
    return value;
}

__device__ inline int warp_min(int value) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, lanes));
    return value;
}

// Over a block of kWarps full warps. One barrier, between the writing and the reading of `s_part`; a caller that uses
// the same array twice needs a barrier of its own in between. All threads of the block must call.
template <int kWarps, class V> __device__ inline V block_sum(V value, V (&s_part)[kWarps]) {
    value = warp_sum(value);
    if (threadIdx.x % kWarpSize == 0) s_part[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    V sum = s_part[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) sum += s_part[warp];
    return sum;
}

template <int kWarps> __device__ inline float block_max(float value, float (&s_part)[kWarps]) {
    value = warp_max(value);
    if (threadIdx.x % kWarpSize == 0) s_part[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    float max = s_part[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) max = fmaxf(max, s_part[warp]);
    return max;
}

template <int kWarps> __device__ inline int block_min(int value, int (&s_part)[kWarps]) {
    value = warp_min(value);
    if (threadIdx.x % kWarpSize == 0) s_part[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    int smallest = s_part[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) smallest = min(smallest, s_part[warp]);
    return smallest;
}

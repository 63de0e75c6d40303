// Sums and maxima over a warp and over a block, in a fixed order. Every thread gets the same bits.
#pragma once

#include "kernels/cuda/launch.cuh"

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kLog2E = 1.44269504f;  // to compute exponentials as powers of 2

// Butterfly reduction. `combine` must be commutative; then all lanes get the same bits.
template <class V, class Combine> __device__ inline V warp_reduce(V value, Combine combine) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
        value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
    return value;
}

// Reduces over groups of kLanes adjacent lanes, the nearest lanes first.
template <int kLanes, class V, class Combine> __device__ __forceinline__ V lanes_reduce(V value, Combine combine) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
    return value;
}

// Reduces over a block of kWarps full warps. Has one barrier, between writing and reading `s_part`; a caller that uses
// the same array twice must add a barrier in between. All threads of the block must call it.
template <int kWarps, class V, class Combine>
__device__ inline V block_reduce(V value, V (&s_part)[kWarps], Combine combine) {
    value = warp_reduce(value, combine);
    if (threadIdx.x % kWarpSize == 0) s_part[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    V all = s_part[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) all = combine(all, s_part[warp]);
    return all;
}

struct Sum {
    template <class V> __device__ V operator()(V a, V b) const { return a + b; }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};
struct Min {
    __device__ int operator()(int a, int b) const { return min(a, b); }
};

template <class V> __device__ inline V warp_sum(V value) { return warp_reduce(value, Sum()); }
template <int kWarps, class V> __device__ inline V block_sum(V value, V (&s_part)[kWarps]) {
    return block_reduce(value, s_part, Sum());
}

// Another block may add at the same time. Only for sums that are exact, so that the order does not matter.
__device__ inline void add_exactly(double* sums, double high, double low) {
    if (high != 0) atomicAdd(sums, high);
    if (low != 0) atomicAdd(sums + 1, low);
}

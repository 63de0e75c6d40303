// The largest magnitude of an array that a kernel writes: View::amax.
//
// It is kept as the bits of a float without its sign. They have the order of the magnitudes, with NaN above infinity.
// clear_amax() runs before the kernel, whose warps or blocks then add theirs, so it does not depend on their order.
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"

// The instances of a kernel that have the code: GEMMs of 8 bits read aligned arrays of 16 bits.
template <class T, bool kAligned> inline constexpr bool kGivesAmax = kAligned && sizeof(T) == 2;

__device__ inline uint32_t largest_magnitude(uint32_t largest, float number) {
    return max(largest, std::bit_cast<uint32_t>(number) & 0x7fffffffu);
}
template <class T, int kSize>
__device__ inline uint32_t largest_magnitude(uint32_t largest, const Pack<T, kSize>& from) {
    const auto numbers = unpack(from);
#pragma unroll
    for (int i = 0; i < kSize; i++) largest = largest_magnitude(largest, numbers.value[i]);
    return largest;
}

// The same for one half of the rows of accumulators of a tile, which are stored as T after a multiplication by
// `factor`, a number that is not negative. Rounding keeps their order.
template <class T, int kSize>
__device__ __forceinline__ uint32_t largest_stored(uint32_t largest, const float (&acc)[kSize][4], int half,
                                                   float factor) {
    uint32_t of_row = 0;
#pragma unroll
    for (int n = 0; n < kSize; n++)
        for (int i = 0; i < 2; i++) of_row = largest_magnitude(of_row, acc[n][2 * half + i]);
    return largest_magnitude(largest, to_float(from_float<T>(std::bit_cast<float>(of_row) * factor)));
}

// Adds the largest magnitude of a warp. All its lanes must call it.
__device__ inline void add_to_amax(float* amax, uint32_t largest) {
    largest = warp_reduce(largest, Max());
    if (threadIdx.x % kWarpSize == 0) atomicMax(reinterpret_cast<unsigned*>(amax), largest);
}

template <int kThreads> struct AmaxShared { uint32_t part[kThreads / kWarpSize]; };
// The same for a block of kThreads threads. All of them must call it.
template <int kThreads> __device__ inline void add_to_amax(AmaxShared<kThreads>& s, float* amax, uint32_t largest) {
    largest = block_reduce(largest, s.part, Max());
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(amax), largest);
}

inline void clear_amax(float* amax, Stream stream) { ops::fill({.out = amax, .count = 1, .value = 0}, stream); }
// Before a kernel that gives the amax of `array`. Fails with Exit::internal if none of its instances does.
inline void clear_amax(const char* op, View array, bool is_aligned, Stream stream) {
    if (!array.amax) return;
    require(size_of(array.dtype) == 2 && is_aligned, "%s: amax of an array that is not aligned or not of 16 bits", op);
    clear_amax(array.amax, stream);
}

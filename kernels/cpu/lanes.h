// The widest vectors of the target CPU, and the multiply-adds of GEMMs, for floats and for pairs of bf16.
#pragma once

#include "kernels/numeric.h"

// 8 floats with AVX2, 16 with AVX-512.
using Lanes [[gnu::vector_size(__BIGGEST_ALIGNMENT__), gnu::may_alias]] = float;
using PairLanes [[gnu::vector_size(__BIGGEST_ALIGNMENT__), gnu::may_alias]] = uint32_t;
using FourLanes [[gnu::vector_size(16), gnu::may_alias]] = float;

inline constexpr int kLanes = sizeof(Lanes) / sizeof(float);

// Two adjacent elements along the depth of a GEMM, the first in the low half.
struct Bf16Pair {
    uint32_t bits;
};

// Loads a vector of elements from memory aligned to its size.
inline Lanes load_lanes(const float* elements) { return *reinterpret_cast<const Lanes*>(elements); }
inline PairLanes load_lanes(const Bf16Pair* elements) { return *reinterpret_cast<const PairLanes*>(elements); }

// sum + left right, in every lane.
inline Lanes add_product(Lanes sum, float left, Lanes right) { return sum + left * right; }

// sum + left.first right.first + left.second right.second, in every lane, rounded like two multiply-adds: the product
// of two bf16 is exact in float. The instruction flushes subnormal inputs and results to 0.
inline Lanes add_product(Lanes sum, Bf16Pair left, PairLanes right) {
    const PairLanes left_lanes = PairLanes{} + left.bits;
    if constexpr (kTargetMultipliesBf16) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(right), "v"(left_lanes));
    } else {
        constexpr uint32_t kSecond = 0xffff0000u;
        sum += Lanes(left_lanes & kSecond) * Lanes(right & kSecond);
        sum += Lanes(left_lanes << 16) * Lanes(right << 16);
    }
    return sum;
}

// Error bounds of an op: computed from unit round-offs and the number of terms, never tuned.
//
// ref:: with double storage gives the exact result of an op on the rounded inputs. An op computes in float (unit
// round-off 2^-24) and rounds again when it stores to T. So a bound is always stored_error<T>(result) plus the
// arithmetic error: each rounding costs kRoundoff relative to the rounded value, a sum of n terms costs
// summation_error(n) relative to the sum of absolute values.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/numeric.h"

inline constexpr double kRoundoff = 0x1p-24;

// The same for each storage type: half the distance from 1 to the next larger number.
template <class T> inline constexpr double unit_roundoff = kRoundoff;
template <> inline constexpr double unit_roundoff<bf16> = 0x1p-8;
template <> inline constexpr double unit_roundoff<fp16> = 0x1p-11;

// exp, log, tanh and rsqrt of any good library are within 4 units in the last place, i.e. 8 round-offs.
inline constexpr double kFunctionError = 8 * kRoundoff;

// Rounding `result` to T: half a unit in the last place, or half the smallest subnormal of fp16. A float or bf16 result
// below 2^-126 may be flushed to zero.
template <class T> double stored_error(double result) {
    double smallest = std::is_same_v<T, fp16> ? 0x1p-25 : 0x1p-126;
    return std::max(unit_roundoff<T> * std::abs(result), smallest);
}

// Rounding a sum to T, and its product with gelu' (at most 1.13) again, as a GPU's library does in 16 bits.
template <class T> double gelu_gradient_stored_error(double result) { return (1 + 1.13) * stored_error<T>(result); }

// Both ref:: and ops:: round an fp32 output.
inline double stored_error_fp32(double result) { return 2 * stored_error<float>(result); }

// n float products summed in float, in any order, relative to the sum of the absolute products. The worst case is
// n kRoundoff. Roundings are practically independent, so 8 sqrt(n) kRoundoff is exceeded with a probability of at
// most 2 exp(-32) n (Higham, Mary, "A new approach to probabilistic rounding error analysis", SISC 2019, theorem 2.4).
inline double summation_error(double n) { return std::min(n + 1, 8 * std::sqrt(n)) * kRoundoff; }

// The absolute values: an op applied to them gives the sums of absolute values that bounds are relative to.
template <class Value> std::vector<Value> absolute(std::vector<Value> values) {
    for (Value& value : values) value = std::abs(value);
    return values;
}

// The parts of a norm that are known at compile time. LayerNorm with all parts and RMSNorm have separate instances, so
// that neither pays for the other.
#pragma once

#include "kernels/cuda/vector.cuh"

enum class NormParts {
    all,      // mean, weight and bias exist
    no_mean,  // RMSNorm; checks for weight and bias at run time
    any,      // checks for all three at run time
};

inline NormParts norm_parts(bool has_mean, bool has_weight, bool has_bias) {
    return !has_mean ? NormParts::no_mean : has_weight && has_bias ? NormParts::all : NormParts::any;
}

template <NormParts parts> __device__ inline bool has_mean(const float* mean) {
    return parts == NormParts::all || (parts == NormParts::any && mean);
}
template <NormParts parts, class T> __device__ inline bool has(const T* parameter) {
    return parts == NormParts::all || parameter;
}

template <class T> __device__ inline Pack<T> repeated(float number) {
    Floats<T, kPackSize<T>> floats;
#pragma unroll
    for (float& value : floats.value) value = number;
    return pack_floats(floats);
}

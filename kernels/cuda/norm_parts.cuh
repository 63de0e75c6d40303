// Which parts of a norm a kernel knows of at compile time: LayerNorm with all of them and RMSNorm have instances of
// their own, so that neither pays for the other.
#pragma once

#include "kernels/cuda/vector.cuh"

enum class NormParts {
    all,      // mean, weight and bias are there
    no_mean,  // RMSNorm; a weight and a bias are looked for
    any,      // all three are looked for
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

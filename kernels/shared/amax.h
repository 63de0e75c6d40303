// The largest magnitude of an array, for ops whose kernel does not give it.
#pragma once

#include "kernels/ops.h"

// Stores the largest magnitude of `count` elements in array.amax, if it is wanted.
inline void set_amax(View array, size_t count, Stream stream = {}) {
    if (array.amax) ops::abs_max({.out = array.amax, .inp = array, .count = count}, stream);
}

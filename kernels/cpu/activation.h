// The activation of a block of stored numbers, for all ops that need it.
#pragma once

#include <cstddef>

#include "kernels/base/choices.h"

// out (count) = f(inp). Compiled once and called, never inlined: two inlined copies may contract their products
// differently, and what is recomputed must have the bits of what was computed.
template <ActivationFunction function, class T> void activation_block(T* out, const T* inp, size_t count);

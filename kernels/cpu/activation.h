// Applies an activation to a block of stored numbers, for all ops that need it.
#pragma once

#include <cstddef>

#include "kernels/base/choices.h"

// out (count) = f(inp). Never inlined: two inlined copies could contract multiply-adds differently, but recomputation
// must give the same bits as the original computation.
template <ActivationFunction function, class T> void activation_block(T* out, const T* inp, size_t count);

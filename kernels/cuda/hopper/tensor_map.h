// Descriptions of tensors for tensor copies (TMA).
#pragma once

#include <cudaTypedefs.h>

#include "kernels/cuda/hopper/ptx_hopper.cuh"
#include "kernels/tensor.h"

// A tensor of up to five dimensions, the innermost first, and the box that one copy moves.
struct TensorShape {
    int rank = 0;
    uint64_t size[5] = {};     // in elements
    uint64_t strides[4] = {};  // of all dimensions except the first, in bytes: multiples of 16
    uint32_t box[5] = {};      // in elements, at most 256 each; a row is a multiple of 16 bytes, at most the swizzle's
    ptx::Swizzle swizzle = ptx::SWIZZLE_NONE;
};

// Returns the map of a tensor of device memory that is aligned to 16 bytes. Fails with Exit::os if the driver has no
// tensor maps, and with Exit::internal if it rejects the shape. Takes about a microsecond.
CUtensorMap make_tensor_map(ConstView tensor, const TensorShape& shape);

// Inputs and comparisons for the checks of architecture-specific kernels (arch_kernels.h).
#pragma once

#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tensor.h"

// An array in device memory.
struct CheckArray {
    Dtype dtype;
    size_t count;
    DeviceBuffer memory;

    CheckArray(Dtype type, size_t size) : dtype(type), count(size), memory(size * size_of(type)) {}  // zeros
    View view() const { return {memory.data(), dtype}; }
};

// Uniform random numbers in -1 .. 1; the same for the same seed.
CheckArray random_array(Dtype dtype, size_t count, uint64_t seed);
DeviceBuffer device_ints(const std::vector<int>& values);

// Returns an empty text if all elements are finite and differ by at most `relative` times the expected one plus
// `absolute`, else a sentence about the element that differs most.
std::string difference(const std::string& name, const CheckArray& actual, const CheckArray& expected, double relative,
                       double absolute);

// Tests of kernels for this GPU's compute capability. On other devices, they test the portable kernels again.
#pragma once

#include "kernels/device.h"

// Uses these kernels in a scope.
class WithArchKernels {
public:
    explicit WithArchKernels(const std::vector<std::string>& names) { configure_device({.kernels = names}); }
    ~WithArchKernels() { configure_device({}); }
    WithArchKernels(const WithArchKernels&) = delete;
    WithArchKernels& operator=(const WithArchKernels&) = delete;
};

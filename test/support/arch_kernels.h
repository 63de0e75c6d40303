// Tests of ops with and without kernels for this GPU's compute capability.
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

// Calls `test` with the portable kernels and, if this device has others, with those.
template <class Test> void for_each_kernel(Test test) {
    test();
    if (arch_kernels().empty()) return;
    const WithArchKernels used(arch_kernels());
    test();
}

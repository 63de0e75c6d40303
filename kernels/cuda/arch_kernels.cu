// Host code; no kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cuda/arch_kernels.h"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/cuda/hopper/cross_entropy_sm90.h"
#include "kernels/device.h"

namespace {

struct Row {
    ArchKernel kernel;
    const char* name;
    const char* architecture;  // as in CUDA_ARCHITECTURES; without its letter, ten times the compute capability
    std::string (*difference)();
};

constexpr Row kRows[] = {
    {ArchKernel::attention_backward_sm90, "attention_backward_sm90", "90a", ops::attention_backward_sm90_difference},
    {ArchKernel::attention_forward_sm90, "attention_forward_sm90", "90a", ops::attention_forward_sm90_difference},
    {ArchKernel::cross_entropy_sm90, "cross_entropy_sm90", "90a", ops::cross_entropy_sm90_difference},
};

constexpr bool have_order_of_enum() {
    for (int i = 0; i < int(std::size(kRows)); i++)
        if (int(kRows[i].kernel) != i) return false;
    return true;
}
static_assert(have_order_of_enum(), "a kernel is an index of kRows");

bool& use_of(ArchKernel kernel) {
    static bool uses[std::size(kRows)] = {};
    return uses[int(kernel)];
}

// Whether this program has code of the architecture, and this process's GPU is one.
bool can_run(const Row& row) {
    int device = 0, major = 0, minor = 0;
    const bool is_known = cudaGetDevice(&device) == cudaSuccess &&
                          cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                          cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    cudaGetLastError();  // so that no later check reports that there is no GPU
    return is_known && std::atoi(row.architecture) == 10 * major + minor &&
           std::strstr(CUDA_ARCHITECTURES, row.architecture);
}

}  // namespace

bool is_used(ArchKernel kernel) { return use_of(kernel); }
bool can_run(ArchKernel kernel) { return can_run(kRows[int(kernel)]); }

void use_arch_kernels(const std::vector<std::string>& names) {
    for (const Row& row : kRows) use_of(row.kernel) = can_run(row) && std::ranges::count(names, row.name) > 0;
}

std::vector<std::string> arch_kernels() {
    std::vector<std::string> names;
    for (const Row& row : kRows)
        if (can_run(row)) names.push_back(row.name);
    return names;
}

std::string check_arch_kernel(const std::string& name) {
    for (const Row& row : kRows)
        if (row.name == name && can_run(row)) return row.difference();
    fail(Exit::usage, "this GPU has no kernel %s", name);
}

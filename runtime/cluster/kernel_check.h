// The choice of the device's kernels for one compute capability (arch_kernels() of device.h). A child process runs each
// of them on a small input and compares it with the portable kernels of the same op, because a wrong kernel may also
// fault, which ends its process, or never return.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/cluster/child_program.h"
#include "runtime/io/installation.h"

// A kernel, and why it must not be used; empty if it passed.
struct CheckedKernel {
    std::string name, problem;
};

class KernelCheck {
public:
    // Starts the check on the GPU of this local rank if the device has such kernels and `limit_s` is positive. Returns
    // at once. `program` has the command check-kernels.
    KernelCheck(int local_rank, double limit_s, const std::string& program = program_path());
    // Waits for the results. A process that stops at one kernel is followed by another for the kernels after it; each
    // has `limit_s`. Call it before this process uses the GPU, which may accept one process only.
    const std::vector<CheckedKernel>& results();

private:
    void start();

    std::string program_;
    int local_rank_;
    double limit_s_;
    std::vector<std::string> waiting_;  // kernels without a result
    std::vector<CheckedKernel> found_;
    std::unique_ptr<Subprocess> process_;
};

// The kernels that all ranks can use, and lines for the log: one about these, and one for each other kernel.
struct KernelChoice {
    std::vector<std::string> used, lines;
};
// From the texts of all ranks. `kernels` are this rank's.
std::string text_of(const std::vector<CheckedKernel>& kernels);
KernelChoice choice_of(const std::vector<std::string>& texts);

// The name of the command that runs check_kernels().
inline constexpr const char* kCheckKernels = "check-kernels";
// Prints "NAME passed" or "NAME: how it differs" for each kernel as soon as it is known; all kernels if `names` is
// empty. Fails with Exit::internal at the end if one differs.
void check_kernels(const std::vector<std::string>& names, int local_rank);

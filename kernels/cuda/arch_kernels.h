// Kernels for one compute capability, and the list of the GPUs that run each.
//
// A portable kernel of the same op takes over on other GPUs, for arguments that such a kernel does not support, and
// wherever its check fails. The check compares the two on small random inputs; see arch_kernels() in kernels/device.h.
#pragma once

#include <string>
#include <vector>

enum class ArchKernel { attention_backward_sm90, attention_forward_sm90, cross_entropy_sm90 };

// Whether ops use the kernel: if use_arch_kernels() has named it, and this GPU can run it. Initially none.
bool is_used(ArchKernel kernel);
// Whether this GPU can run it, used or not. Memory plans, which are made before the check, count its scratch memory.
bool can_run(ArchKernel kernel);
void use_arch_kernels(const std::vector<std::string>& names);

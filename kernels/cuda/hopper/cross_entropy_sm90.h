// Cross-entropy of long rows, for sm_90a.
#pragma once

#include <string>

#include "kernels/ops.h"

namespace ops {

// Like cross_entropy(). Returns false, and does nothing, if the rows fit into the shared memory of one
// block, exceed the shared memory of a cluster, are not aligned to 16 bytes, or are parts of a vocabulary.
bool cross_entropy_sm90(const CrossEntropy& op, Stream stream);

// Compares it with the portable kernel; see check_arch_kernel().
std::string cross_entropy_sm90_difference();

}  // namespace ops

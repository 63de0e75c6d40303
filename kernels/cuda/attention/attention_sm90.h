// Attention kernels for sm_90a. Each returns false if it does not take the op: the portable kernel must run then.
#pragma once

#include <string>

#include "kernels/ops.h"

namespace ops {

// Takes heads of 64 and 128 in bf16 and fp16, of arrays that are aligned to 16 bytes, without dropout, soft cap and
// chunk. The op is valid, and the GPU has compute capability 9.0.
bool attention_forward_sm90(const AttentionForward& op, Stream stream);

// Takes the same. `scratch` has attention_backward_sm90_scratch_bytes(), which is 0 if it does not take the op, and is
// aligned to 64 bytes.
bool attention_backward_sm90(const AttentionBackward& op, Stream stream);
size_t attention_backward_sm90_scratch_bytes(const AttentionBackward& op);

// Compare them with the portable kernels; see check_arch_kernel().
std::string attention_forward_sm90_difference();
std::string attention_backward_sm90_difference();

}  // namespace ops

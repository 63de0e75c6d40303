// Replaces NVTX: the innermost range names the kernels that are launched inside it.
#pragma once

int nvtxRangePushA(const char* name);
int nvtxRangePop();

namespace simt {
const char* range_name();
}

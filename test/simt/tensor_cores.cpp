// The twins of mma.sync and ldmatrix, without sanitizers.
#include "test/simt/ptx_twins.h"

namespace ptx {

template void mma_m16n8k16<bf16>(float*, const uint32_t*, const uint32_t*, const float*);
template void mma_m16n8k16<fp16>(float*, const uint32_t*, const uint32_t*, const float*);
template void ldmatrix_x4<false>(uint32_t*, uint32_t);
template void ldmatrix_x4<true>(uint32_t*, uint32_t);

}  // namespace ptx

// Host code; no kernel.
#include "kernels/cuda/hopper/tensor_map.h"
#include "kernels/cuda/launch.cuh"

namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess)
        fail(Exit::os, "the NVIDIA driver has no cuTensorMapEncodeTiled: install a driver for CUDA 12 or later");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMapDataType type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::fp32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        case Dtype::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case Dtype::fp16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        default: fail(Exit::internal, "no tensor maps of %s", name_of(dtype));
    }
}

CUtensorMapSwizzle mode_of(ptx::Swizzle swizzle) {
    switch (swizzle) {
        case ptx::SWIZZLE_NONE: return CU_TENSOR_MAP_SWIZZLE_NONE;
        case ptx::SWIZZLE_128: return CU_TENSOR_MAP_SWIZZLE_128B;
        case ptx::SWIZZLE_64: return CU_TENSOR_MAP_SWIZZLE_64B;
        case ptx::SWIZZLE_32: return CU_TENSOR_MAP_SWIZZLE_32B;
    }
    fail(Exit::internal, "no tensor maps with swizzle %d", int(swizzle));
}

}  // namespace

CUtensorMap make_tensor_map(ConstView tensor, const TensorShape& shape) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
    constexpr cuuint32_t kOnes[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult made =
        encode(&map, type_of(tensor.dtype), cuuint32_t(shape.rank), const_cast<void*>(tensor.data), shape.size,
               shape.strides, shape.box, kOnes, CU_TENSOR_MAP_INTERLEAVE_NONE, mode_of(shape.swizzle),
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(made == CUDA_SUCCESS, "no tensor map of rank %d: error %d of cuTensorMapEncodeTiled", shape.rank,
            int(made));
    return map;
}

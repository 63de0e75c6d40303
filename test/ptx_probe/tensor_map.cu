// Tensor maps for the probes of tensor copies, created by the driver.
#include "kernels/cuda/launch.cuh"
#include "test/ptx_probe/probe.h"

CUtensorMap make_tensor_map(const TensorShape& shape, void* base) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    require(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    constexpr CUtensorMapSwizzle kModes[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_32B};
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    const std::array<cuuint64_t, 4> strides = shape.strides();
    CUtensorMap map;
    const CUresult made = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, cuuint32_t(shape.rank), base, shape.size, strides.data(), shape.box,
        ones, CU_TENSOR_MAP_INTERLEAVE_NONE, kModes[shape.swizzle], CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(made == CUDA_SUCCESS, "no tensor map of rank %d: error %d of cuTensorMapEncodeTiled", shape.rank,
            int(made));
    return map;
}

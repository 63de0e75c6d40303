// Replaces the CUDA toolkit's header: the driver's function that creates tensor maps, as returned by the runtime.
#pragma once

#include "cuda_runtime.h"
#include "test/simt/tensor_map.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
struct alignas(64) CUtensorMap {
    cuuint64_t opaque[16];
};
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                                       const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };

inline CUresult simt_encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                  const cuuint64_t* size, const cuuint64_t* strides, const cuuint32_t* box,
                                  const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    constexpr int kModes[] = {ptx::SWIZZLE_NONE, ptx::SWIZZLE_32, ptx::SWIZZLE_64, ptx::SWIZZLE_128};
    bool good = rank >= 1 && rank <= 5;
    for (cuuint32_t i = 0; good && i < rank; i++) good = element_strides[i] == 1;
    *map = {};
    static_assert(sizeof(ptx::TensorMap) <= sizeof(CUtensorMap));
    return good && ptx::make_tensor_map(map, type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2, int(rank), base, size,
                                        strides, box, kModes[swizzle])
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                                    unsigned long long, cudaDriverEntryPointQueryResult* found) {
    const bool is_known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0 && version >= 12000;
    *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *function = is_known ? reinterpret_cast<void*>(simt_encode_tiled) : nullptr;
    return cudaSuccess;
}

// A product of cuBLASLt's stand-in: its description, its algorithm, and the arithmetic.
#pragma once

#include <cstdint>

#include "test/simt/cublas_lt.h"

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0;
    int32_t bias_type = -1;
    const float *a_scale = nullptr, *b_scale = nullptr;
};

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};

namespace simt {

struct AlgorithmFacts {
    uint32_t reduction;
    int parts;
    size_t alignment, workspace_bytes;
};
inline constexpr AlgorithmFacts kCublasLtFacts[kCublasLtAlgorithms] = {
    {CUBLASLT_REDUCTION_SCHEME_NONE, 1, 1, 0},
    {CUBLASLT_REDUCTION_SCHEME_NONE, 1, 16, 0},
    {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2, 1, size_t(1) << 20},
    {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 4, 1, size_t(48) << 20},
    {CUBLASLT_REDUCTION_SCHEME_INPLACE, 2, 1, 1024},
    {CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 2, 1, size_t(1) << 20},
    {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2, 1, size_t(256) << 20},
};

inline bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
inline size_t bytes_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }

inline bool has_bias(cublasLtEpilogue_t epilogue) {
    return (epilogue & CUBLASLT_EPILOGUE_BIAS) || epilogue == CUBLASLT_EPILOGUE_BGRADB;
}
inline bool has_aux(cublasLtEpilogue_t epilogue) { return epilogue & 128; }

// A copy of a call's arguments, since the descriptions may change before the work is done.
struct CublasLtCall {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b, *c;
    void *d, *workspace;
    float alpha, beta;
    int id;
    uint64_t m, n, k;
    bool within_limits;
    bool swapped;  // the parts of this sum are added in the other order
};

// Executes the call, or records a fault if it accesses memory that is not the device's.
void carry_out(const CublasLtCall& call);

}  // namespace simt

// Calls to cuBLASLt. Host code; no kernel.
#include <algorithm>
#include <bit>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_library.h"

namespace {

constexpr uintptr_t kMaxAlignment = 256;
constexpr int kProposals = 64;

struct EpilogueTraits {
    const char* name;
    cublasLtEpilogue_t library;
    bool has_bias, has_aux;
};

const EpilogueTraits& traits_of(Epilogue epilogue) {
    static constexpr EpilogueTraits kTraits[] = {
        {"plain", CUBLASLT_EPILOGUE_DEFAULT, false, false},  // in the order of Epilogue
        {"bias", CUBLASLT_EPILOGUE_BIAS, true, false},
        {"dgelu", CUBLASLT_EPILOGUE_DGELU, false, true},
        {"gelu", CUBLASLT_EPILOGUE_GELU_AUX_BIAS, true, true},
        {"bias_gradient", CUBLASLT_EPILOGUE_BGRADB, true, false}};
    return kTraits[int(epilogue)];
}

int alignment_of(const void* pointer) {
    return pointer ? 1 << std::countr_zero(reinterpret_cast<uintptr_t>(pointer) | kMaxAlignment) : 0;
}

cudaDataType_t library_type(Dtype dtype) {
    switch (dtype) {
        case Dtype::fp32: return CUDA_R_32F;
        case Dtype::bf16: return CUDA_R_16BF;
        case Dtype::fp16: return CUDA_R_16F;
        case Dtype::e4m3: return CUDA_R_8F_E4M3;
        case Dtype::e5m2: return CUDA_R_8F_E5M2;
        case Dtype::fp64: break;
    }
    fail(Exit::internal, "matmul does not support %s", name_of(dtype));
}

template <class Value> void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, Value value) {
    check_cublas(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
}

// The layout of a matrix without gaps.
cublasLtMatrixLayout_t layout(Dtype dtype, int rows, int cols) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(cublasLtMatrixLayoutCreate(&made, library_type(dtype), uint64_t(rows), uint64_t(cols), rows),
                 "cublasLtMatrixLayoutCreate");
    return made;
}

// Constraints on the proposals.
class Preference {
public:
    Preference(const ProductKey& key, size_t workspace_bytes, uint32_t reduction_schemes) {
        check_cublas(cublasLtMatmulPreferenceCreate(&handle_), "cublasLtMatmulPreferenceCreate");
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace_bytes));
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction_schemes);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(key.a_alignment));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(key.b_alignment));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(key.d_alignment));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(key.d_alignment));
    }
    Preference(const Preference&) = delete;
    Preference& operator=(const Preference&) = delete;
    ~Preference() { cublasLtMatmulPreferenceDestroy(handle_); }
    operator cublasLtMatmulPreference_t() const { return handle_; }

private:
    template <class Value> void prefer(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
        check_cublas(cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof(value)),
                     "cublasLtMatmulPreferenceSetAttribute");
    }
    cublasLtMatmulPreference_t handle_ = nullptr;
};

// Whether partial sums are added in a fixed order and in float: not in place in order of arrival, not in d's type.
bool is_deterministic(const cublasLtMatmulAlgo_t& algorithm) {
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_MASK;
    size_t bytes = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(
        &algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme), &bytes);
    return status == CUBLAS_STATUS_SUCCESS && bytes == sizeof(scheme) &&
           (scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

}  // namespace

const char* name_of(Epilogue epilogue) { return traits_of(epilogue).name; }

void check_cublas(cublasStatus_t status, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) fail(Exit::os, "%s failed: %s", call, cublasLtGetStatusName(status));
}

ProductKey key_of(const Product& product, bool tf32) {
    return {.a = product.a.dtype,
            .b = product.b.dtype,
            .d = product.d.dtype,
            .transpose_a = product.transpose_a,
            .transpose_b = product.transpose_b,
            .m = product.m,
            .n = product.n,
            .k = product.k,
            .epilogue = product.epilogue,
            .accumulate = product.accumulate,
            .tf32 = product.a.dtype == Dtype::fp32 && tf32,
            .a_alignment = alignment_of(product.a.data),
            .b_alignment = alignment_of(product.b.data),
            .d_alignment = alignment_of(product.d.data),
            .bias_alignment = traits_of(product.epilogue).has_bias ? alignment_of(product.bias) : 0,
            .aux_alignment = traits_of(product.epilogue).has_aux ? alignment_of(product.aux) : 0};
}

std::string text_key(const ProductKey& key) {
    const std::string factors = name_of(key.a) + (key.b == key.a ? std::string() : format(" %s", name_of(key.b)));
    return format("%s%s %s %c%c m %d n %d k %d %s %s align %d %d %d %d %d", factors.c_str(), key.tf32 ? " tf32" : "",
                  name_of(key.d), key.transpose_a ? 't' : 'n', key.transpose_b ? 't' : 'n', key.m, key.n, key.k,
                  name_of(key.epilogue), key.accumulate ? "+=" : "=", key.a_alignment, key.b_alignment, key.d_alignment,
                  key.bias_alignment, key.aux_alignment);
}

// aux's leading dimension must be a multiple of 8 (cublasLt.h). gelu' and the bias gradient fail or are wrong if k is 1
// (nvmath-python rejects them), the bias gradient also if m is 1 (nvmath-python's tests omit it). On an H200,
// cuBLASLt 13.1 adds the bias to sums rounded to BF16 if m is not a multiple of 8.
bool library_lacks(const ProductKey& key) {
    if (key.epilogue == Epilogue::bias && key.d != Dtype::fp32 && key.m % 8 != 0) return true;
    if (traits_of(key.epilogue).has_aux && key.m % 8 != 0) return true;
    if (key.epilogue == Epilogue::dgelu && key.k == 1) return true;
    return key.epilogue == Epilogue::bias_gradient && (key.k == 1 || key.m == 1);
}

ProductDescription::ProductDescription(const ProductKey& key) : key_(key) {
    const cublasComputeType_t sums = key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    check_cublas(cublasLtMatmulDescCreate(&operation_, sums, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE, traits_of(key.epilogue).library);
    if (traits_of(key.epilogue).has_bias) set(operation_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, library_type(key.d));
    if (traits_of(key.epilogue).has_aux) set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(key.m));
    a_ = layout(key.a, key.transpose_a ? key.k : key.m, key.transpose_a ? key.m : key.k);
    b_ = layout(key.b, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n);
    d_ = layout(key.d, key.m, key.n);
}

ProductDescription::~ProductDescription() {
    for (cublasLtMatrixLayout_t matrix : {a_, b_, d_}) cublasLtMatrixLayoutDestroy(matrix);
    cublasLtMatmulDescDestroy(operation_);
}

void ProductDescription::set_pointers(const Product& product) {
    if (traits_of(key_.epilogue).has_bias) set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    if (traits_of(key_.epilogue).has_aux) set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.aux);
    if (!is_fp8(key_.a)) return;
    set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.a.scale);
    set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.b.scale);
}

std::vector<ProductDescription::Proposal> ProductDescription::ask_heuristic(cublasLtHandle_t handle,
                                                                            const Product& product,
                                                                            size_t workspace_bytes,
                                                                            uint32_t reduction_schemes) {
    const Preference preference(key_, workspace_bytes, reduction_schemes);
    set_pointers(product);  // the heuristic reads their alignments
    cublasLtMatmulHeuristicResult_t results[kProposals];
    int found = 0;
    std::vector<Proposal> proposals;
    if (cublasLtMatmulAlgoGetHeuristic(handle, operation_, a_, b_, d_, d_, preference, kProposals, results, &found) !=
        CUBLAS_STATUS_SUCCESS)
        return proposals;
    for (int i = 0; i < std::min(found, kProposals); i++) {
        const cublasLtMatmulHeuristicResult_t& result = results[i];
        if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes)
            proposals.push_back(
                {.algorithm = std::bit_cast<MatmulAlgorithm>(result.algo),
                 .is_admitted = is_deterministic(result.algo) && result.workspaceSize <= kMatmulWorkspaceBytes});
    }
    return proposals;
}

std::vector<MatmulAlgorithm> ProductDescription::proposals(cublasLtHandle_t handle, const Product& product,
                                                           Order order) {
    std::vector<MatmulAlgorithm> algorithms;
    for (const Proposal& proposal :
         ask_heuristic(handle, product, kMatmulWorkspaceBytes, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE))
        if (proposal.is_admitted || order == Order::unknown) algorithms.push_back(proposal.algorithm);
    return algorithms;
}

// Two queries, because each returns a limited number of algorithms and proposals() already has most of them.
std::vector<MatmulAlgorithm> ProductDescription::excluded_proposals(cublasLtHandle_t handle, const Product& product,
                                                                    size_t workspace_bytes) {
    constexpr uint32_t kSchemes[] = {CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE,
                                     CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
    std::vector<MatmulAlgorithm> algorithms;
    for (const uint32_t schemes : kSchemes)
        for (const Proposal& proposal : ask_heuristic(handle, product, workspace_bytes, schemes)) {
            const bool is_known =
                std::find(algorithms.begin(), algorithms.end(), proposal.algorithm) != algorithms.end();
            if (!proposal.is_admitted && !is_known) algorithms.push_back(proposal.algorithm);
        }
    return algorithms;
}

bool ProductDescription::accepts(cublasLtHandle_t handle, const Product& product, const MatmulAlgorithm& algorithm) {
    set_pointers(product);
    const auto stored = std::bit_cast<cublasLtMatmulAlgo_t>(algorithm);
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle, operation_, a_, b_, d_, d_, &stored, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kMatmulWorkspaceBytes && is_deterministic(stored);
}

cublasStatus_t ProductDescription::run(cublasLtHandle_t handle, const MatmulAlgorithm& algorithm,
                                       const Product& product, const MatmulWorkspace& workspace, Stream stream) {
    const auto stored = std::bit_cast<cublasLtMatmulAlgo_t>(algorithm);
    const float alpha = 1, beta = key_.accumulate ? 1 : 0;
    set_pointers(product);
    return cublasLtMatmul(handle, operation_, &alpha, product.a.data, a_, product.b.data, b_, &beta, product.d.data, d_,
                          product.d.data, d_, &stored, workspace.memory, workspace.bytes, cuda_stream(stream));
}

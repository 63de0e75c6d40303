// Stand-in for cuBLASLt: checks the documented rules, then queues a plain CPU product on the simulator's stream.
//
// Sources of the rules: types, layouts and attributes from cublasLt.h and the documentation of cublasLtMatmul; aux's
// leading dimension a multiple of 8 from cublasLt.h; op(b) transposed, m > 1 and k > 1 for the bias gradient, and k > 1
// for gelu', from what nvmath-python rejects or does not test. Like the library's, GELU applies to the sum before
// rounding, and its gradient to the rounded sum.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string_view>

#include "test/simt/cublas_lt_product.h"
#include "test/simt/streams.h"

struct cublasLtContext {};

struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace_bytes = 0;
    uint32_t reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t a_alignment = 256, b_alignment = 256, c_alignment = 256, d_alignment = 256;
};

namespace {

using simt::AlgorithmFacts;
using simt::bytes_of;
using simt::cublas_lt;
using simt::has_aux;
using simt::has_bias;
using simt::is_fp8;
using simt::kCublasLtFacts;

constexpr uint64_t kMagic = 0x7472616e73706f73;

constexpr int kProposalOrder[simt::kCublasLtAlgorithms] = {1, 0, 2, 3, 4, 5, 6};

// A product as described by the caller, without addresses.
struct Problem {
    const cublasLtMatmulDescOpaque_t& operation;
    const cublasLtMatrixLayoutOpaque_t &a, &b, &c, &d;

    uint64_t m() const { return d.rows; }
    uint64_t n() const { return d.cols; }
    uint64_t k() const { return operation.transpose_a == CUBLAS_OP_N ? a.cols : a.rows; }
};

bool layouts_fit(const Problem& p) {
    const auto& op = p.operation;
    auto fits = [](const cublasLtMatrixLayoutOpaque_t& matrix, uint64_t rows, uint64_t cols) {
        return matrix.rows == rows && matrix.cols == cols && matrix.ld >= int64_t(rows) && rows > 0 && cols > 0;
    };
    const bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
    return fits(p.a, ta ? p.k() : p.m(), ta ? p.m() : p.k()) && fits(p.b, tb ? p.n() : p.k(), tb ? p.k() : p.n()) &&
           fits(p.c, p.m(), p.n()) && fits(p.d, p.m(), p.n());
}

// The rules of the documentation of cublasLtMatmul for types of 8 bits on sm_90, without its epilogues but the bias.
bool fp8_is_supported(const Problem& p) {
    const auto& op = p.operation;
    const auto is_whole = [](const cublasLtMatrixLayoutOpaque_t& matrix) {
        return size_t(matrix.ld) * bytes_of(matrix.type) % 16 == 0;
    };
    return is_fp8(p.a.type) && is_fp8(p.b.type) && !(p.a.type == CUDA_R_8F_E5M2 && p.b.type == CUDA_R_8F_E5M2) &&
           op.compute == CUBLAS_COMPUTE_32F && op.transpose_a == CUBLAS_OP_T && op.transpose_b == CUBLAS_OP_N &&
           is_whole(p.a) && is_whole(p.b) && is_whole(p.d) && p.m() % 16 == 0 &&
           (op.epilogue == CUBLASLT_EPILOGUE_DEFAULT ||
            (op.epilogue == CUBLASLT_EPILOGUE_BIAS && p.d.type != CUDA_R_32F));
}

// The table of types in the documentation of cublasLtMatmul, limited to the types used here.
bool types_are_supported(const Problem& p) {
    const auto& op = p.operation;
    if (op.scale != CUDA_R_32F || p.c.type != p.d.type) return false;
    if (is_fp8(p.a.type) || is_fp8(p.b.type)) return fp8_is_supported(p);
    if (p.a.type != p.b.type) return false;
    if (op.compute == CUBLAS_COMPUTE_32F_FAST_TF32) return p.a.type == CUDA_R_32F && p.d.type == CUDA_R_32F;
    if (op.compute != CUBLAS_COMPUTE_32F) return false;
    return p.d.type == CUDA_R_32F || p.d.type == p.a.type;
}

// Documented and reported limits of the epilogues.
bool is_within_limits(const Problem& p) {
    const auto& op = p.operation;
    if (has_aux(op.epilogue) && op.aux_ld % 8 != 0) return false;
    if (op.epilogue == CUBLASLT_EPILOGUE_DGELU) return p.k() > 1;
    return op.epilogue != CUBLASLT_EPILOGUE_BGRADB || (op.transpose_b == CUBLAS_OP_T && p.m() > 1 && p.k() > 1);
}

bool epilogue_is_supported(const Problem& p) {
    const auto& op = p.operation;
    const simt::CublasLt& lt = cublas_lt();
    if (op.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    if (op.epilogue & lt.lacking_epilogues) return false;
    if (lt.lacks_float_output && p.a.type != CUDA_R_32F && p.d.type == CUDA_R_32F) return false;
    if (has_bias(op.epilogue) && (!op.bias || (op.bias_type != -1 && op.bias_type != p.d.type))) return false;
    if (has_aux(op.epilogue) && (!op.aux || op.aux_ld < int64_t(p.m()))) return false;
    const cublasLtEpilogue_t known[] = {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
                                        CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                        CUBLASLT_EPILOGUE_BGRADB};
    if (std::count(std::begin(known), std::end(known), op.epilogue) == 0) return false;
    return lt.is_careless || is_within_limits(p);
}

cublasStatus_t status_of(const Problem& p) {
    if (!layouts_fit(p)) return CUBLAS_STATUS_INVALID_VALUE;
    return types_are_supported(p) && epilogue_is_supported(p) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

// Whether all columns of a matrix are aligned if its address is.
bool columns_are_aligned(const cublasLtMatrixLayoutOpaque_t& matrix, size_t alignment) {
    return size_t(matrix.ld) * bytes_of(matrix.type) % alignment == 0;
}

bool is_aligned(const void* address, size_t alignment) { return reinterpret_cast<uintptr_t>(address) % alignment == 0; }

// An algorithm belongs to types and an epilogue, as in the library.
uint64_t purpose_of(const Problem& p) {
    return uint64_t(p.a.type) << 32 | uint64_t(p.d.type) << 16 | uint64_t(p.operation.epilogue) |
           uint64_t(p.operation.compute) << 48;
}

cublasLtMatmulHeuristicResult_t proposal(int id, const Problem& p) {
    cublasLtMatmulHeuristicResult_t result{};
    result.algo.data[0] = kMagic;
    result.algo.data[1] = uint64_t(id);
    result.algo.data[2] = purpose_of(p);
    result.workspaceSize = kCublasLtFacts[id].workspace_bytes;
    return result;
}

int id_of(const cublasLtMatmulAlgo_t* algorithm) {
    const bool ours = algorithm && algorithm->data[0] == kMagic && algorithm->data[1] < simt::kCublasLtAlgorithms;
    return ours ? int(algorithm->data[1]) : -1;
}

bool is_proposed(int id, const Problem& p, const cublasLtMatmulPreferenceOpaque_t& preference) {
    const AlgorithmFacts& facts = kCublasLtFacts[id];
    const uint32_t alignment =
        std::min({preference.a_alignment, preference.b_alignment, preference.c_alignment, preference.d_alignment});
    if (cublas_lt().gone[id] || (cublas_lt().prefers_256 && id == 1 && alignment < 256)) return false;
    if (!cublas_lt().ignores_mask &&
        (facts.workspace_bytes > preference.workspace_bytes || (facts.reduction & ~preference.reduction_mask)))
        return false;
    return facts.alignment <= alignment && columns_are_aligned(p.a, facts.alignment) &&
           columns_are_aligned(p.b, facts.alignment) && columns_are_aligned(p.d, facts.alignment);
}

}  // namespace

simt::CublasLt& simt::cublas_lt() {
    static CublasLt instance = [] {
        CublasLt made;
        const char* text = std::getenv("STAND_IN_CUBLASLT");
        made.hides_reductions = text && std::string_view(text) == "hides_reductions";
        made.prefers_256 = text && std::string_view(text) == "prefers_256";
        if (text && std::string_view(text) == "slow_first") made.ms[1] = 1;
        return made;
    }();
    return instance;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    static cublasLtContext context;
    *handle = &context;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return 130100; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "a status that is none";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    *operation = new cublasLtMatmulDescOpaque_t{.compute = compute, .scale = scale};
    cublas_lt().descriptions++;
    cublas_lt().alive++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    if (operation) cublas_lt().alive--;
    delete operation;
    return CUBLAS_STATUS_SUCCESS;
}

namespace {

// Like the library, requires the attribute's exact size.
template <class Value> cublasStatus_t take(Value& attribute, const void* value, size_t bytes) {
    if (!value || bytes != sizeof(Value)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return take(operation->transpose_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return take(operation->transpose_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return take(operation->epilogue, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(operation->bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return take(operation->aux, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return take(operation->aux_ld, value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return take(operation->a_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return take(operation->b_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return take(operation->bias_type, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = new cublasLtMatmulPreferenceOpaque_t;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(preference->workspace_bytes, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(preference->reduction_mask, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(preference->a_alignment, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(preference->b_alignment, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(preference->c_alignment, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(preference->d_alignment, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int count,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    cublas_lt().heuristics++;
    *found = 0;
    if (simt::capture().stream) return CUBLAS_STATUS_INTERNAL_ERROR;  // like cuBLASLt of CUDA 13.3
    const Problem problem{*operation, *a, *b, *c, *d};
    if (count <= 0) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t status = status_of(problem);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    for (int id : kProposalOrder)
        if (*found < count && is_proposed(id, problem, *preference)) results[(*found)++] = proposal(id, problem);
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
    const Problem problem{*operation, *a, *b, *c, *d};
    const int id = id_of(algorithm);
    if (id < 0 || algorithm->data[2] != purpose_of(problem)) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublas_lt().gone[id]) return CUBLAS_STATUS_ARCH_MISMATCH;
    result->workspaceSize = kCublasLtFacts[id].workspace_bytes;
    result->state = CUBLAS_STATUS_SUCCESS;
    return status_of(problem);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                    size_t bytes, size_t* written) {
    const int id = id_of(algorithm);
    if (id < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (attribute == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME && cublas_lt().hides_reductions)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    auto answer = [&]<class Value>(Value is) {
        if (bytes != sizeof(is)) return CUBLAS_STATUS_INVALID_VALUE;
        std::memcpy(value, &is, sizeof(is));
        *written = sizeof(is);
        return CUBLAS_STATUS_SUCCESS;
    };
    switch (attribute) {
        case CUBLASLT_ALGO_CONFIG_ID: return answer(int32_t(id));
        case CUBLASLT_ALGO_CONFIG_SPLITK_NUM: return answer(int32_t(kCublasLtFacts[id].parts));
        case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: return answer(kCublasLtFacts[id].reduction);
        case CUBLASLT_ALGO_CONFIG_TILE_ID:
        case CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING:
        case CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION:
        case CUBLASLT_ALGO_CONFIG_STAGES_ID: return answer(uint32_t(0));
        case CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID:
        case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID: return answer(uint16_t(0));
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    const Problem problem{*operation, *a_layout, *b_layout, *c_layout, *d_layout};
    const int id = id_of(algorithm);
    if (!alpha || !beta || !a || !b || !c || !d || id < 0) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t status = status_of(problem);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const AlgorithmFacts& facts = kCublasLtFacts[id];
    if (algorithm->data[2] != purpose_of(problem)) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublas_lt().gone[id] || cublas_lt().refuses_in_call[id]) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (facts.workspace_bytes > workspace_bytes || (facts.workspace_bytes && !is_aligned(workspace, 256)))
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const void* matrix : {a, b, c, static_cast<const void*>(d)})
        if (!is_aligned(matrix, facts.alignment)) return CUBLAS_STATUS_INVALID_VALUE;
    const simt::CublasLtCall call = {
        .op = *operation,
        .a_layout = *a_layout,
        .b_layout = *b_layout,
        .d_layout = *d_layout,
        .a = a,
        .b = b,
        .c = c,
        .d = d,
        .workspace = workspace,
        .alpha = *static_cast<const float*>(alpha),
        .beta = *static_cast<const float*>(beta),
        .id = id,
        .m = problem.m(),
        .n = problem.n(),
        .k = problem.k(),
        .within_limits = is_within_limits(problem),
        .swapped = facts.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE && cublas_lt().products.size() % 2 == 1};
    cublas_lt().products.push_back({id, operation->epilogue, a_layout->type, d_layout->type, operation->compute,
                                    int(call.m), int(call.n), int(call.k), call.beta});
    const auto extra = cublas_lt().extra_ms.find(operation->epilogue);
    const float ms = cublas_lt().ms[id] + (extra == cublas_lt().extra_ms.end() ? 0 : extra->second);
    simt::queue_work(stream ? stream : simt::default_stream(), [call, ms] {
        carry_out(call);
        simt::spend(ms);
    });
    return CUBLAS_STATUS_SUCCESS;
}

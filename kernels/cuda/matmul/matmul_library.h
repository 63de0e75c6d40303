// cuBLASLt interface for matmul_plan.cu: description of a GEMM, proposed algorithms, and the call.
#pragma once

#include <cublasLt.h>

#include <array>
#include <compare>
#include <string>
#include <vector>

#include "kernels/cuda/matmul/matmul_plan.h"
#include "kernels/device.h"
#include "kernels/numeric.h"

// A cublasLtMatmulAlgo_t that can be compared.
using MatmulAlgorithm = std::array<uint64_t, 8>;

// The properties of a GEMM that determine whether the library supports it, its algorithms and its speed. Alignments are
// in bytes, at most 256, which the library assumes by default; 0 for a null pointer.
struct ProductKey {
    Dtype a, b, d;
    bool transpose_a, transpose_b;
    int m, n, k;
    Epilogue epilogue;
    bool accumulate, tf32;
    int a_alignment, b_alignment, d_alignment, bias_alignment, aux_alignment;
    auto operator<=>(const ProductKey&) const = default;
};

ProductKey key_of(const Product& product, bool tf32);

// "plain", "bias", "dgelu", "gelu", "bias_gradient".
const char* name_of(Epilogue epilogue);

// Returns the key as one line of text, unique for each key.
std::string text_key(const ProductKey& key);

// Whether documentation or users report the GEMM as unsupported, although the library's heuristic may accept it.
bool library_lacks(const ProductKey& key);

// Memory for an algorithm while it runs.
struct MatmulWorkspace {
    void* memory;
    size_t bytes;
};

// The library's descriptors of one GEMM, created once.
class ProductDescription {
public:
    explicit ProductDescription(const ProductKey& key);
    ProductDescription(const ProductDescription&) = delete;
    ProductDescription& operator=(const ProductDescription&) = delete;
    ~ProductDescription();

    // Returns up to 64 algorithms for the product's addresses, in the library's order, fastest first. All fit into
    // kMatmulWorkspaceBytes. With Order::fixed, all are deterministic.
    enum class Order { fixed, unknown };
    std::vector<MatmulAlgorithm> proposals(cublasLtHandle_t handle, const Product& product, Order order = Order::fixed);

    // Returns the library's proposals that proposals() omits, for benchmarks and as a last resort: those that add
    // partial sums in no fixed order, round them to d's type, or need more than kMatmulWorkspaceBytes, up to
    // `workspace_bytes`.
    std::vector<MatmulAlgorithm> excluded_proposals(cublasLtHandle_t handle, const Product& product,
                                                    size_t workspace_bytes);

    // Whether the algorithm computes the product with a fixed order of sums, within kMatmulWorkspaceBytes.
    bool accepts(cublasLtHandle_t handle, const Product& product, const MatmulAlgorithm& algorithm);

    // Queues the GEMM. If the result is not CUBLAS_STATUS_SUCCESS, it queued nothing.
    cublasStatus_t run(cublasLtHandle_t handle, const MatmulAlgorithm& algorithm, const Product& product,
                       const MatmulWorkspace& workspace, Stream stream);

private:
    void set_pointers(const Product& product);
    struct Proposal {
        MatmulAlgorithm algorithm;
        bool is_admitted;  // deterministic, and a workspace of at most kMatmulWorkspaceBytes
    };
    std::vector<Proposal> ask_heuristic(cublasLtHandle_t handle, const Product& product, size_t workspace_bytes,
                                        uint32_t reduction_schemes);

    ProductKey key_;
    cublasLtMatmulDesc_t operation_ = nullptr;
    cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

void check_cublas(cublasStatus_t status, const char* call);

// Whether the status means that the library does not support the GEMM or algorithm. Other errors are machine errors.
inline bool is_refusal(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

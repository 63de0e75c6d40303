// cuBLASLt for the plans: its description of a product, the algorithms that it proposes, and the call.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <vector>

#include "kernels/cuda/matmul/matmul_cache.h"
#include "kernels/cuda/matmul/matmul_plan.h"

// What decides whether the library has a product, by which algorithms and how fast. Alignments are in bytes, at most
// 16, the most that any kernel of the library requires; 0 where there is no pointer.
struct ProductKey {
    Dtype in, out;
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

// The key in one line of text; different keys have different words.
std::string words_of(const ProductKey& key);

// Whether the library's documentation or its users report a product as unsupported that its heuristic may accept.
bool library_lacks(const ProductKey& key);

// Memory that an algorithm may use while it runs.
struct MatmulWorkspace {
    void* memory;
    size_t bytes;
};

// The library's descriptions of one product, made once.
class ProductDescription {
public:
    explicit ProductDescription(const ProductKey& key);
    ProductDescription(const ProductDescription&) = delete;
    ProductDescription& operator=(const ProductDescription&) = delete;
    ~ProductDescription();

    // Up to 64 algorithms for the product's addresses, in the library's order, fastest first; none if there is none.
    // All fit into kMatmulWorkspaceBytes. With Order::fixed all give the same bits each time.
    enum class Order { fixed, unknown };
    std::vector<MatmulAlgorithm> proposals(cublasLtHandle_t handle, const Product& product, Order order = Order::fixed);

    // The library's proposals that proposals() leaves out, for measurements: they add parts of a sum in an order of
    // their own or round them to d's type, or they need more than kMatmulWorkspaceBytes, up to `workspace_bytes`.
    std::vector<MatmulAlgorithm> excluded_proposals(cublasLtHandle_t handle, const Product& product,
                                                    size_t workspace_bytes);

    // Whether an algorithm from elsewhere could have been among the proposals.
    bool accepts(cublasLtHandle_t handle, const Product& product, const MatmulAlgorithm& algorithm);

    // Queues the product; anything but CUBLAS_STATUS_SUCCESS means that nothing was queued.
    cublasStatus_t run(cublasLtHandle_t handle, const MatmulAlgorithm& algorithm, const Product& product,
                       const MatmulWorkspace& workspace, Stream stream);

private:
    void set_pointers(const Product& product);
    struct Proposal {
        MatmulAlgorithm algorithm;
        bool is_admitted;  // the same bits each time, and no more workspace than kMatmulWorkspaceBytes
    };
    std::vector<Proposal> ask_heuristic(cublasLtHandle_t handle, const Product& product, size_t workspace_bytes,
                                        uint32_t reduction_schemes);

    ProductKey key_;
    cublasLtMatmulDesc_t operation_ = nullptr;
    cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

void check_cublas(cublasStatus_t status, const char* call);

// Whether the library reports that it has no such product or algorithm; any other failure is the machine's.
inline bool is_refusal(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

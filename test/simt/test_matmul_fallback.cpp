// GEMMs for which the library has no algorithm with a fixed order of sums: they run, and cuda_matmul_path() has a note.
#include <cuda_runtime.h>

#include "kernels/cuda/matmul/matmul_plan.h"
#include "test/simt/matmul_layer.h"
#include "test/support/catch.h"

namespace {

using simt::cublas_lt;

bool is_noted(const char* words) { return cuda_matmul_path().find(words) != std::string::npos; }

int last_algorithm() { return cublas_lt().products.back().algorithm; }

// 64 KiB of device memory, and a plain GEMM on it with an unused result.
class Scratch {
public:
    Scratch() { REQUIRE(cudaMalloc(&memory_, 65536) == cudaSuccess); }
    ~Scratch() { cudaFree(memory_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    bool multiply_with(int k) const {
        const bool done = multiply({.d = {memory_, Dtype::bf16},
                                    .a = {memory_, Dtype::bf16},
                                    .b = {memory_, Dtype::bf16},
                                    .transpose_a = false,
                                    .transpose_b = false,
                                    .m = 24,
                                    .n = 8,
                                    .k = k},
                                   {});
        synchronize({});
        return done;
    }

private:
    void* memory_ = nullptr;
};

}  // namespace

TEST_CASE("products: no algorithm with a known order of sums", "[matmul]") {
    const WithDefaults defaults;
    const char* note = "may differ from run to run";
    CHECK_FALSE(is_noted(note));
    cublas_lt().hides_reductions = true;
    Layer<bf16> layer({40, 72, 208});
    layer.check_all();  // plain products with the program's own epilogues
    for (const simt::CublasLtProduct& product : cublas_lt().products) {
        CHECK(product.epilogue == CUBLASLT_EPILOGUE_DEFAULT);
        CHECK(product.algorithm == 1);
    }
    CHECK(is_noted(note));

    // As documented, and in the order of the proposals: some add in place, or round parts to d's type.
    cublas_lt().hides_reductions = false;
    for (int id : {0, 1, 2, 3}) cublas_lt().gone[id] = true;
    const Scratch scratch;
    CHECK(scratch.multiply_with(224));
    CHECK(last_algorithm() == 4);
    cublas_lt().refuses_in_call[4] = true;
    CHECK(scratch.multiply_with(232));
    CHECK(last_algorithm() == 5);
}

// What a test may ask of the stand-in for cuBLASLt, and tell it: which epilogues and algorithms it has, how long they
// take, who refuses when. A test of a whole program says it by the environment: STAND_IN_CUBLASLT=hides_reductions or
// prefers_256.
#pragma once

#include <cublasLt.h>

#include <vector>

namespace simt {

// The algorithms, in the order in which they are proposed. Each adds in an order of its own, so that their bits differ.
//   0       for any alignment, one sum
//   1       factors and d aligned to 16 bytes, one sum: proposed first where it fits
//   2, 3    the sum in 2 or 4 parts, which wait as float in the workspace
//   4       the sum in 2 parts, added in place by whoever comes first: other bits each time
//   5       the sum in 2 parts, which wait in d's type
//   6       as 2, but wants 256 MiB of workspace
inline constexpr int kCublasLtAlgorithms = 7;

struct CublasLtProduct {
    int algorithm;
    cublasLtEpilogue_t epilogue;
    cudaDataType_t in, out;
    cublasComputeType_t compute;
    int m, n, k;
    float beta;
};

struct CublasLt {
    size_t version = 130100;
    unsigned lacking_epilogues = 0;                  // bits of cublasLtEpilogue_t that no algorithm has
    bool lacks_float_output = false;                 // for 16-bit factors and an epilogue
    bool is_careless = false;                        // takes what it cannot do by its documentation, and gives NaN
    bool ignores_mask = false;                       // proposes algorithms that the preference forbids
    bool hides_reductions = false;                   // does not say which reduction scheme an algorithm has
    bool prefers_256 = false;                        // proposes 1 only for matrices aligned to 256 bytes
    bool refuses_in_call[kCublasLtAlgorithms] = {};  // proposed, but cublasLtMatmul says NOT_SUPPORTED
    bool gone[kCublasLtAlgorithms] = {};             // neither proposed nor accepted by AlgoCheck
    float ms[kCublasLtAlgorithms] = {};              // how long a product takes, besides the simulation itself
    int quick_runs[kCublasLtAlgorithms] = {};        // so many of an algorithm's first products take no time
    float bias_gradient_ms = 0;                      // what that epilogue adds

    // What was asked of it.
    std::vector<CublasLtProduct> products;            // carried out
    int runs[kCublasLtAlgorithms] = {};               // of each algorithm
    int heuristics = 0, descriptions = 0, alive = 0;  // calls; made; not destroyed yet
};

CublasLt& cublas_lt();

// Everything as at first, for a scope.
class WithCublasLt {
public:
    WithCublasLt() : saved_(cublas_lt()) {
        cublas_lt() = {};
        cublas_lt().alive = saved_.alive;
    }
    ~WithCublasLt() {
        const int alive = cublas_lt().alive;
        cublas_lt() = saved_;
        cublas_lt().alive = alive;
    }
    WithCublasLt(const WithCublasLt&) = delete;
    WithCublasLt& operator=(const WithCublasLt&) = delete;

private:
    CublasLt saved_;
};

}  // namespace simt

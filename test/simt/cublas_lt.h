// Settings and counters of the stand-in for cuBLASLt, for tests: its epilogues and algorithms, their times, and calls
// that are rejected. Tests of a whole program use the environment: STAND_IN_CUBLASLT=hides_reductions,
// prefers_256 or slow_first, with which 1 takes a millisecond.
#pragma once

#include <cublasLt.h>

#include <map>
#include <vector>

namespace simt {

// The algorithms, in the order in which they are proposed. Each has its own order of additions, so their bits differ.
//   0       for any alignment, one sum
//   1       factors and d aligned to 16 bytes, one sum: proposed first if it fits
//   2, 3    the sum in 2 or 4 parts, kept as float in the workspace
//   4       the sum in 2 parts, added in place in any order: different bits each time
//   5       the sum in 2 parts, kept in d's type
//   6       as 2, but requires 256 MiB of workspace
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
    unsigned lacking_epilogues = 0;                  // bits of cublasLtEpilogue_t that no algorithm has
    bool lacks_float_output = false;                 // for 16-bit factors with an epilogue
    bool is_careless = false;                        // accepts undocumented products, and returns NaN
    bool ignores_mask = false;                       // proposes algorithms that the preference forbids
    bool hides_reductions = false;                   // does not report an algorithm's reduction scheme
    bool prefers_256 = false;                        // proposes 1 only for matrices aligned to 256 bytes
    bool refuses_in_call[kCublasLtAlgorithms] = {};  // proposed, but cublasLtMatmul returns NOT_SUPPORTED
    bool gone[kCublasLtAlgorithms] = {};             // not proposed
    float ms[kCublasLtAlgorithms] = {};              // duration of a product, in addition to the simulation
    std::map<cublasLtEpilogue_t, float> extra_ms;    // additional duration of a product with the epilogue

    // Recorded calls.
    std::vector<CublasLtProduct> products;            // carried out
    int heuristics = 0, descriptions = 0, alive = 0;  // calls; made; not destroyed yet
};

CublasLt& cublas_lt();

// Resets everything, for a scope.
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

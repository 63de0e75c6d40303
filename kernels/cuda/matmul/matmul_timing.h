// Times the algorithms of a GEMM, for the choice of the fastest and for benchmarks.
#pragma once

#include <functional>
#include <vector>

#include "kernels/cuda/matmul/matmul_library.h"
#include "kernels/device.h"

struct TimedAlgorithm {
    size_t rank;  // among the given algorithms
    MatmulAlgorithm algorithm;
    double ms;  // median in steady state
};

// Queues one run of an algorithm, or returns why the library refuses it.
using RunAlgorithm = std::function<cublasStatus_t(const MatmulAlgorithm&)>;

// Times algorithms in the library's order, fastest first. Returns the first one that runs, then the fastest of the
// others that run among the first `most`, in the library's order; empty if none runs. Takes at most about half a second
// and runs of the slowest algorithm. Waits for the stream.
std::vector<TimedAlgorithm> time_algorithms(const std::vector<MatmulAlgorithm>& algorithms, const RunAlgorithm& run,
                                            Stream stream, size_t most = SIZE_MAX);

// Returns the fastest one; of algorithms whose times differ by less than 1 %, the one that the library ranks highest.
const TimedAlgorithm& fastest_of(const std::vector<TimedAlgorithm>& timed);

// Milliseconds of `call`, which queues work on the stream: the median of a few turns.
double time_turns(const std::function<void()>& call, Stream stream);

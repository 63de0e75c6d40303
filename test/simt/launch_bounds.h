// The maximum number of threads per block that a kernel's __launch_bounds__ allows.
#pragma once

namespace simt {

// The first argument of __launch_bounds__(threads, blocks per multiprocessor, blocks per cluster).
constexpr int bound_of(int threads, int = 0, int = 0) { return threads; }

// kMaxThreads for a kernel without __launch_bounds__, and for every kernel compiled by clang.
int launch_bound(const void* kernel);

}  // namespace simt

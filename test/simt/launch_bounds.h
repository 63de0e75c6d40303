// The most threads in a block that a kernel's __launch_bounds__ allows.
#pragma once

namespace simt {

// Of the arguments of __launch_bounds__: threads, blocks per multiprocessor, blocks in a cluster.
constexpr int bound_of(int threads, int = 0, int = 0) { return threads; }

// kMaxThreads for a kernel without __launch_bounds__, and for every kernel that clang compiled.
int launch_bound(const void* kernel);

}  // namespace simt

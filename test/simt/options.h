// How the simulator runs kernels. A test program takes the options from its command line (test/simt/main.cpp), a test
// from a guard: `simt::WithOptions strict({.strict_proxy = true});`.
#pragma once

#include <cstdint>

namespace simt {

struct Options {
    uint64_t seed = 0;          // 0: an unkind fixed order of blocks, warps and streams; else random orders
    bool strict_proxy = false;  // asynchronous units see shared memory as it was at the last fence.proxy.async
    bool kind_stores = false;   // bulk stores read their source at once, as fast hardware may
    int shared_kib = 227;       // that a block may have: sm_90's; 99 on sm_86, 89 and 120
};

Options& options();

// Options for a scope.
class WithOptions {
public:
    explicit WithOptions(const Options& scoped) : saved_(options()) { options() = scoped; }
    ~WithOptions() { options() = saved_; }
    WithOptions(const WithOptions&) = delete;
    WithOptions& operator=(const WithOptions&) = delete;

private:
    Options saved_;
};

// These options on a GPU whose blocks may have that much shared memory.
inline Options with_shared(int kib) {
    Options changed = options();
    changed.shared_kib = kib;
    return changed;
}

// A random number below `end`, from the seed. Only for orders, never for values.
uint32_t random_below(uint32_t end);

}  // namespace simt

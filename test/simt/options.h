// Options of the simulator. A test program reads them from its command line (test/simt/main.cpp), a trainer the seed
// from the environment variable SIMULATED_SEED, and a test sets them with a guard:
// `simt::WithOptions strict({.strict_proxy = true});`.
#pragma once

#include <cstdint>

namespace simt {

struct Options {
    uint64_t seed = 0;          // 0: a fixed adversarial order of blocks, warps and streams; otherwise random orders
    bool strict_proxy = false;  // asynchronous units see shared memory as it was at the last fence.proxy.async
    bool kind_stores = false;   // bulk stores read their source at once, like fast hardware
    int capability = 90;        // ten times the compute capability
    int shared_kib = 227;       // limit of a block
};

Options& options();

// Sets the options for a scope.
class WithOptions {
public:
    explicit WithOptions(const Options& scoped) : saved_(options()) { options() = scoped; }
    ~WithOptions() { options() = saved_; }
    WithOptions(const WithOptions&) = delete;
    WithOptions& operator=(const WithOptions&) = delete;

private:
    Options saved_;
};

// These options on a GPU of this compute capability (ten times it), with its limit of shared memory per block.
inline Options with_capability(int capability) {
    Options changed = options();
    changed.capability = capability;
    changed.shared_kib = capability == 80 ? 163 : capability == 90 || capability == 100 ? 227 : 99;
    return changed;
}

// A random number below `end`, from the seed. Used for orders only, never for values.
uint32_t random_below(uint32_t end);

}  // namespace simt

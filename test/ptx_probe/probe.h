// Probes of the wrappers in kernels/cuda/ptx.cuh and ptx_hopper.cuh: kernels that use one wrapper on fixed inputs and
// store every result as a word. The same source runs on a GPU (build/ptx_probe_cuda) and, with the wrappers' twins, on
// the simulator (build/ptx_probe_simt); both must print the same, which scripts/gpu_probe.py compares.
//
// Inputs are chosen to have a single correct result: sums of products of small integers, which are exact in any order.
// If an instruction may differ within bounds, the word tells whether it kept them. canonical() unifies the sign of a
// zero sum and the bits of a NaN, which have no meaning.
#pragma once

#include <cudaTypedefs.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// An FP32 tensor of up to five dimensions, the innermost first, and the box that one copy moves.
struct TensorShape {
    int rank = 0;
    uint64_t size[5] = {};
    uint32_t box[5] = {};
    int swizzle = 0;  // ptx::Swizzle

    // In bytes; of all dimensions except the first.
    std::array<uint64_t, 4> strides() const {
        std::array<uint64_t, 4> all{};
        uint64_t bytes = sizeof(float);
        for (int i = 1; i < rank; i++) all[size_t(i - 1)] = bytes *= size[i - 1];
        return all;
    }
    int words() const {
        uint64_t count = rank > 0;
        for (int i = 0; i < rank; i++) count *= size[i];
        return int(count);
    }
    int box_words() const {
        uint32_t count = rank > 0;
        for (int i = 0; i < rank; i++) count *= box[i];
        return int(count);
    }
};

// The map of a tensor at `base` (device memory, 16-byte aligned).
CUtensorMap make_tensor_map(const TensorShape& shape, void* base);

struct ProbeArgs {
    uint32_t* out;
    const uint32_t* in;
    int count;      // of input words
    int box_words;  // of the probe's tensor, as are the maps of `in` and `out`
    CUtensorMap from, to;
};

struct Probe {
    std::string wrapper;  // with template arguments and case: "ldmatrix_x4<true>"
    void (*kernel)(ProbeArgs);
    int words;  // of output
    int threads = 32, blocks = 1;
    size_t shared_bytes = 0;
    std::vector<uint32_t> input{};
    int cluster = 1;
    TensorShape tensor{};  // in the input and at the beginning of the output
};

// Probes that run in one process: a probe that hangs or crashes only stops the rest of its group.
struct ProbeGroup {
    std::string name;
    std::vector<Probe> probes;
};

// Wrappers of sm_80 and later.
std::vector<ProbeGroup> ptx_probes();
// Wrappers of sm_90a.
std::vector<ProbeGroup> hopper_probes();
std::vector<ProbeGroup> tensor_copy_probes();

// Pseudorandom words.
inline std::vector<uint32_t> noise_words(int count, uint32_t seed) {
    std::vector<uint32_t> words;
    for (int i = 0; i < count; i++) words.push_back(seed = seed * 1664525u + 1013904223u);
    return words;
}

// Probes of the wrappers in kernels/cuda/ptx.cuh and ptx_hopper.cuh: kernels that use one wrapper on fixed inputs and
// store every result as a word. The same source runs on a GPU (build/ptx_probe_cuda) and, with the wrappers' twins, on
// the simulator (build/ptx_probe_simt); both must print the same, which scripts/gpu_probe.py compares.
//
// Inputs are chosen to have a single correct result: sums of products of small integers, which are exact in any order.
// If an instruction may differ within bounds, the word tells whether it kept them. canonical() unifies the sign of a
// zero sum and the bits of a NaN, which have no meaning.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/hopper/tensor_map.h"

// A dense FP32 tensor of up to five dimensions, the innermost first, and the box that one copy moves.
struct DenseTensor {
    int rank = 0;
    uint64_t size[5] = {};
    uint32_t box[5] = {};
    ptx::Swizzle swizzle = ptx::SWIZZLE_NONE;

    TensorShape shape() const {
        TensorShape all{.rank = rank, .swizzle = swizzle};
        std::copy_n(size, 5, all.size);
        std::copy_n(box, 5, all.box);
        uint64_t bytes = sizeof(float);
        for (int i = 1; i < rank; i++) all.strides[i - 1] = bytes *= size[i - 1];
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
    DenseTensor tensor{};  // in the input and at the beginning of the output
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

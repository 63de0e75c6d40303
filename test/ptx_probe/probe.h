// Probes of the wrappers in kernels/cuda/ptx.cuh and ptx_hopper.cuh: kernels that use one wrapper on fixed inputs and
// store every result as a word. The same source runs on a GPU (build/ptx_probe_cuda) and, with the wrappers' twins, on
// the simulator (build/ptx_probe_simt); both must print the same.
//
// Inputs are chosen so that there is one right answer: sums of products of small integers, which are exact in any
// order; where an instruction may differ within bounds, the word says whether it kept them. The sign of a zero sum and
// the bits of a NaN, which mean nothing to anyone, are made equal by canonical().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct ProbeArgs {
    uint32_t* out;
    const uint32_t* in;
    int count;  // of input words
};

struct Probe {
    std::string wrapper;  // with template arguments and case: "ldmatrix<4,true>"
    void (*kernel)(ProbeArgs);
    int words;  // of output
    int threads = 32, blocks = 1;
    size_t shared_bytes = 0;
    std::vector<uint32_t> input{};
    int cluster = 1;
};

// Wrappers of sm_80 and later.
std::vector<Probe> ptx_probes();
// Wrappers of sm_90a.
std::vector<Probe> hopper_probes();

// Numbers without a pattern.
inline std::vector<uint32_t> noise_words(int count, uint32_t seed) {
    std::vector<uint32_t> words;
    for (int i = 0; i < count; i++) words.push_back(seed = seed * 1664525u + 1013904223u);
    return words;
}

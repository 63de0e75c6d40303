// Prints "WRAPPER INDEX WORD" for each word that each probe stores.
//
//     build/ptx_probe_cuda [COMPUTE_CAPABILITY]             or build/ptx_probe_simt; default: the device's
//
// sm_90a's instructions exist on GPUs of capability 9 only, not on later ones.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/launch.cuh"
#include "test/ptx_probe/probe.h"

namespace {

std::vector<uint32_t> run(const Probe& probe) {
    std::vector<uint32_t> words(size_t(probe.words), 0xdeadbeefu), input = probe.input;
    input.resize(std::max<size_t>(input.size(), 1));
    uint32_t *in = nullptr, *out = nullptr;
    check_cuda(cudaMalloc(&in, input.size() * 4), "cudaMalloc");
    check_cuda(cudaMalloc(&out, words.size() * 4), "cudaMalloc");
    check_cuda(cudaMemcpy(in, input.data(), input.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    check_cuda(cudaMemcpy(out, words.data(), words.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    ProbeArgs args{out, in, int(probe.input.size()), probe.tensor.box_words(), {}, {}};
    if (probe.tensor.rank > 0) {
        args.from = make_tensor_map(probe.tensor, in);
        args.to = make_tensor_map(probe.tensor, out);
    }
    launch(probe.kernel,
           {.name = probe.wrapper.c_str(),
            .blocks = dim3(unsigned(probe.blocks)),
            .threads = probe.threads,
            .shared_bytes = probe.shared_bytes,
            .cluster = probe.cluster},
           Stream{}, args);
    check_cuda(cudaStreamSynchronize(nullptr), probe.wrapper.c_str());
    check_cuda(cudaMemcpy(words.data(), out, words.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check_cuda(cudaFree(in), "cudaFree");
    check_cuda(cudaFree(out), "cudaFree");
    return words;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        int major = 0;
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
        if (argc > 1) major = std::atoi(argv[1]);
        std::vector<Probe> probes = ptx_probes();
        if (major == 9)
            for (const auto& more : {hopper_probes(), tensor_copy_probes()})
                probes.insert(probes.end(), more.begin(), more.end());
        for (const Probe& probe : probes) {
            const std::vector<uint32_t> words = run(probe);
            for (size_t i = 0; i < words.size(); i++) std::printf("%s %zu %08x\n", probe.wrapper.c_str(), i, words[i]);
        }
    } catch (const Error& error) {
        std::fprintf(stderr, "ptx_probe: %s\n", error.what());
        return int(error.code);
    }
    return 0;
}

// Prints "WRAPPER COUNT WORDS" for each probe as soon as it has run: the number of stored words, and the words in hex.
//
//     build/ptx_probe_cuda or build/ptx_probe_simt [GROUP ...]     default: all groups that the device can run
//     build/ptx_probe_simt --list                                  "GROUP ARCHITECTURE" for each group; needs no GPU
//
// sm_80's groups run on every later GPU, sm_90a's on GPUs of compute capability 9 only. Exit codes are Exit's.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/cuda/launch.cuh"
#include "test/ptx_probe/probe.h"

namespace {

struct Architecture {
    const char* name;
    std::vector<ProbeGroup> groups;
};

std::vector<Architecture> architectures() {
    std::vector<ProbeGroup> hopper = hopper_probes();
    for (const ProbeGroup& group : tensor_copy_probes()) hopper.push_back(group);
    return {{"sm_80", ptx_probes()}, {"sm_90a", hopper}};
}

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
        args.from = make_tensor_map({in, Dtype::fp32}, probe.tensor.shape());
        args.to = make_tensor_map({out, Dtype::fp32}, probe.tensor.shape());
    }
    launch(probe.kernel,
           {.name = probe.wrapper.c_str(),
            .blocks = dim3(unsigned(probe.blocks)),
            .threads = probe.threads,
            .shared_bytes = probe.shared_bytes,
            .cluster = probe.cluster},
           Stream{}, args);
    check_cuda(cudaDeviceSynchronize(), probe.wrapper.c_str());
    check_cuda(cudaMemcpy(words.data(), out, words.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check_cuda(cudaFree(in), "cudaFree");
    check_cuda(cudaFree(out), "cudaFree");
    return words;
}

void run(const ProbeGroup& group) {
    for (const Probe& probe : group.probes) {
        const std::vector<uint32_t> words = run(probe);
        std::printf("%s %zu ", probe.wrapper.c_str(), words.size());
        for (uint32_t word : words) std::printf("%08x", word);
        std::printf("\n");
        std::fflush(stdout);  // before the next one, which may hang
    }
}

void run_named(const std::string& name) {
    for (const Architecture& architecture : architectures())
        for (const ProbeGroup& group : architecture.groups)
            if (group.name == name) return run(group);
    fail(Exit::usage, "%s is not a group of probes; --list prints them", name.c_str());
}

void run_all() {
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
    for (const Architecture& architecture : architectures())
        if (major == 9 || !std::strcmp(architecture.name, "sm_80"))
            for (const ProbeGroup& group : architecture.groups) run(group);
}

void list() {
    for (const Architecture& architecture : architectures())
        for (const ProbeGroup& group : architecture.groups)
            std::printf("%s %s\n", group.name.c_str(), architecture.name);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc == 2 && !std::strcmp(argv[1], "--list"))
            list();
        else if (argc == 1)
            run_all();
        else
            for (int i = 1; i < argc; i++) run_named(argv[i]);
    } catch (const Error& error) {
        std::fprintf(stderr, "ptx_probe: %s\n", error.what());
        return int(error.code);
    }
    return 0;
}

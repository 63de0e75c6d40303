// For tests of the simulator: a kernel with a switch for its fault, run with it and without.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "test/simt/fault.h"
#include "test/support/catch.h"

// The argument of most of these kernels.
struct Planted {
    float* out;
    bool fault;
};

// clang gives less information about its kernels: test/simt/include/cuda_runtime.h.
inline bool is_clang() { return std::string(__VERSION__).find("Clang") != std::string::npos; }

// Device memory of a test.
template <class T> class DeviceArray {
public:
    explicit DeviceArray(size_t count) : count_(count) {
        check_cuda(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        copy(data_, values.data(), cudaMemcpyHostToDevice);
    }
    ~DeviceArray() { cudaFree(data_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    T* data() const { return data_; }
    std::vector<T> fetch() const {
        std::vector<T> values(count_);
        copy(values.data(), data_, cudaMemcpyDeviceToHost);
        return values;
    }

private:
    // In the order of the program's stream.
    void copy(void* to, const void* from, cudaMemcpyKind kind) const {
        check_cuda(cudaMemcpyAsync(to, from, count_ * sizeof(T), kind, cuda_stream({})), "cudaMemcpyAsync");
        check_cuda(cudaStreamSynchronize(cuda_stream({})), "cudaStreamSynchronize");
    }

    T* data_ = nullptr;
    size_t count_;
};

template <class Op> std::vector<simt::Fault> faults_of(void (*kernel)(Op), const Launch& config, const Op& op) {
    launch(kernel, config, Stream(), op);
    return simt::take_faults();
}

inline std::string sentences(const std::vector<simt::Fault>& faults) {
    std::string text;
    for (const simt::Fault& fault : faults) text += fault.sentence() + "\n";
    return text;
}

// Requires that the kernel with its fault is reported with text that contains `expected`, and without it is not.
inline void check_planted(void (*kernel)(Planted), const Launch& config, const std::string& expected) {
    DeviceArray<float> out(std::vector<float>(4096));
    const std::string clean = sentences(faults_of(kernel, config, {out.data(), false}));
    CHECK(clean == "");
    const std::string found = sentences(faults_of(kernel, config, {out.data(), true}));
    INFO("expected: " << expected << "\nreported: " << found);
    CHECK(found.find(expected) != std::string::npos);
    // The machine still works.
    const std::string afterwards = sentences(faults_of(kernel, config, {out.data(), false}));
    CHECK(afterwards == "");
}

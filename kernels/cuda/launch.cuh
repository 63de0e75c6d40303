// The one way to start a kernel, and the check of every call to CUDA.
//
// A launch that CUDA rejects fails with the kernel's name, the caller's line and CUDA's error text. After
// set_debug_sync(true) each launch is waited for, so that the kernel that made a memory error is the one that is named.
#pragma once

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include "kernels/base/check.h"
#include "kernels/device.h"

// The source location of a call: taken by default arguments, so that it is the caller's line. (A constructor, because
// nvcc 13.0 aborts at default member values that are taken in a default argument.)
struct Caller {
    const char* file;
    int line;
    Caller(const char* in_file = __builtin_FILE(), int at_line = __builtin_LINE()) : file(in_file), line(at_line) {}
};

inline void check_cuda(cudaError_t error, const char* what, Caller caller = Caller()) {
    if (error != cudaSuccess)
        fail(Exit::os, "%s failed: %s (%s, at %s:%d)", what, cudaGetErrorString(error), cudaGetErrorName(error),
             caller.file, caller.line);
}

struct EventDestroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventDestroy>;

// Makes an event; cudaEventDisableTiming: one that is only waited for.
inline Event make_event(unsigned flags = cudaEventDefault) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    return Event(event);
}

// Whether what was on the event's stream has finished.
inline bool has_happened(cudaEvent_t event, const char* what, Caller caller = Caller()) {
    const cudaError_t state = cudaEventQuery(event);
    if (state != cudaErrorNotReady) check_cuda(state, what, caller);
    if (state == cudaErrorNotReady) cudaGetLastError();  // not an error: no later check may report it
    return state == cudaSuccess;
}

// In the order of CUDA's execution configuration.
struct Launch {
    const char* name;  // of the op, for errors and for the profiler's ranges
    dim3 blocks;
    int threads;              // in a block
    size_t shared_bytes = 0;  // dynamic shared memory of a block
    int cluster = 1;          // blocks in a cluster (sm_90 and newer)
};

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// Whether every launch is waited for. Set once, before the first launch.
inline bool& debug_sync() {
    static bool on = false;
    return on;
}

// A range in the profiler's timeline, named after the op.
class ProfilerRange {
public:
    explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
    ~ProfilerRange() { nvtxRangePop(); }
    ProfilerRange(const ProfilerRange&) = delete;
    ProfilerRange& operator=(const ProfilerRange&) = delete;
};

// Starts kernel(op) on the stream.
template <class Op>
void launch(void (*kernel)(Op), const Launch& config, Stream stream, const Op& op, Caller caller = Caller()) {
    const auto blocks = config.blocks;
    auto check = [&](cudaError_t error) {
        if (error != cudaSuccess)
            fail(Exit::os,
                 "kernel %s failed: %s (%s); (%u, %u, %u) blocks in clusters of %d, %d threads, %zu bytes of shared "
                 "memory, launched at %s:%d",
                 config.name, cudaGetErrorString(error), cudaGetErrorName(error), blocks.x, blocks.y, blocks.z,
                 config.cluster, config.threads, config.shared_bytes, caller.file, caller.line);
    };
    require(config.threads > 0, "kernel %s: %d threads, at %s:%d", config.name, config.threads, caller.file,
            caller.line);
    constexpr size_t kGrantedSharedBytes = 48 * 1024;  // more needs an attribute
    if (config.shared_bytes > kGrantedSharedBytes)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.shared_bytes)));

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(config.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t cuda_config{};
    cuda_config.gridDim = blocks;
    cuda_config.blockDim = dim3(unsigned(config.threads));
    cuda_config.dynamicSmemBytes = config.shared_bytes;
    cuda_config.stream = cuda_stream(stream);
    cuda_config.attrs = &cluster;
    cuda_config.numAttrs = config.cluster > 1 ? 1 : 0;

    ProfilerRange range(config.name);
    check(cudaLaunchKernelEx(&cuda_config, kernel, op));
    if (debug_sync()) check(cudaStreamSynchronize(cuda_stream(stream)));
}

// The block's dynamic shared memory as one struct; Launch::shared_bytes must be its size. Aligned to 1024 bytes, which
// is what the widest swizzle of tensor copies repeats after.
template <class Shared> __device__ __forceinline__ Shared& shared_memory() {
#ifdef SIMT
    return *reinterpret_cast<Shared*>(simt::dynamic_shared(sizeof(Shared)));
#else
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    return *reinterpret_cast<Shared*>(shared_bytes);
#endif
}

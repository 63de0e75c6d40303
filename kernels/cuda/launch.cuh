// Launches kernels and checks CUDA calls. All kernel launches go through this file.
//
// A rejected launch fails with the kernel's name, the caller's line and CUDA's error text. After set_debug_sync(true),
// each launch is followed by a wait, so that a memory error names the kernel that caused it.
#pragma once

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include "kernels/base/check.h"  // IWYU pragma: export
#include "kernels/device.h"      // IWYU pragma: export

// The source location of a call. Default arguments capture it, so that it is the caller's line. (A constructor, because
// nvcc 13.0 aborts on default member values in a default argument.)
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

// Creates an event. Use cudaEventDisableTiming if it is only waited for.
inline Event make_event(unsigned flags = cudaEventDefault) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    return Event(event);
}

// Whether the work before the event has finished.
inline bool has_happened(cudaEvent_t event, const char* what, Caller caller = Caller()) {
    const cudaError_t state = cudaEventQuery(event);
    if (state != cudaErrorNotReady) check_cuda(state, what, caller);
    if (state == cudaErrorNotReady) cudaGetLastError();  // not an error, so no later check may report it
    return state == cudaSuccess;
}

// Members are in the order of CUDA's execution configuration.
struct Launch {
    const char* name;  // of the op, for errors and profiler ranges
    dim3 blocks;
    int threads;              // per block
    size_t shared_bytes = 0;  // dynamic shared memory per block
    int cluster = 1;          // blocks per cluster (sm_90 and newer)
};

// The program's own stream for a null handle. CUDA's legacy stream would wait for blocking streams and could not be
// recorded.
inline cudaStream_t cuda_stream(Stream stream) {
    static const cudaStream_t own = [] {
        cudaStream_t made = nullptr;
        check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
        return made;
    }();
    return stream.handle ? static_cast<cudaStream_t>(stream.handle) : own;
}

// Whether to wait after every launch. Set it once, before the first launch.
inline bool& debug_sync() {
    static bool on = false;
    return on;
}

// Whether to record and replay work. Set it once, before the first recording.
inline bool& graphs_are_on() {
    static bool on = true;
    return on;
}

// A range with the op's name in the profiler's timeline.
class ProfilerRange {
public:
    explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
    ~ProfilerRange() { nvtxRangePop(); }
    ProfilerRange(const ProfilerRange&) = delete;
    ProfilerRange& operator=(const ProfilerRange&) = delete;
};

// Launches kernel(op) on the stream.
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

// The block's dynamic shared memory as a struct; Launch::shared_bytes must be its size. Aligned to 1024 bytes, the
// period of the widest swizzle of tensor copies.
template <class Shared> __device__ __forceinline__ Shared& shared_memory() {
#ifdef SIMT
    return *reinterpret_cast<Shared*>(simt::dynamic_shared(sizeof(Shared)));
#else
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    return *reinterpret_cast<Shared*>(shared_bytes);
#endif
}

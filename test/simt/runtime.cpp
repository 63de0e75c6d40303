// The CUDA runtime's functions for the host.
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "runtime/io/files.h"
#include "test/simt/device_memory.h"

namespace {

struct Runtime {
    cudaError_t last_error = cudaSuccess;
    std::string failure = "unspecified launch failure";
    std::map<const void*, int> dynamic_shared_bytes;  // what cudaFuncSetAttribute allowed
    std::vector<std::string> ranges;
    std::string kernel_name;
    int device = 0;
};

Runtime& runtime() {
    static Runtime instance;
    return instance;
}

// Printed on stderr at the end of the program if the environment has SIMULATED_COUNTS. A wait that waits for nothing
// does not count.
struct Counts {
    int recorded = 0, launched = 0, kept = 0, most_kept = 0, waits = 0;
    ~Counts() {
        if (std::getenv("SIMULATED_COUNTS"))
            std::fprintf(stderr, "simulated GPU: %d graphs, launched %d times, at most %d kept; %d waits of the host\n",
                         recorded, launched, most_kept, waits);
    }
};

Counts& counts() {
    static Counts instance;
    return instance;
}

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) runtime().last_error = error;
    return error;
}

// Rejects a launch that would fail on a GPU with a less specific error.
cudaError_t refused(const std::string& why) {
    runtime().failure = why;
    return result(cudaErrorLaunchFailure);
}

// After work was executed: turns faults into the error that a device returns after a failed kernel.
cudaError_t result_of_work() {
    simt::check_device_memory();
    auto& faults = simt::pending_faults();
    if (faults.empty()) return cudaSuccess;
    runtime().failure = faults[0].sentence();
    if (faults.size() > 1) runtime().failure += format(" (and %zu more faults)", faults.size() - 1);
    faults.clear();
    return result(cudaErrorLaunchFailure);
}

cudaStream_t or_default(cudaStream_t stream) {
    return stream && stream != cudaStreamLegacy ? stream : simt::default_stream();
}

// For calls that are not permitted during a capture; they invalidate it.
cudaError_t refused_in_capture() {
    if (!simt::capture().stream) return cudaSuccess;
    simt::capture().graph->is_valid = false;
    return result(cudaErrorStreamCaptureUnsupported);
}

// Memory may be freed between the queueing of a copy and its execution.
bool is_copyable(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const bool to_device = simt::is_device_memory(to, bytes), from_device = simt::is_device_memory(from, bytes);
    switch (kind) {
        case cudaMemcpyHostToHost: return !to_device && !from_device;
        case cudaMemcpyHostToDevice: return to_device && !from_device;
        case cudaMemcpyDeviceToHost: return !to_device && from_device;
        case cudaMemcpyDeviceToDevice: return to_device && from_device;
        case cudaMemcpyDefault:
            return (to_device || simt::on_device(to) == to) && (from_device || simt::on_device(from) == from);
    }
    return false;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevicePointer: return "cudaErrorInvalidDevicePointer";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorLaunchOutOfResources: return "cudaErrorLaunchOutOfResources";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorUnknown: break;
    }
    return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidDevicePointer: return "invalid device pointer";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
        case cudaErrorLaunchFailure: return runtime().failure.c_str();
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorUnknown: break;
    }
    return "unknown error";
}

cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return runtime().last_error; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    *memory = simt::allocate_device(bytes);
    return result(*memory || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Waits for the device, like the real one.
cudaError_t cudaFree(void* memory) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    simt::run_all_streams();
    return result(!memory || simt::free_device(memory) ? cudaSuccess : cudaErrorInvalidDevicePointer);
}

cudaError_t cudaMallocHost(void** memory, size_t bytes) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (*memory) simt::allow_on_device(*memory, bytes);
    return result(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* memory) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    simt::run_all_streams();
    simt::forbid_on_device(memory);
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *total_bytes = simt::device_bytes();
    *free_bytes = simt::device_bytes() - simt::used_device_bytes();
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!is_copyable(to, from, bytes, kind)) return result(cudaErrorInvalidValue);
    if (kind != cudaMemcpyDeviceToDevice && or_default(stream) == simt::capture().stream) return refused_in_capture();
    simt::queue_work(or_default(stream), [=] {
        if (is_copyable(to, from, bytes, kind))
            std::memcpy(simt::on_device(to), simt::on_device(from), bytes);
        else
            simt::note_fault(format("a copy of %zu bytes came to its turn after its memory was freed", bytes));
    });
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return result(cudaErrorInvalidValue);
    for (size_t row = 0; row < height; row++)
        if (cudaError_t error =
                cudaMemcpyAsync(static_cast<std::byte*>(to) + row * to_pitch,
                                static_cast<const std::byte*>(from) + row * from_pitch, width, kind, stream))
            return error;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
    return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!simt::is_device_memory(memory, bytes)) return result(cudaErrorInvalidValue);
    simt::queue_work(or_default(stream), [=] {
        if (simt::is_device_memory(memory, bytes))
            std::memset(simt::on_device(memory), value, bytes);
        else
            simt::note_fault(format("a memset of %zu bytes came to its turn after its memory was freed", bytes));
    });
    return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) { return cudaMemsetAsync(memory, value, bytes, nullptr); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = simt::create_stream(flags != cudaStreamNonBlocking);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    simt::destroy_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    counts().waits += !or_default(stream)->queue.empty();
    simt::run_stream(or_default(stream));
    return result_of_work();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    simt::queue_wait(or_default(stream), event);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return or_default(stream)->queue.empty() ? result_of_work() : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new simt::Event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    simt::run_all_streams();  // queued work may still use it
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    simt::queue_record(or_default(stream), event);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    counts().waits += event->completed < event->recorded;
    simt::run_until_complete(event);
    return result_of_work();
}

// The device advances while the host polls.
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    if (event->completed == event->recorded) {
        simt::acquire_order(&event->order);
        return result_of_work();
    }
    simt::go_on_towards(event);
    return simt::pending_faults().empty() ? cudaErrorNotReady : result_of_work();
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->recorded || !end->recorded) return result(cudaErrorInvalidResourceHandle);
    if (start->completed < start->recorded || end->completed < end->recorded) return cudaErrorNotReady;
    *ms = float(end->ms - start->ms);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    if (const cudaError_t refused = refused_in_capture()) return refused;
    simt::run_all_streams();
    return result_of_work();
}

static size_t shared_bytes_per_block() { return size_t(simt::options().shared_kib) * 1024; }

// The machine's GPUs are identical, and each process has memory and streams on one of them.
static constexpr int kDevices = 8;

cudaError_t cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = runtime().device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
    runtime().device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
    if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
    std::snprintf(text, size_t(bytes), "0000:%02X:00.0", 16 + device);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
    // Sets another GPU's name, for code that depends on it.
    const char* name = std::getenv("SIMULATED_GPU");
    *properties = {.name = "",
                   .totalGlobalMem = simt::device_bytes(),
                   .sharedMemPerBlockOptin = shared_bytes_per_block(),
                   .major = simt::options().capability / 10,
                   .minor = simt::options().capability % 10,
                   .multiProcessorCount = 3,
                   .l2CacheSize = 1 << 20,
                   .maxThreadsPerBlock = simt::kMaxThreads};
    std::snprintf(properties->name, sizeof(properties->name), "%s", name ? name : "simulated sm_90");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(properties.sharedMemPerBlockOptin); break;
    }
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// A kernel may have 48 KiB of dynamic shared memory unless more is requested.
static constexpr int kDefaultSharedBytes = 48 * 1024;

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || size_t(value) > shared_bytes_per_block()) return result(cudaErrorInvalidValue);
    runtime().dynamic_shared_bytes[kernel] = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    auto allowed = runtime().dynamic_shared_bytes.find(kernel);
    *attributes = {};
    attributes->maxThreadsPerBlock = simt::launch_bound(kernel);
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes =
        allowed == runtime().dynamic_shared_bytes.end() ? kDefaultSharedBytes : allowed->second;
    return cudaSuccess;
}

// ---- graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (or_default(stream) == simt::default_stream() || simt::capture().stream)
        return result(cudaErrorStreamCaptureUnsupported);
    simt::capture() = {stream, std::make_unique<simt::Graph>()};
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = nullptr;
    if (!stream || stream != simt::capture().stream) return result(cudaErrorInvalidValue);
    simt::Capture ended = std::exchange(simt::capture(), {});
    if (!ended.graph->is_valid) return result(cudaErrorStreamCaptureInvalidated);
    *graph = ended.graph.release();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = new simt::Graph(*graph);
    counts().recorded++;
    counts().most_kept = std::max(counts().most_kept, ++counts().kept);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    for (const std::function<void()>& work : executable->work) simt::queue_work(or_default(stream), work);
    counts().launched++;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    counts().kept--;
    return cudaGraphDestroy(executable);
}

// ---- kernels ----

int nvtxRangePushA(const char* name) {
    runtime().ranges.push_back(name);
    return int(runtime().ranges.size()) - 1;
}

int nvtxRangePop() {
    runtime().ranges.pop_back();
    return int(runtime().ranges.size());
}

// Plants a fault for tests of programs: SIMULATED_KERNEL_FAULT="KERNEL KIND [GPU]". Returns true for "wrong", a kernel
// that does nothing; "crashes" ends the launch, "slow" takes 2 s, "endless" never returns.
static bool does_nothing(const std::string& kernel) {
    const char* plan = std::getenv("SIMULATED_KERNEL_FAULT");
    if (!plan) return false;
    std::istringstream words(plan);
    std::string name, kind;
    int gpu = runtime().device;
    if (!(words >> name >> kind) || name != kernel) return false;
    if (words >> gpu && gpu != runtime().device) return false;
    if (kind == "crashes") simt::note_fault("a planted fault");
    if (kind == "slow") std::this_thread::sleep_for(std::chrono::seconds(2));
    while (kind == "endless") std::this_thread::sleep_for(std::chrono::seconds(1));
    return kind == "wrong" || kind == "crashes";
}

cudaError_t simt::queue_kernel(const cudaLaunchConfig_t& config, const void* kernel, uintptr_t host_address,
                               std::function<void()> body) {
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, kernel);
    const dim3 grid = config.gridDim, block = config.blockDim;
    auto threads = uint64_t(block.x) * block.y * block.z;
    Grid work{.name = runtime().ranges.empty() ? "kernel" : runtime().ranges.back(),
              .blocks = grid,
              .threads = block,
              .shared_bytes = uint32_t(config.dynamicSmemBytes),
              .cluster = 1,
              .body = std::move(body)};
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
            work.cluster = int(config.attrs[i].val.clusterDim.x);
    const bool is_grid =
        grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535;
    if (!is_grid || threads == 0 || threads > kMaxThreads || block.z > 64) return result(cudaErrorInvalidConfiguration);
    if (work.cluster < 1 || work.cluster > kMaxCluster || grid.x % unsigned(work.cluster))
        return result(cudaErrorInvalidConfiguration);
    if (threads > uint64_t(attributes.maxThreadsPerBlock))
        return refused(format("%zu threads in a block, the kernel's launch bound is %d", size_t(threads),
                              attributes.maxThreadsPerBlock));
    if (config.dynamicSmemBytes > size_t(attributes.maxDynamicSharedSizeBytes)) return result(cudaErrorInvalidValue);
    if (host_address)
        return refused(format("its argument holds 0x%zx, an address of host memory that is not pinned", host_address));
    queue_work(or_default(config.stream), [work, is_planted = does_nothing(work.name)] {
        if (!is_planted) run_grid(work);
    });
    return cudaSuccess;
}

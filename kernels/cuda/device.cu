// device.h for CUDA: memory, copies in stream order, synchronization, and startup checks.
//
// Copies to and from pageable host memory go through a ring of pinned memory: this thread copies between host memory
// and the ring, the copy engine between the ring and the device. So the driver never blocks a stream for its own
// staging. A copy to the device has read the caller's memory when the call returns. A copy to the host has written it
// after synchronize().
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/cuda/arch_kernels.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/startup.h"

namespace {

// Enough for the inputs of many micro-steps, so that the host waits only for large copies.
constexpr size_t kRingBytes = size_t(32) << 20;
constexpr size_t kPieceBytes = size_t(4) << 20;  // large enough for the copy engine's full rate

// Pinned memory through which all copies go. Each takes the next bytes of it. Only the thread that drives
// the device copies.
class StagingRing {
public:
    void copy(void* to, const void* from, size_t bytes, bool to_host, cudaStream_t stream) {
        for (size_t done = 0; done < bytes; done += kPieceBytes) {
            Piece piece = take(std::min(kPieceBytes, bytes - done));
            std::byte* const target = static_cast<std::byte*>(to) + done;
            const std::byte* const source = static_cast<const std::byte*>(from) + done;
            std::byte* const staged = memory_ + piece.begin;
            if (!to_host) std::memcpy(staged, source, piece.bytes);
            check_cuda(cudaMemcpyAsync(to_host ? staged : target, to_host ? source : staged, piece.bytes,
                                       cudaMemcpyDefault, stream),
                       to_host ? "copy from the GPU" : "copy to the GPU");
            check_cuda(cudaEventRecord(piece.copied.get(), stream), "cudaEventRecord");
            piece.stream = stream, piece.host = to_host ? target : nullptr;
            in_flight_.push_back(std::move(piece));
        }
    }

    // Completes copies to the host on a synchronized stream, in order, so that a later copy to an address wins.
    void deliver(cudaStream_t stream) {
        for (Piece& piece : in_flight_)
            if (piece.stream == stream) finish(piece);
        while (!in_flight_.empty() && in_flight_.front().is_finished) drop_oldest();
    }

private:
    // A copy through the bytes [begin, begin + bytes) of the ring.
    struct Piece {
        size_t begin, bytes;
        Event copied{};
        cudaStream_t stream = nullptr;
        void* host = nullptr;  // destination of a copy to the host; null for a copy to the device
        bool is_finished = false;
    };

    // Returns the next bytes of the ring, after the copies that used them have finished.
    Piece take(size_t bytes) {
        if (!memory_) check_cuda(cudaMallocHost(reinterpret_cast<void**>(&memory_), kRingBytes), "pinning host memory");
        const size_t begin = next_ + bytes <= kRingBytes ? next_ : 0, end = begin + bytes;
        const auto overlaps = [&](const Piece& piece) {
            return piece.begin < end && begin < piece.begin + piece.bytes;
        };
        while (std::ranges::any_of(in_flight_, overlaps)) {
            finish(in_flight_.front());
            drop_oldest();
        }
        next_ = end;
        Piece piece{.begin = begin, .bytes = bytes};
        if (events_.empty()) events_.push_back(make_event(cudaEventDisableTiming));
        piece.copied = std::move(events_.back());
        events_.pop_back();
        return piece;
    }

    void finish(Piece& piece) {
        if (std::exchange(piece.is_finished, true)) return;
        check_cuda(cudaEventSynchronize(piece.copied.get()), "waiting for a copy");
        if (piece.host) std::memcpy(piece.host, memory_ + piece.begin, piece.bytes);
    }
    void drop_oldest() {
        events_.push_back(std::move(in_flight_.front().copied));
        in_flight_.erase(in_flight_.begin());
    }

    std::byte* memory_ = nullptr;
    size_t next_ = 0;
    std::vector<Piece> in_flight_;  // the oldest first; a deque would allocate in every step
    std::vector<Event> events_;     // not in use
};

// Never destroyed, because the driver may be unloaded first at process exit.
StagingRing& staging_ring() {
    static StagingRing& ring = *new StagingRing;
    return ring;
}

struct Probe {
    int* out;
};

// Never launched: its attributes show whether the binary has code for this GPU.
__global__ void probe_kernel(Probe op) { *op.out = 1; }

cudaDeviceProp current_device() {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return properties;
}

void require_usable_device_once() { [[maybe_unused]] static const bool is_usable = (require_usable_device(), true); }

}  // namespace

void check_startup(const StartupFacts& facts) {
    auto major = [](int version) { return version / 1000; };
    auto text = [](int version) { return format("%d.%d", version / 1000, version % 1000 / 10); };
    if (facts.driver_version == 0)
        fail(Exit::os, "no NVIDIA driver is loaded: install one, or use build/train_gpt_cpu");
    // Within a major version, an older driver runs programs of a newer toolkit if they contain code for the GPU.
    if (major(facts.driver_version) < major(facts.toolkit_version))
        fail(Exit::os,
             "the NVIDIA driver supports CUDA %s, but this program was built with CUDA %s: install a newer driver, or "
             "build with a CUDA %d toolkit",
             text(facts.driver_version), text(facts.toolkit_version), major(facts.driver_version));
    if (facts.device_count == 0)
        fail(Exit::os,
             "no usable GPU (%s): check the output of nvidia-smi and the variable CUDA_VISIBLE_DEVICES, or use "
             "build/train_gpt_cpu",
             facts.count_error.empty() ? "CUDA finds none" : facts.count_error);
    if (!facts.code_error.empty())
        fail(Exit::os,
             "this program contains no code for %s, compute capability %d.%d (%s): build it for this GPU with make "
             "ARCH=%d%d",
             facts.device_name, facts.major, facts.minor, facts.code_error, facts.major, facts.minor);
}

void select_gpu(int local_rank) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count <= 1) return;
    if (local_rank >= count)
        fail(Exit::config, "local rank %d (from 0) needs its own GPU, but CUDA finds only %d on this host", local_rank,
             count);
    check_cuda(cudaSetDevice(local_rank), "cudaSetDevice");
}

std::string current_bus_id() {
    char bus_id[32] = "";
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetPCIBusId(bus_id, int(sizeof(bus_id)), device), "cudaDeviceGetPCIBusId");
    return bus_id;
}

// The driver and the number of GPUs. Uses no GPU.
static StartupFacts driver_facts() {
    StartupFacts facts;
    if (cudaDriverGetVersion(&facts.driver_version) != cudaSuccess) facts.driver_version = 0;
    check_cuda(cudaRuntimeGetVersion(&facts.toolkit_version), "cudaRuntimeGetVersion");
    const cudaError_t counted = cudaGetDeviceCount(&facts.device_count);
    if (counted != cudaSuccess) {
        facts.device_count = 0;
        facts.count_error = cudaGetErrorString(counted);
    }
    return facts;
}

void require_usable_device() {
    StartupFacts facts = driver_facts();
    if (facts.device_count > 0) {
        const cudaDeviceProp device = current_device();
        facts.device_name = device.name;
        facts.major = device.major, facts.minor = device.minor;
        cudaFuncAttributes attributes{};
        const cudaError_t held = cudaFuncGetAttributes(&attributes, probe_kernel);
        if (held != cudaSuccess) facts.code_error = cudaGetErrorString(held);
    }
    cudaGetLastError();  // so that no later check reports one of these errors
    check_startup(facts);
}

// Also works without a usable GPU, so that plans and versions can be printed on any machine.
DeviceInfo device_info() {
    DeviceInfo info;
    info.build = format("CUDA %d.%d, compute capabilities %s", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
                        CUDA_ARCHITECTURES);
    info.matmul_path = cuda_matmul_path();
    try {
        require_usable_device_once();
    } catch (const Error& error) {
        info.name = error.what();
        return info;
    }
    const cudaDeviceProp device = current_device();
    info.name = device.name;
    info.pci_bus_id = current_bus_id();
    size_t total_bytes = 0;
    check_cuda(cudaMemGetInfo(&info.free_bytes, &total_bytes), "cudaMemGetInfo");
    info.free_bytes -= std::min(info.free_bytes, kMatmulWorkspaceBytes + kMatmulSumsBytes);  // used by GEMMs
    return info;
}

std::string gpu_name() {
    check_startup(driver_facts());
    return current_device().name;
}

static void require_fp8() {
    const cudaDeviceProp gpu = current_device();
    if (gpu.major * 10 + gpu.minor >= 89) return;
    fail(Exit::config,
         "train.precision is \"fp8\", but %s has compute capability %d.%d: operands of 8 bits need 8.9 or later",
         gpu.name, gpu.major, gpu.minor);
}

void configure_device(const DeviceSettings& settings) {
    select_gpu(settings.local_rank);
    require_usable_device_once();
    if (settings.fp8) require_fp8();
    use_arch_kernels(settings.kernels);
    debug_sync() = settings.debug_sync;
    graphs_are_on() = settings.graphs && !settings.debug_sync;
    matmul_settings() = {
        .tf32 = settings.tf32, .gelu_epilogue = settings.gelu_epilogue, .time_gemms = settings.time_gemms};
    use_matmul_choices(settings.gemm_choices);
}

std::string gemm_choices() { return matmul_choices(); }

void* device_alloc(size_t bytes) {
    require(bytes > 0, "device_alloc: 0 bytes");
    require_usable_device_once();
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // so that no later check reports this error
        size_t free_bytes = 0, total_bytes = 0;
        check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
        fail(Exit::os, "not enough GPU memory: %zu bytes are needed, %zu of %zu bytes are free", bytes, free_bytes,
             total_bytes);
    }
    check_cuda(error, "cudaMalloc");
    require(reinterpret_cast<uintptr_t>(memory) % 256 == 0, "device_alloc: cudaMalloc gave %p", memory);
    // Synchronizes, so that work on any stream sees the zeros.
    check_cuda(cudaMemsetAsync(memory, 0, bytes, cuda_stream({})), "clearing GPU memory");
    check_cuda(cudaStreamSynchronize(cuda_stream({})), "clearing GPU memory");
    return memory;
}

// Ignores errors: during stack unwinding every CUDA call may fail, and a second exception would terminate the process
// without reporting the first.
void device_free(void* memory, size_t) { cudaFree(memory); }

void* host_alloc(size_t bytes) {
    require(bytes > 0, "host_alloc: 0 bytes");
    require_usable_device_once();
    void* memory = nullptr;
    if (cudaMallocHost(&memory, bytes) != cudaSuccess) {
        cudaGetLastError();  // so that no later check reports this error
        fail(Exit::os,
             "%zu bytes of host memory cannot be pinned: there is not enough memory, or the system limits it (ulimit "
             "-l)",
             bytes);
    }
    std::memset(memory, 0, bytes);
    return memory;
}

void host_free(void* memory, size_t) { cudaFreeHost(memory); }

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    staging_ring().copy(device, host, bytes, false, cuda_stream(stream));
}

void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    staging_ring().copy(host, device, bytes, true, cuda_stream(stream));
}

void copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream(stream)), "copy on the GPU");
}

void copy_pinned(void* to, const void* from, size_t bytes, Stream stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream(stream)), "copy of pinned memory");
}

void copy_rows_on_device(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes, size_t rows,
                         Stream stream) {
    check_cuda(
        cudaMemcpy2DAsync(to, to_step, from, from_step, bytes, rows, cudaMemcpyDeviceToDevice, cuda_stream(stream)),
        "copy on the GPU");
}

void synchronize(Stream stream) {
    check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "waiting for the GPU");
    staging_ring().deliver(cuda_stream(stream));
}

void wait_for(Stream stream, Stream other) {
    // One event for each stream: a wait is for the last record before it. Never destroyed, like the staging ring.
    static auto& events = *new std::map<cudaStream_t, Event>;
    Event& reached = events[cuda_stream(other)];
    if (!reached) reached = make_event(cudaEventDisableTiming);
    check_cuda(cudaEventRecord(reached.get(), cuda_stream(other)), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(cuda_stream(stream), reached.get(), 0), "cudaStreamWaitEvent");
}

SideStream::SideStream() {
    cudaStream_t made = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    stream_ = {made, [](void* stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }};
}

// device.h for CUDA: memory, copies in stream order, synchronization, and startup checks.
//
// Copies to and from pageable host memory go through a ring of pinned buffers: this thread copies between host memory
// and the buffer, the copy engine between the buffer and the device. So the driver never blocks a stream for its own
// staging. A copy to the device has read the caller's memory when the call returns. A copy to the host has written it
// after synchronize().
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/startup.h"

namespace {

constexpr size_t kPieceBytes = size_t(4) << 20;  // large enough for the copy engine's full rate
constexpr int kPieces = 4;

// A pinned buffer and the last copy through it.
struct Piece {
    std::byte* memory = nullptr;
    Event copied;
    cudaStream_t stream = nullptr;
    bool busy = false;
    void* host = nullptr;  // destination of a copy to the host; null for a copy to the device
    size_t bytes = 0;
};

// Buffers are used in turn, so the next one has been in flight longest. Only the thread that drives the device copies.
class StagingRing {
public:
    void copy(void* to, const void* from, size_t bytes, bool to_host, cudaStream_t stream) {
        for (size_t done = 0; done < bytes; done += kPieceBytes) {
            Piece& piece = take();
            piece.bytes = std::min(kPieceBytes, bytes - done);
            std::byte* const target = static_cast<std::byte*>(to) + done;
            const std::byte* const source = static_cast<const std::byte*>(from) + done;
            if (to_host) {
                check_cuda(cudaMemcpyAsync(piece.memory, source, piece.bytes, cudaMemcpyDeviceToHost, stream),
                           "copy from the GPU");
            } else {
                std::memcpy(piece.memory, source, piece.bytes);
                check_cuda(cudaMemcpyAsync(target, piece.memory, piece.bytes, cudaMemcpyHostToDevice, stream),
                           "copy to the GPU");
            }
            check_cuda(cudaEventRecord(piece.copied.get(), stream), "cudaEventRecord");
            piece.stream = stream, piece.host = to_host ? target : nullptr, piece.busy = true;
        }
    }

    // Completes copies to the host on a synchronized stream, in order, so that a later copy to an address wins.
    void deliver(cudaStream_t stream) {
        for (int i = 0; i < kPieces; i++) {
            Piece& piece = pieces_[size_t(next_ + i) % kPieces];
            if (piece.busy && piece.stream == stream) finish(piece);
        }
    }

private:
    // Returns the next buffer, ready for use.
    Piece& take() {
        Piece& piece = pieces_[size_t(next_)];
        next_ = (next_ + 1) % kPieces;
        if (!piece.memory) {
            check_cuda(cudaMallocHost(reinterpret_cast<void**>(&piece.memory), kPieceBytes), "pinning host memory");
            piece.copied = make_event(cudaEventDisableTiming);
        }
        if (piece.busy) finish(piece);
        return piece;
    }

    void finish(Piece& piece) {
        check_cuda(cudaEventSynchronize(piece.copied.get()), "waiting for a copy");
        if (piece.host) std::memcpy(piece.host, piece.memory, piece.bytes);
        piece.busy = false;
    }

    std::array<Piece, kPieces> pieces_;
    int next_ = 0;
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

std::string current_bus_id() {
    char bus_id[32] = "";
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetPCIBusId(bus_id, int(sizeof(bus_id)), device), "cudaDeviceGetPCIBusId");
    return bus_id;
}

void require_usable_device() {
    StartupFacts facts;
    if (cudaDriverGetVersion(&facts.driver_version) != cudaSuccess) facts.driver_version = 0;
    check_cuda(cudaRuntimeGetVersion(&facts.toolkit_version), "cudaRuntimeGetVersion");
    const cudaError_t counted = cudaGetDeviceCount(&facts.device_count);
    if (counted != cudaSuccess) {
        facts.device_count = 0;
        facts.count_error = cudaGetErrorString(counted);
    }
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

std::string gpu_name() { return current_device().name; }

void configure_device(const DeviceSettings& settings) {
    require_usable_device_once();
    debug_sync() = settings.debug_sync;
    matmul_settings() = {.tf32 = settings.tf32, .gelu_epilogue = settings.gelu_epilogue};
}

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
    check_cuda(cudaMemsetAsync(memory, 0, bytes, nullptr), "clearing GPU memory");
    check_cuda(cudaStreamSynchronize(nullptr), "clearing GPU memory");
    return memory;
}

// Ignores errors: during stack unwinding every CUDA call may fail, and a second exception would terminate the process
// without reporting the first.
void device_free(void* memory, size_t) { cudaFree(memory); }

void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    staging_ring().copy(device, host, bytes, false, cuda_stream(stream));
}

void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    staging_ring().copy(host, device, bytes, true, cuda_stream(stream));
}

void copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream(stream)), "copy on the GPU");
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

// Memory and streams of the device: a CPU or a GPU, depending on the linked implementation.
//
// On the CPU, device memory is host memory and every call is synchronous. On a GPU, calls on one stream run in order
// and the host does not wait. Code above the seam assumes a GPU, so it is correct for both.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// An ordered queue of work. A null handle is the program's own stream. The CPU has only this one and ignores the
// handle.
struct Stream {
    void* handle = nullptr;
};

struct DeviceInfo {
    std::string name;          // "AMD EPYC 9B14, 2 threads" or "NVIDIA H200"
    std::string matmul_path;   // GEMM implementation of each precision: one line for the log
    size_t free_bytes = 0;     // the part that is free now; 0 if the device is unusable
    std::string build;         // how this binary was built for the device: one line for --version
    size_t working_bytes = 0;  // host memory that ops may allocate internally, over all threads
    int threads = 0;           // CPU threads that ops use (0 on a GPU)
    std::string pci_bus_id;    // of a GPU, "0000:65:00.0"; empty for a CPU
};

// Describes the device that this process uses. The result never changes during a run.
DeviceInfo device_info();

// Returns the name of the GPU that this process uses, or would use before open_comm(), without allocating on it; empty
// on a CPU. Fails with Exit::os without a driver or GPU.
std::string gpu_name();

// Kernels for GPUs of one compute capability only. Ops run portable kernels unless configure_device() names these.
//
// Returns the names of those that this process's GPU can run; empty on a CPU, and if no GPU is usable. Allocates
// nothing on the GPU.
std::vector<std::string> arch_kernels();

// Runs the kernel and the portable ones on small random inputs, and returns how the results differ, or an empty text.
// Fails with Exit::usage if arch_kernels() does not list the name. A wrong kernel may also make the GPU unusable for
// this process, or never return.
std::string check_arch_kernel(const std::string& name);

// Settings of the device; the CPU ignores them.
struct DeviceSettings {
    int local_rank = 0;                     // among the ranks of this machine: chooses the GPU if several are visible
    std::vector<std::string> kernels = {};  // some of arch_kernels(), to be used
    bool tf32 = false;                      // fp32 products may round their operands to TF32
    bool gelu_epilogue = false;             // the library's GEMM may apply gelu_new to its sums before they are rounded
    bool fp8 = false;                       // GEMMs will have operands of 8 bits
    std::string gemm_choices = {};          // a text of gemm_choices(), or empty
    bool time_gemms = false;  // make choices: time a GEMM at its first use, which spoils sums of gradients
    bool graphs = true;       // replay recordings
    bool debug_sync = false;  // wait after each kernel, so that an error names the failing kernel; no recordings
};

// Call once, before any allocation. Fails with Exit::os if the device cannot be used, with Exit::config if the choices
// are of another GPU or library, or if the GPU does not multiply operands of 8 bits.
void configure_device(const DeviceSettings& settings);

// Returns the library's algorithms that were chosen for GEMMs so far, as text with one line per GEMM. Empty on a CPU.
std::string gemm_choices();

// Returns `bytes` of zeroed device memory, aligned to 256 bytes, in huge pages if available. Touches every page, so
// that running out of memory fails here and not later. Fails with Exit::os and the number of bytes if there is not
// enough memory.
void* device_alloc(size_t bytes);
void device_free(void* memory, size_t bytes);

// Returns `bytes` of zeroed, pinned host memory, aligned to 256 bytes. Ops can read and write it, but slowly. Fails
// with Exit::os and the number of bytes if there is not enough memory, or if the system does not let a process pin so
// much.
void* host_alloc(size_t bytes);
void host_free(void* memory, size_t bytes);

// Copies in stream order. Device memory may be memory of host_alloc() here. copy_to_device() has read the host memory
// when it returns, so a loop may refill it without waiting. The data of copy_to_host() is valid after synchronize().
void copy_to_device(void* device, const void* host, size_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, size_t bytes, Stream stream);

// Copies within device memory; the ranges must not overlap. Used to measure the device's copy bandwidth.
void copy_on_device(void* to, const void* from, size_t bytes, Stream stream);

// Copies between device memory and memory of host_alloc(), which the host must not access before synchronize().
void copy_pinned(void* to, const void* from, size_t bytes, Stream stream);

// Copies `rows` pieces of `bytes` each. A step is the number of bytes from one piece to the next. Leaves the bytes
// between the pieces of `to`.
void copy_rows_on_device(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes, size_t rows,
                         Stream stream);

// Waits until all work on the stream has finished.
void synchronize(Stream stream);

// Work that is queued on `stream` after this call waits for the work that is on `other` now. The host does not wait.
void wait_for(Stream stream, Stream other);

// Another stream, whose work runs concurrently with the program's own stream.
class SideStream {
public:
    SideStream();
    Stream stream() const { return {stream_.get()}; }

private:
    std::shared_ptr<void> stream_;  // shared by copies
};

// Work that is queued many times with the same arguments.
class Recording {
public:
    // Queues the work of `queue`, which may only queue ops and copies within device memory on the stream, with
    // arguments that are the same in every call. The first call runs it, so that the ops allocate what they need. A GPU
    // records the second call and replays the recording later, without calling `queue`. The CPU always calls it.
    void run(Stream stream, const std::function<void()>& queue);

private:
    struct Graph;
    std::shared_ptr<Graph> graph_;  // type defined by the implementation; null before the first call
};

// Measures the time of a stream between start() and stop() with the device's clock: from the end of all work queued
// before start() to the end of all work queued before stop(). The host does not wait.
class Stopwatch {
public:
    Stopwatch();
    void start(Stream stream);
    void stop(Stream stream);
    // Returns the milliseconds of all laps that finished since the last call, up to the stream's last synchronize().
    double take_ms();

private:
    struct Laps;
    std::shared_ptr<Laps> laps_;  // type defined by the implementation; shared by copies
};

// Records when streams reach marks, with the device's clock converted to the host's steady clock.
class Timeline {
public:
    Timeline();
    // Waits for the stream and synchronizes the two clocks for the marks that follow, so that drift does not accumulate
    // across calls. Required before the first mark.
    void anchor(Stream stream);
    // Marks the end of all work now queued on the stream. Returns the mark's number, from 0.
    size_t mark(Stream stream);
    // Waits for all marks, returns their times in milliseconds of std::chrono::steady_clock and clears them: the next
    // mark is number 0 again.
    std::vector<double> take_ms();

private:
    struct Marks;
    std::shared_ptr<Marks> marks_;  // type defined by the implementation
};

// Owns memory.
template <void* (*kAllocate)(size_t), void (*kFree)(void*, size_t)> class Buffer {
public:
    explicit Buffer(size_t bytes = 0) : memory_(bytes ? kAllocate(bytes) : nullptr, Free{bytes}) {}
    void* data() const { return memory_.get(); }
    size_t bytes() const { return memory_.get_deleter().bytes; }

private:
    struct Free {
        size_t bytes;
        void operator()(void* memory) const { kFree(memory, bytes); }
    };
    std::unique_ptr<void, Free> memory_;
};
using DeviceBuffer = Buffer<device_alloc, device_free>;
using HostBuffer = Buffer<host_alloc, host_free>;

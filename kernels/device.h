// Memory and order of execution on the device that the linked implementation drives.
//
// On the CPU the device's memory is the host's and every call has finished when it returns; on a GPU calls on one
// stream run in order and the host continues at once. Code above the seam is written for a GPU and so is correct for
// both.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// An ordered queue of work. The CPU implementation has one and ignores the handle.
struct Stream {
    void* handle = nullptr;
};

struct DeviceInfo {
    std::string name;          // "AMD EPYC 9B14, 2 threads" or "NVIDIA H200"
    std::string matmul_path;   // what carries out matrix products, by precision: one line for the log
    size_t memory_bytes = 0;   // installed, of the whole device
    size_t free_bytes = 0;     // of that, what could be allocated now; 0 where the device cannot be used
    std::string build;         // what this binary holds for the device: one line for --version
    size_t working_bytes = 0;  // host memory that ops may take for themselves, all threads together
    int threads = 0;           // CPU threads that ops use (0 on a GPU)
    std::string pci_bus_id;    // a GPU's place, "0000:65:00.0"; empty for a CPU
};

// Facts about the device that this process uses. Never changes during a run.
DeviceInfo device_info();

// Settings of the device; the CPU ignores them.
struct DeviceSettings {
    int local_rank = 0;            // among the ranks of this machine: which of its GPUs this process uses
    bool tf32 = false;             // fp32 products may round their operands to TF32
    bool debug_sync = false;       // wait after each kernel, so that an error names the kernel that made it
    std::string matmul_choices{};  // file that keeps the fastest algorithm of each product, so that every run on this
                                   // machine uses the same; empty: no timing, the library's first proposal
    std::string known_choices{};   // device_choices() of an earlier process of this run: override that file's
};

// To be called once, before anything is allocated. Fails with Exit::os where the device cannot be used at all.
void configure_device(const DeviceSettings& settings);

// This process's autotuning choices, which affect the bits of results: text of a few kilobytes, to be kept where a run
// must continue bit for bit; empty if nothing was timed. Valid on a device of the same name only; others ignore it, and
// device_info().matmul_path says so.
std::string device_choices();

// `bytes` of device memory, 256-byte aligned, huge pages where the system has them, every byte zero and touched, so
// that running out of memory fails here and not later. Fails with Exit::os and the number of bytes when there is not
// enough.
void* device_alloc(size_t bytes);
void device_free(void* memory, size_t bytes);

// Copies in stream order. copy_to_device() has read the host's memory when it returns, so a loop may fill it again
// without waiting; copy_to_host() has written it after synchronize().
void copy_to_device(void* device, const void* host, size_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, size_t bytes, Stream stream);

// The same within device memory, without overlap; used to measure a device's copy bandwidth.
void copy_on_device(void* to, const void* from, size_t bytes, Stream stream);

// `rows` pieces of `bytes` each, which lie side by side at `to` and from_step bytes apart at `from`.
void gather_on_device(void* to, const void* from, size_t from_step, size_t bytes, size_t rows, Stream stream);

// Waits until everything on the stream has finished.
void synchronize(Stream stream);

// Measures a stream's time between start() and stop(), by the device's clock: from the end of all work queued before
// start() to the end of all work queued before stop(). The host does not wait.
class Stopwatch {
public:
    Stopwatch();
    void start(Stream stream);
    void stop(Stream stream);
    // Milliseconds of all laps that have finished since the last call: those before the stream's last synchronize().
    double take_ms();

private:
    struct Laps;
    std::shared_ptr<Laps> laps_;  // of the implementation's type; copies share it
};

// Tells when streams came to marks: by the device's clock, on the axis of the host's steady clock.
class Timeline {
public:
    Timeline();
    // Waits for the stream, and measures the marks that follow from now on, so that the clocks drift apart only from
    // one call to the next. Required before the first mark.
    void anchor(Stream stream);
    // Marks the moment at which all work that the stream holds now has finished. Returns the mark's number, from 0.
    size_t mark(Stream stream);
    // The moments of all marks, in milliseconds of std::chrono::steady_clock, and forgets them: the next is number 0
    // again. Waits for them.
    std::vector<double> take_ms();

private:
    struct Marks;
    std::shared_ptr<Marks> marks_;  // of the implementation's type
};

// Owns device memory.
class DeviceBuffer {
public:
    explicit DeviceBuffer(size_t bytes = 0) : memory_(bytes ? device_alloc(bytes) : nullptr, Free{bytes}) {}
    void* data() const { return memory_.get(); }
    size_t bytes() const { return memory_.get_deleter().bytes; }

private:
    struct Free {
        size_t bytes;
        void operator()(void* memory) const { device_free(memory, bytes); }
    };
    std::unique_ptr<void, Free> memory_;
};

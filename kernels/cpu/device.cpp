// The CPU as a device: device memory is host memory, and the only stream is always idle.
#include "kernels/device.h"

#include <omp.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "kernels/base/check.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/trace.h"

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t(1) << 21;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Returns the text after `key` and a colon in a file like /proc/meminfo, or an empty string without the key.
std::string proc_value(const char* path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        const size_t colon = line.find(':');
        if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
        const size_t begin = line.find_first_not_of(" \t", colon + 1);
        return begin == std::string::npos ? std::string() : line.substr(begin);
    }
    return {};
}

size_t meminfo_bytes(const std::string& key) {
    const std::string kibibytes = proc_value("/proc/meminfo", key);
    return kibibytes.empty() ? 0 : std::stoull(kibibytes) * 1024;
}

// Linux overcommits memory and kills the process when it touches the pages, so check first.
void require_available(size_t bytes) {
    const size_t available = meminfo_bytes("MemAvailable") + meminfo_bytes("SwapFree");
    if (available > 0 && bytes > available)
        fail(Exit::os, "not enough memory: %zu bytes are needed, %zu bytes are available", bytes, available);
}

// Maps anonymous memory aligned to a huge page, so that all of it can use huge pages.
std::byte* map_aligned(size_t bytes) {
    const size_t mapped_bytes = bytes + kHugePageBytes;
    void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        fail(Exit::os, "not enough memory: mmap of %zu bytes failed: %s", bytes, std::strerror(errno));
    std::byte* begin = static_cast<std::byte*>(mapped);
    const size_t before =
        round_up(reinterpret_cast<uintptr_t>(begin), kHugePageBytes) - reinterpret_cast<uintptr_t>(begin);
    const size_t after = mapped_bytes - before - bytes;
    if (before) munmap(begin, before);
    if (after) munmap(begin + before + bytes, after);
    return begin + before;
}

// Touches each page on the thread that will use it.
void touch(std::byte* memory, size_t bytes) {
    parallel_for(bytes / kPageBytes,
                 [&](size_t page) { *const_cast<volatile std::byte*>(memory + page * kPageBytes) = std::byte(0); });
}

}  // namespace

// Upper bound on thread_memory() plus other memory of a thread.
static constexpr size_t kThreadBytes = size_t(2) << 20;

DeviceInfo device_info() {
    DeviceInfo info;
    info.threads = omp_get_max_threads();
    const std::string model = proc_value("/proc/cpuinfo", "model name");
    info.name =
        format("%s, %d thread%s", model.empty() ? "CPU" : model.c_str(), info.threads, info.threads == 1 ? "" : "s");
    info.matmul_path = matmul_path();
    info.free_bytes = meminfo_bytes("MemAvailable") + meminfo_bytes("SwapFree");
    info.build = format("CPU, g++ %s, vectors of %d floats", __VERSION__, kLanes);
    info.working_bytes = size_t(info.threads) * kThreadBytes;
    return info;
}

std::string gpu_name() { return ""; }
std::string gemm_choices() { return ""; }
std::vector<std::string> arch_kernels() { return {}; }
std::string check_arch_kernel(const std::string& name) { fail(Exit::usage, "a CPU has no kernel %s for GPUs", name); }

void configure_device(const DeviceSettings&) {}

void Recording::run(Stream, const std::function<void()>& queue) { queue(); }

void* device_alloc(size_t bytes) {
    require(bytes > 0, "device_alloc: 0 bytes");
    require_available(bytes);
    const size_t mapped_bytes = round_up(bytes, kPageBytes);
    std::byte* memory = map_aligned(mapped_bytes);
    madvise(memory, mapped_bytes, MADV_HUGEPAGE);  // only a hint: the program also runs without huge pages, more slowly
    touch(memory, mapped_bytes);
    return memory;
}

void device_free(void* memory, size_t bytes) { munmap(memory, round_up(bytes, kPageBytes)); }

void* host_alloc(size_t bytes) { return device_alloc(bytes); }
void host_free(void* memory, size_t bytes) { device_free(memory, bytes); }

void copy_to_device(void* device, const void* host, size_t bytes, Stream) { std::memcpy(device, host, bytes); }

void copy_to_host(void* host, const void* device, size_t bytes, Stream) { std::memcpy(host, device, bytes); }

void copy_on_device(void* to, const void* from, size_t bytes, Stream) {
    constexpr size_t kBlockBytes = size_t(1) << 20;
    parallel_blocks(bytes, kBlockBytes, [&](size_t begin, size_t end) {
        std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
    });
}

void copy_pinned(void* to, const void* from, size_t bytes, Stream stream) { copy_on_device(to, from, bytes, stream); }

void copy_rows_on_device(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes, size_t rows,
                         Stream) {
    parallel_for(rows, [&](size_t row) {
        std::memcpy(static_cast<std::byte*>(to) + row * to_step, static_cast<const std::byte*>(from) + row * from_step,
                    bytes);
    });
}

void synchronize(Stream) {}
void wait_for(Stream, Stream) {}
SideStream::SideStream() = default;

// Every call is synchronous, so the host's clock is the device's.
struct Stopwatch::Laps {
    double started_ms = 0, ms = 0;
};

Stopwatch::Stopwatch() : laps_(std::make_shared<Laps>()) {}

void Stopwatch::start(Stream) { laps_->started_ms = steady_ms(); }

void Stopwatch::stop(Stream) { laps_->ms += steady_ms() - laps_->started_ms; }

double Stopwatch::take_ms() { return std::exchange(laps_->ms, 0.0); }

struct Timeline::Marks {
    std::vector<double> ms;
};

Timeline::Timeline() : marks_(std::make_shared<Marks>()) {}

void Timeline::anchor(Stream) {}

size_t Timeline::mark(Stream) {
    marks_->ms.push_back(steady_ms());
    return marks_->ms.size() - 1;
}

std::vector<double> Timeline::take_ms() { return std::exchange(marks_->ms, {}); }

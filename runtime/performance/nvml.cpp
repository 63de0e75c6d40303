#include <dlfcn.h>

#include <ranges>

#include "kernels/base/check.h"
#include "runtime/io/joined.h"
#include "runtime/io/process.h"
#include "runtime/performance/performance.h"

namespace {

// Values of the driver's nvml.h, whose types are int, unsigned, unsigned long long and pointers.
constexpr int kSuccess = 0, kSmClock = 1, kDieSensor = 0;

// Bits and names. Idling, user settings and group clocks do not count as throttling.
constexpr std::pair<unsigned long long, const char*> kThrottleReasons[] = {
    {0x4, "sw_power_cap"}, {0x8, "hw_slowdown"}, {0x20, "sw_thermal"}, {0x40, "hw_thermal"}, {0x80, "hw_power_brake"}};

template <class Function> Function* find(void* library, const char* name) {
    return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

}  // namespace

struct GpuSensors::Functions {
    void* library;
    int (*start)() = find<int()>(library, "nvmlInit_v2");
    int (*stop)() = find<int()>(library, "nvmlShutdown");
    const char* (*error)(int) = find<const char*(int)>(library, "nvmlErrorString");
    int (*gpu)(const char*, void**) = find<int(const char*, void**)>(library, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*power)(void*, unsigned*) = find<int(void*, unsigned*)>(library, "nvmlDeviceGetPowerUsage");
    int (*clock)(void*, int, unsigned*) = find<int(void*, int, unsigned*)>(library, "nvmlDeviceGetClockInfo");
    int (*temperature)(void*, int, unsigned*) = find<int(void*, int, unsigned*)>(library, "nvmlDeviceGetTemperature");
    // Drivers before 535 have only the second name.
    int (*reasons)(void*, unsigned long long*) =
        find<int(void*, unsigned long long*)>(library, "nvmlDeviceGetCurrentClocksEventReasons");
    int (*old_reasons)(void*, unsigned long long*) =
        find<int(void*, unsigned long long*)>(library, "nvmlDeviceGetCurrentClocksThrottleReasons");

    std::string error_text(int code) const { return error ? error(code) : format("code %d", code); }
};

std::string GpuSensors::open(const std::string& pci_bus_id, const std::string& library) {
    if (pci_bus_id.empty()) return "";
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
    if (!handle) return format("cannot load NVML: %s", dlerror());
    const auto close = [](const Functions* functions) {
        if (functions->stop) functions->stop();
        delete functions;
    };
    const Functions functions{handle};
    if (!functions.start || !functions.gpu) return library + " lacks NVML functions";
    if (const int code = functions.start(); code != kSuccess)
        return "cannot initialize NVML: " + functions.error_text(code);
    nvml_ = {new Functions(functions), close};
    const int code = nvml_->gpu(pci_bus_id.c_str(), &gpu_);
    if (code == kSuccess) return "";
    gpu_ = nullptr;
    return format("NVML cannot find the GPU %s: %s", pci_bus_id.c_str(), nvml_->error_text(code).c_str());
}

const GpuReading& GpuSensors::read() {
    constexpr double kIntervalMs = 1000;
    const double now = now_ms();
    if (!gpu_ || now - read_ms_ < kIntervalMs) return reading_;
    read_ms_ = now;
    reading_ = {};
    unsigned value = 0;
    if (nvml_->power && nvml_->power(gpu_, &value) == kSuccess) reading_.power_w = value * 1e-3;
    if (nvml_->temperature && nvml_->temperature(gpu_, kDieSensor, &value) == kSuccess) reading_.temperature_c = value;
    if (nvml_->clock && nvml_->clock(gpu_, kSmClock, &value) == kSuccess) reading_.sm_clock_mhz = value;
    reading_.throttle = throttle();
    return reading_;
}

std::string GpuSensors::throttle() const {
    const auto read_reasons = nvml_->reasons ? nvml_->reasons : nvml_->old_reasons;
    unsigned long long bits = 0;
    if (!read_reasons || read_reasons(gpu_, &bits) != kSuccess) return {};
    const auto is_set = [bits](const auto& reason) { return (bits & reason.first) != 0; };
    return joined(kThrottleReasons | std::views::filter(is_set) | std::views::values);
}

#include "runtime/performance/nvml.h"

#include <dlfcn.h>

#include "kernels/base/check.h"

namespace {

// Values of the driver's nvml.h, whose types are int, unsigned, unsigned long long and pointers.
constexpr int kSuccess = 0, kSmClock = 1, kDieSensor = 0;

struct ThrottleReason {
    unsigned long long bit;
    const char* name;
};
// Idling, user settings and group clocks do not count as throttling.
constexpr ThrottleReason kThrottleReasons[] = {
    {0x4, "sw_power_cap"}, {0x8, "hw_slowdown"}, {0x20, "sw_thermal"}, {0x40, "hw_thermal"}, {0x80, "hw_power_brake"}};

template <class Function> Function* find(void* library, const char* name) {
    return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

template <class Number> std::optional<double> value_of(int (*function)(void*, Number*), void* gpu, double unit) {
    Number value = 0;
    if (!gpu || !function || function(gpu, &value) != kSuccess) return std::nullopt;
    return double(value) * unit;
}

}  // namespace

struct GpuSensors::Functions {
    void* library;
    int (*start)() = find<int()>(library, "nvmlInit_v2");
    int (*stop)() = find<int()>(library, "nvmlShutdown");
    const char* (*error)(int) = find<const char*(int)>(library, "nvmlErrorString");
    int (*gpu)(const char*, void**) = find<int(const char*, void**)>(library, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*energy)(void*,
                  unsigned long long*) = find<int(void*, unsigned long long*)>(library,
                                                                               "nvmlDeviceGetTotalEnergyConsumption");
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

GpuSensors::GpuSensors(const std::string& library, const std::string& pci_bus_id) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
    if (!handle) {
        problem_ = format("cannot load NVML: %s", dlerror());
        return;
    }
    const auto close = [](const Functions* functions) {
        if (functions->stop) functions->stop();
        delete functions;
    };
    const Functions functions{handle};
    if (!functions.start || !functions.gpu) {
        problem_ = library + " lacks NVML functions";
        return;
    }
    if (const int code = functions.start(); code != kSuccess) {
        problem_ = "cannot initialize NVML: " + functions.error_text(code);
        return;
    }
    nvml_ = {new Functions(functions), close};
    if (const int code = nvml_->gpu(pci_bus_id.c_str(), &gpu_); code != kSuccess) {
        gpu_ = nullptr;
        problem_ = format("NVML cannot find the GPU %s: %s", pci_bus_id.c_str(), nvml_->error_text(code).c_str());
    } else if (!energy_j() && !power_w()) {
        problem_ = format("NVML reports neither energy nor power for the GPU %s", pci_bus_id.c_str());
    }
}

std::optional<double> GpuSensors::energy_j() const {
    return nvml_ ? value_of(nvml_->energy, gpu_, 1e-3) : std::nullopt;
}

std::optional<double> GpuSensors::power_w() const { return nvml_ ? value_of(nvml_->power, gpu_, 1e-3) : std::nullopt; }

std::optional<double> GpuSensors::sm_clock_mhz() const {
    unsigned mhz = 0;
    if (!gpu_ || !nvml_->clock || nvml_->clock(gpu_, kSmClock, &mhz) != kSuccess) return std::nullopt;
    return mhz;
}

std::optional<double> GpuSensors::temperature_c() const {
    unsigned degrees = 0;
    if (!gpu_ || !nvml_->temperature || nvml_->temperature(gpu_, kDieSensor, &degrees) != kSuccess) return std::nullopt;
    return degrees;
}

std::string GpuSensors::throttle() const {
    if (!gpu_) return {};
    const auto bits = value_of(nvml_->reasons ? nvml_->reasons : nvml_->old_reasons, gpu_, 1);
    std::string names;
    for (const ThrottleReason& reason : kThrottleReasons)
        if (bits && static_cast<unsigned long long>(*bits) & reason.bit)
            names += (names.empty() ? "" : ", ") + std::string(reason.name);
    return names;
}

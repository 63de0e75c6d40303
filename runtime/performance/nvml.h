// NVML, the library of NVIDIA's driver that reads a GPU's sensors. It is loaded on first use and declared here, so
// neither its header nor the driver is needed to build, or to train without it.
#pragma once

#include <memory>
#include <optional>
#include <string>

class GpuSensors {
public:
    // `library` is the file's name or path; `pci_bus_id` identifies the GPU: "0000:65:00.0". problem() reports whether
    // the sensors can be read.
    GpuSensors(const std::string& library, const std::string& pci_bus_id);

    // Returns why no sensor can be read, as part of a sentence; empty if at least one can.
    const std::string& problem() const { return problem_; }

    // These return nullopt if the GPU or its driver does not provide the value.
    std::optional<double> energy_j() const;  // since the driver was loaded
    std::optional<double> power_w() const;
    std::optional<double> sm_clock_mhz() const;
    std::optional<double> temperature_c() const;
    // Returns the thermal and power limits that throttle the clocks: "sw_power_cap", "hw_thermal, hw_slowdown"; empty
    // if there are none.
    std::string throttle() const;

private:
    struct Functions;
    std::shared_ptr<const Functions> nvml_;  // null: the library cannot be used
    void* gpu_ = nullptr;
    std::string problem_;
};

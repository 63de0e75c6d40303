// NVML, the library of NVIDIA's driver that reads a GPU's sensors. Loaded when it is asked for, and declared here, so
// that neither its header nor the driver is needed to build, or to train without it.
#pragma once

#include <memory>
#include <optional>
#include <string>

class GpuSensors {
public:
    // `library`: name or path of the file; `pci_bus_id`: the GPU's place, "0000:65:00.0". problem() says if there is
    // nothing to read.
    GpuSensors(const std::string& library, const std::string& pci_bus_id);

    // Why nothing can be read, in a sentence's part; empty if something can.
    const std::string& problem() const { return problem_; }

    // Nothing where the GPU, the driver or its state does not tell.
    std::optional<double> energy_j() const;  // since the driver was loaded
    std::optional<double> power_w() const;
    std::optional<double> sm_clock_mhz() const;
    std::optional<double> temperature_c() const;
    // What holds the clocks down, of heat and power: "sw_power_cap", "hw_thermal, hw_slowdown"; empty: nothing.
    std::string throttle() const;

private:
    struct Functions;
    std::shared_ptr<const Functions> nvml_;  // null: the library cannot be used
    void* gpu_ = nullptr;
    std::string problem_;
};

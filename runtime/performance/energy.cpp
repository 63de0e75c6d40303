#include <chrono>
#include <cstring>
#include <fstream>

#include "runtime/io/files.h"
#include "runtime/io/process.h"
#include "runtime/performance/nvml.h"
#include "runtime/performance/performance.h"

namespace {

// The RAPL counters of this machine's CPUs, and of their memory if it has its own, as Linux provides them
// (Documentation/power/powercap/powercap.rst): microjoules that wrap to 0 after max_energy_range_uj.
class CpuCounters {
public:
    explicit CpuCounters(const std::string& dir) {
        if (dir.empty()) return;
        problem_ = "no RAPL counters in " + dir;
        if (!directory_exists(dir)) return;
        for (const std::string& entry : list_directory(dir)) {
            // "intel-rapl:0" and its parts, "intel-rapl:0:1"; intel-rapl-mmio:* duplicates the same counters.
            if (!entry.starts_with("intel-rapl:")) continue;
            const std::string path = dir + "/" + entry;
            std::string name;
            std::ifstream(path + "/name") >> name;
            if (!name.starts_with("package") && name != "dram") continue;  // package includes "core"; "psys" covers all
            Counter counter{path + "/energy_uj"};
            std::ifstream(path + "/max_energy_range_uj") >> counter.range;
            errno = 0;
            if (!read(counter)) {
                problem_ = format("cannot read the RAPL counters (%s: %s)", counter.path.c_str(),
                                  errno ? std::strerror(errno) : "not a number");
                counters_.clear();
                return;
            }
            counters_.push_back(counter);
            names_ += (names_.empty() ? "" : ", ") + name;
        }
    }

    // Returns the joules since the last call, over all readable counters.
    double take_j() {
        double total = 0;
        for (Counter& counter : counters_) {
            const double before = counter.value;
            if (!read(counter)) continue;
            total += counter.value - before + (counter.value < before ? counter.range : 0);
        }
        return total * 1e-6;
    }

    bool is_readable() const { return !counters_.empty(); }
    const std::string& names() const { return names_; }
    const std::string& problem() const { return problem_; }

private:
    struct Counter {
        std::string path;
        double range = 0, value = 0;
    };
    static bool read(Counter& counter) {
        double value = 0;
        if (!(std::ifstream(counter.path) >> value)) return false;
        counter.value = value;
        return true;
    }

    std::vector<Counter> counters_;
    std::string names_, problem_;
};

}  // namespace

struct EnergyMeter::State {
    explicit State(const EnergySources& sources) : cpu(sources.rapl) {
        if (!sources.gpu.empty()) gpu.emplace(sources.nvml, sources.gpu);
        if (gpu) gpu_energy_j = gpu->energy_j(), gpu_power_w = gpu->power_w();
    }

    bool reads_gpu() const { return gpu && gpu->problem().empty(); }

    // Returns the joules since the last call. If the GPU has no energy counter (before Volta), integrates its power.
    std::optional<double> take_gpu_j(double seconds) {
        const std::optional<double> before = gpu_energy_j, power_before = gpu_power_w;
        if (before) {
            const std::optional<double> now = gpu->energy_j();
            if (now) gpu_energy_j = now;
            return now && *now >= *before ? std::optional(*now - *before) : std::nullopt;
        }
        gpu_power_w = gpu->power_w();
        if (!gpu_power_w || !power_before) return std::nullopt;
        return 0.5 * (*gpu_power_w + *power_before) * seconds;
    }

    std::optional<GpuSensors> gpu;
    CpuCounters cpu;
    std::optional<double> gpu_energy_j, gpu_power_w;  // when last read
    double read_ms = now_ms();                        // the counters
    double sensed_ms = -1e9;                          // temperature, clock and reasons
    EnergyReading sensed;                             // the last sensor values
};

EnergyMeter::EnergyMeter(const EnergySources& sources) : state_(std::make_unique<State>(sources)) {}
EnergyMeter::EnergyMeter(EnergyMeter&&) noexcept = default;
EnergyMeter::~EnergyMeter() = default;

EnergyReading EnergyMeter::read() {
    constexpr double kSensorMs = 1000;  // between readings of slowly changing sensors
    State& s = *state_;
    const double now = now_ms(), seconds = (now - std::exchange(s.read_ms, now)) / 1000;
    if (s.reads_gpu() && now - s.sensed_ms >= kSensorMs) {
        s.sensed_ms = now;
        s.sensed.gpu_temperature_c = s.gpu->temperature_c();
        s.sensed.sm_clock_mhz = s.gpu->sm_clock_mhz();
        s.sensed.throttle = s.gpu->throttle();
    }
    EnergyReading reading = s.sensed;
    reading.seconds = seconds;
    if (s.reads_gpu()) reading.joules = s.take_gpu_j(seconds);
    if (s.cpu.is_readable()) reading.joules = reading.joules.value_or(0) + s.cpu.take_j();
    return reading;
}

std::string EnergyMeter::description() const {
    const State& s = *state_;
    std::string measured, missing;
    auto add = [](std::string& text, const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
    if (s.reads_gpu()) add(measured, "GPU by NVML");
    if (s.cpu.is_readable()) add(measured, "CPU by RAPL (" + s.cpu.names() + ")");
    if (s.gpu && !s.reads_gpu()) add(missing, s.gpu->problem());
    if (!s.cpu.is_readable() && !s.cpu.problem().empty()) add(missing, s.cpu.problem());
    if (measured.empty()) return "not measured: " + missing;
    return measured + (missing.empty() ? "" : "; missing: " + missing);
}

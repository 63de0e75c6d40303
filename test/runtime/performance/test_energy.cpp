// The energy meter with files like Linux's RAPL files. NVML: test/program/test_energy.py.
#include <fstream>

#include "runtime/io/files.h"
#include "runtime/performance/performance.h"
#include "test/support/catch.h"
#include "test/support/temporary_directory.h"

namespace {

class FakeRapl {
public:
    FakeRapl() {
        add("intel-rapl:0", "package-0", 1000e6, 5e6);
        add("intel-rapl:0:0", "core", 1000e6, 1e6);
        add("intel-rapl:0:1", "dram", 500e6, 2e6);
        add("intel-rapl:1", "package-1", 1000e6, 999e6);
        add("intel-rapl:2", "psys", 1000e6, 7e6);
        add("intel-rapl-mmio:0", "package-0", 1000e6, 5e6);
        make_directories(path("intel-rapl"));
    }
    std::string path(const std::string& name) const { return directory_.path() + "/" + name; }
    std::string dir() const { return directory_.path(); }
    void set(const std::string& entry, double uj) { write(path(entry) + "/energy_uj", format("%.0f\n", uj)); }
    void add(const std::string& entry, const std::string& name, double range, double uj) {
        make_directories(path(entry));
        write(path(entry) + "/name", name + "\n");
        write(path(entry) + "/max_energy_range_uj", format("%.0f\n", range));
        set(entry, uj);
    }

private:
    static void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
    TemporaryDirectory directory_;
};

EnergyMeter meter_of(const std::string& dir) { return EnergyMeter({.gpu = "", .rapl = dir}); }

}  // namespace

TEST_CASE("joules of packages and memory since the last reading, across a counter's overflow", "[energy]") {
    FakeRapl rapl;
    EnergyMeter meter = meter_of(rapl.dir());
    CHECK(meter.description() == "CPU by RAPL (package-0, dram, package-1)");
    CHECK(meter.read().joules == 0.0);
    rapl.set("intel-rapl:0", 8e6);         // + 3
    rapl.set("intel-rapl:0:0", 900e6);     // in package-0
    rapl.set("intel-rapl:0:1", 2.5e6);     // + 0.5
    rapl.set("intel-rapl:1", 4e6);         // + 5, across the overflow at 1000 J
    rapl.set("intel-rapl:2", 500e6);       // everything again
    rapl.set("intel-rapl-mmio:0", 500e6);  // package-0 again
    const EnergyReading reading = meter.read();
    REQUIRE(reading.joules);
    CHECK(*reading.joules == Approx(8.5));
    CHECK(reading.seconds > 0);
    CHECK(reading.seconds < 60);
    CHECK(!reading.gpu_temperature_c);
    CHECK(reading.throttle.empty());
    CHECK(meter.read().joules == 0.0);
    rapl.set("intel-rapl:0:1", 1e6);  // + 498.5, across the overflow at 500 J
    CHECK(*meter.read().joules == Approx(498.5));
}

TEST_CASE("counters that cannot be read", "[energy]") {
    FakeRapl rapl;
    CHECK(meter_of(rapl.path("nothing")).description() == "not measured: no RAPL counters in " + rapl.path("nothing"));
    CHECK(meter_of(rapl.path("intel-rapl")).description() ==
          "not measured: no RAPL counters in " + rapl.path("intel-rapl"));
    CHECK(meter_of("").description() == "not measured: ");
    CHECK(!meter_of("").read().joules);

    remove_tree(rapl.path("intel-rapl:1/energy_uj"));
    make_directories(rapl.path("intel-rapl:1/energy_uj"));  // because root can read files without read permission
    EnergyMeter meter = meter_of(rapl.dir());
    const std::string path = rapl.path("intel-rapl:1/energy_uj");
    CHECK(meter.description() == "not measured: cannot read the RAPL counters (" + path + ": Is a directory)");
    CHECK(!meter.read().joules);

    EnergyMeter gpu({.gpu = "0000:01:00.0", .rapl = "", .nvml = rapl.path("libnvidia-ml.so.1")});
    CHECK(gpu.description().starts_with("not measured: cannot load NVML: " + rapl.path("libnvidia-ml.so.1") +
                                        ": cannot open shared object file"));
    CHECK(!gpu.read().joules);
}

TEST_CASE("a counter that disappears stops counting", "[energy]") {
    FakeRapl rapl;
    EnergyMeter meter = meter_of(rapl.dir());
    remove_tree(rapl.path("intel-rapl:1/energy_uj"));
    rapl.set("intel-rapl:0", 6e6);
    CHECK(*meter.read().joules == Approx(1.0));
}

// A GPU's sensors without NVML. With a stand-in for the library: test/program/test_gpu_sensors.py.
#include "runtime/performance/performance.h"
#include "test/support/catch.h"
#include "test/support/temporary_directory.h"

TEST_CASE("sensors that cannot be read", "[sensors]") {
    TemporaryDirectory directory;
    const std::string library = directory / "libnvidia-ml.so.1";
    GpuSensors none("", library), missing("0000:01:00.0", library);
    CHECK(none.problem().empty());
    CHECK(missing.problem().starts_with("cannot load NVML: " + library + ": cannot open shared object file"));
    for (GpuSensors* sensors : {&none, &missing}) {
        const GpuReading& reading = sensors->read();
        CHECK_FALSE(reading.power_w);
        CHECK_FALSE(reading.temperature_c);
        CHECK_FALSE(reading.sm_clock_mhz);
        CHECK(reading.throttle.empty());
    }
}

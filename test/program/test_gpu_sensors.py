"""The sensors of GPUs, read from a stand-in for NVML that the trainer loads like the driver's library: records, sums
over ranks, and the messages if the library or a function is missing. Uses simulated GPUs."""
import subprocess

from test_simulated import SIMULATED
from test_simulated_ranks import FOUR
from trainer import ENVIRONMENT, TrainerTest

START = """
extern "C" {
int nvmlInit_v2() { return %d; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Not Found"; }
"""
GPU = """
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** gpu) {
    static int one;
    *gpu = &one;
    return id[0] == '0' && id[4] == ':' ? 0 : 6;
}
"""
POWER = "int nvmlDeviceGetPowerUsage(void*, unsigned* mw) { *mw = 200250; return 0; }\n"
SENSORS = """
int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) { *mhz = type == 1 ? 1755 : 1; return 0; }
int nvmlDeviceGetTemperature(void*, int sensor, unsigned* c) { *c = sensor == 0 ? 64 : 1; return 0; }
"""
REASONS = "int nvmlDeviceGetCurrentClocks%sReasons(void*, unsigned long long* bits) { *bits = %d; return 0; }\n"
KEYS = {"power_w", "gpu_temperature_c", "sm_clock_mhz", "throttle"}


class GpuSensors(TrainerTest):
    def start(self, source, *flags, ranks=1, **changes):
        """Returns the output of a run with an NVML compiled from this C++ text; None: with an invalid library."""
        folder = self.dir / "nvml"
        folder.mkdir(exist_ok=True)
        library = folder / "libnvidia-ml.so.1"
        if source is None:
            library.write_text("no library")
        else:
            subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=source + "}", text=True,
                           check=True)
        config = self.write_config(**{**FOUR, "train_max_steps": 2, "schedule_name": "constant", **changes})
        many = ["--nproc", str(ranks)] if ranks > 1 else []
        result = subprocess.run([SIMULATED, *many, config, *flags], cwd=self.dir, capture_output=True, text=True,
                                timeout=170, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "SIMULATED_GPU": "NVIDIA H200",
                                                  "LD_LIBRARY_PATH": str(folder)})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def sensors(self):
        """Returns the values of each step."""
        return [{key: value for key, value in record.items() if key in KEYS}
                for record in self.records(kind="train", without=())]

    def test_two_ranks(self):
        nvml = START % 0 + GPU + POWER + SENSORS + REASONS % ("Event", 0x145)
        said = self.start(nvml, ranks=2)
        self.assertNotIn("sensors ", said)
        self.assertEqual(self.sensors(), 2 * [{"power_w": 400.5, "gpu_temperature_c": 64, "sm_clock_mhz": 1755,
                                               "throttle": "sw_power_cap, hw_thermal"}])
        warnings = [line for line in said.splitlines() if "warning" in line]
        self.assertEqual(warnings, ["step 1 | warning: 2 of 2 GPUs are throttled; reason on rank 0: "
                                    "sw_power_cap, hw_thermal"])

    def test_unreadable_sensors(self):
        for name, source, sentence in (
                ("no library", None, r"cannot load NVML: \S+/libnvidia-ml.so.1: file too short"),
                ("no function", START % 0, "libnvidia-ml.so.1 lacks NVML functions"),
                ("no driver", START % 9 + GPU + POWER, "cannot initialize NVML: Driver Not Loaded"),
                ("no GPU", START % 0 + GPU.replace("? 0 : 6", "? 6 : 6") + POWER,
                 "NVML cannot find the GPU 0000:[0-9a-fA-F:.]+: Not Found")):
            with self.subTest(name):
                said = self.start(source, "--fresh", train_max_steps=1, checkpoint_every_steps=0)
                self.assertRegex(said, r"\nsensors  not read: " + sentence)
                self.assertEqual(self.sensors(), [{}])

    def test_an_older_gpu_and_driver(self):
        """The library has no temperature and clock, and the older name of the throttle reasons."""
        said = self.start(START % 0 + GPU + POWER + REASONS % ("Throttle", 0x20))
        self.assertIn("step 1 | warning: 1 of 1 GPUs are throttled; reason on rank 0: sw_thermal\n", said)
        self.assertEqual(self.sensors(), 2 * [{"power_w": 200.25, "throttle": "sw_thermal"}])

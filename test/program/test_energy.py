"""The energy of a run, read from a stand-in for NVML that the trainer loads like the driver's library: records, sums
over ranks, resumes, and the messages if the library or a function is missing. Uses simulated GPUs."""
import json
import re
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
# A quarter of a joule per call.
ENERGY = """
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* mj) {
    static unsigned long long calls;
    *mj = 7000000 + 250 * calls++;
    return 0;
}
"""
POWER = "int nvmlDeviceGetPowerUsage(void*, unsigned* mw) { *mw = 200000; return 0; }\n"
SENSORS = """
int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) { *mhz = type == 1 ? 1755 : 1; return 0; }
int nvmlDeviceGetTemperature(void*, int sensor, unsigned* c) { *c = sensor == 0 ? 64 : 1; return 0; }
"""
REASONS = "int nvmlDeviceGetCurrentClocks%sReasons(void*, unsigned long long* bits) { *bits = %d; return 0; }\n"
JOULES = 0.25


class Energy(TrainerTest):
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

    def energy(self, step):
        return json.loads((self.step_dir(step) / "MANIFEST.json").read_text())["state"].get("energy")

    def test_two_ranks_and_a_resume(self):
        nvml = START % 0 + GPU + ENERGY + SENSORS + REASONS % ("Event", 0x145)
        prices = ["--set", "cost.price_per_hour=3600", "--set", "cost.co2_g_per_kwh=360000"]
        said = self.start(nvml, *prices, ranks=2)
        self.assertRegex(said, r"\nenergy   GPU by NVML")
        cpu = "RAPL (" in said  # its joules are unknown
        for record in self.records(kind="train", without=()):
            if not cpu:
                self.assertEqual(record["energy_j"], 2 * JOULES)
            self.assertGreaterEqual(record["energy_j"], 2 * JOULES)
            self.assertGreater(record["power_w"] * 1000, record["energy_j"])
            self.assertEqual((record["gpu_temperature_c"], record["sm_clock_mhz"]), (64, 1755))
            self.assertEqual(record["throttle"], "sw_power_cap, hw_thermal")
        warnings = [line for line in said.splitlines() if "warning" in line]
        self.assertEqual(warnings, ["step 1 | warning: 2 of 2 GPUs are throttled; reason on rank 0: "
                                    "sw_power_cap, hw_thermal"])
        if cpu:
            return
        # Two steps, and the time before the checkpoint.
        total = 3 * 2 * JOULES
        self.assertEqual(self.energy(2), {"joules": total, "steps": 2})
        self.assertIn(f"energy   0.0015 kJ, {total / 3.6e6:.4g} kWh; {total / (2 * 80):.4g} J per token; about "
                      f"{total / 10:.4g} g of CO2\n", said)
        cost, hours = map(float, re.search(r"cost     about (\S+): (\S+) hours at 3600", said).groups())
        self.assertAlmostEqual(cost / hours, 3600, delta=4)
        first_s = json.loads((self.step_dir(2) / "MANIFEST.json").read_text())["state"]["trained_s"]

        said = self.start(nvml, *prices, "--resume", "--accept-changes", ranks=2, train_max_steps=5)
        self.assertEqual(self.energy(5), {"joules": total + 4 * 2 * JOULES, "steps": 5})
        self.assertIn(f"{(total + 4 * 2 * JOULES) / (5 * 80):.4g} J per token", said)
        self.assertGreater(float(re.search(r"cost     about (\S+):", said)[1]), first_s)

        said = self.start(nvml, "--resume", "--accept-changes", train_max_steps=6)  # one rank, no prices
        self.assertEqual(self.energy(6), {"joules": total + 4 * 2 * JOULES + 2 * JOULES, "steps": 6})
        self.assertNotIn("CO2", said)
        self.assertNotIn("cost ", said)

    def test_unreadable_counters(self):
        no_energy = GPU + SENSORS
        for name, source, sentence in (
                ("no library", None, r"cannot load NVML: \S+/libnvidia-ml.so.1: file too short"),
                ("no function", START % 0, "libnvidia-ml.so.1 lacks NVML functions"),
                ("no driver", START % 9 + GPU + ENERGY, "cannot initialize NVML: Driver Not Loaded"),
                ("no GPU", START % 0 + GPU.replace("? 0 : 6", "? 6 : 6") + ENERGY,
                 "NVML cannot find the GPU 0000:[0-9a-fA-F:.]+: Not Found"),
                ("neither", START % 0 + no_energy, "NVML reports neither energy nor power for the GPU 0000")):
            with self.subTest(name):
                said = self.start(source, "--fresh", train_max_steps=1, checkpoint_every_steps=0)
                self.assertRegex(said, r"\nenergy   .*" + sentence)
                record, = self.records(kind="train", without=())
                self.assertNotIn("gpu_temperature_c", record)
                if "RAPL (" not in said:
                    self.assertFalse({"energy_j", "power_w", "throttle"} & set(record))
                    self.assertIsNone(self.energy(1))

    def test_an_older_gpu_and_driver(self):
        """The library reports power instead of energy, and uses the older name of the throttle reasons."""
        said = self.start(START % 0 + GPU + POWER + REASONS % ("Throttle", 0x20))
        self.assertIn("step 1 | warning: 1 of 1 GPUs are throttled; reason on rank 0: sw_thermal\n", said)
        for record in self.records(kind="train", without=()):
            self.assertEqual(record["throttle"], "sw_thermal")
            self.assertNotIn("sm_clock_mhz", record)
            if "RAPL (" not in said:
                self.assertAlmostEqual(record["power_w"], 200, places=6)

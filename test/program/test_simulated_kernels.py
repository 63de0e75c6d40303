"""Kernels for one compute capability on simulated GPUs: the check at the start of a run, with kernels that are wrong,
crash, are slow or never end."""
import re
import subprocess
import time

from test_simulated import SIMULATED
from trainer import ENVIRONMENT, TRAINER, TrainerTest

KERNEL = "cross_entropy_sm90"


class SimulatedKernels(TrainerTest):
    def run_with(self, fault, *args, expect=0, program=SIMULATED):
        run = subprocess.run([program, *args], cwd=self.dir, capture_output=True, text=True, timeout=100,
                             env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "SIMULATED_KERNEL_FAULT": fault})
        self.assertEqual(run.returncode, expect, run.stdout + run.stderr)
        return run.stdout

    def log_of(self, fault, *args):
        """Returns the lines of the log about kernels."""
        return re.findall("^kernels  (.*)", self.run_with(fault, *args, "--fresh"), re.M)

    def test_a_kernel_is_used_only_if_its_check_passes(self):
        config = self.write_config(train_max_steps=1)
        self.assertEqual(self.log_of("", config), [KERNEL])
        self.assertEqual(self.log_of("other wrong", config), [KERNEL])
        self.assertEqual(self.log_of("", config, "--set=device.arch_kernels=false"), [])
        (line,) = self.log_of(f"{KERNEL} wrong", config)
        self.assertRegex(line, f"^{KERNEL} is not used: bf16 loss: element 0 is 0, but .* with the portable kernel$")
        (line,) = self.log_of(f"{KERNEL} crashes", config)
        self.assertRegex(line, f"^{KERNEL} is not used: its check ended with exit code 71: .*a planted fault")

    def test_a_check_has_a_time_limit(self):
        config = self.write_config(train_max_steps=1)
        self.assertEqual(self.log_of(f"{KERNEL} slow", config), [KERNEL])
        for fault, limit_s in (("slow", 0.5), ("endless", 3)):
            begin = time.monotonic()
            lines = self.log_of(f"{KERNEL} {fault}", config, f"--set=device.kernel_check_s={limit_s}")
            self.assertEqual(lines, [f"{KERNEL} is not used: its check did not end within {limit_s:g} s"])
            self.assertGreater(time.monotonic() - begin, limit_s)
        # No check outlives its run.
        running = subprocess.run(["pgrep", "-f", f"check-kernels .*{KERNEL}"], capture_output=True, text=True,
                                 check=False).stdout.split()
        ours = [pid for pid in running if str(self.dir) in working_directory(pid)]
        self.assertEqual(ours, [])

    def test_all_ranks_use_the_same_kernels(self):
        """Each rank checks its own GPU."""
        config = self.write_config(train_max_steps=1, train_total_batch_tokens=240)
        self.assertEqual(self.log_of("", "--nproc", "2", config), [KERNEL])
        (line,) = self.log_of(f"{KERNEL} wrong 1", "--nproc", "2", config)
        self.assertRegex(line, f"^{KERNEL} is not used: on rank 1, bf16 loss: ")

    def test_the_command(self):
        self.assertEqual(self.run_with("", "check-kernels"), f"{KERNEL} passed\n")
        self.assertEqual(self.run_with(f"{KERNEL} wrong 2", "check-kernels", KERNEL), f"{KERNEL} passed\n")
        self.assertRegex(self.run_with(f"{KERNEL} wrong 2", "check-kernels", "--gpu", "2", expect=70),
                         f"^{KERNEL}: bf16 loss: .*\n$")
        self.run_with("", "check-kernels", "no_such", expect=64)
        self.run_with("", "check-kernels", "--gpu", "8", expect=78)
        self.assertEqual(self.run_with("", "check-kernels", program=TRAINER), "")


def working_directory(pid):
    run = subprocess.run(["readlink", f"/proc/{pid}/cwd"], capture_output=True, text=True, check=False)
    return run.stdout

"""Kernels for one compute capability on simulated GPUs: the check at the start of a run, with kernels that are wrong,
crash, are slow or never end."""
import os
import re
import subprocess
import time

from test_simulated import SIMULATED
from trainer import ENVIRONMENT, TRAINER, TrainerTest

KERNEL, OTHER = "attention_forward_sm90", "cross_entropy_sm90"
ALL = ["attention_backward_sm90", KERNEL, OTHER]


def without(kernel):
    return ", ".join(name for name in ALL if name != kernel)


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
        self.assertEqual(self.log_of("", config), [", ".join(ALL)])
        self.assertEqual(self.log_of("no_such_kernel wrong", config), [", ".join(ALL)])
        self.assertEqual(self.log_of("", config, "--set=device.arch_kernels=false"), [])
        for kernel, differs in zip(ALL, ("bf16, .*gradient: ", "bf16, .*log-sum-exp: ", "bf16 loss: ")):
            used, line = self.log_of(f"{kernel} wrong", config)
            self.assertEqual(used, without(kernel))
            self.assertRegex(line, f"^{kernel} is not used: {differs}element .* is 0, but .* with the portable kernel$")
            used, line = self.log_of(f"{kernel} crashes", config)
            self.assertEqual(used, without(kernel))
            self.assertRegex(line, f"^{kernel} is not used: its check ended with exit code 71: .*a planted fault")

    def test_a_check_has_a_time_limit(self):
        config = self.write_config(train_max_steps=1)
        self.assertEqual(self.log_of(f"{OTHER} slow", config), [", ".join(ALL)])
        begin = time.monotonic()
        lines = self.log_of(f"{OTHER} endless", config, "--set=device.kernel_check_s=12")
        self.assertEqual(lines, [without(OTHER), f"{OTHER} is not used: its check did not end within 12 s"])
        self.assertGreater(time.monotonic() - begin, 12)
        # Too little time for any check.
        lines = self.log_of(f"{KERNEL} slow", config, "--set=device.kernel_check_s=0.1")
        self.assertIn(f"{KERNEL} is not used: its check did not end within 0.1 s", lines)
        # No check outlives its run.
        running = subprocess.run(["pgrep", "-f", f"check-kernels .*{OTHER}"], capture_output=True, text=True,
                                 check=False).stdout.split()
        ours = [pid for pid in running if os.path.realpath(f"/proc/{pid}/cwd") == os.path.realpath(self.dir)]
        self.assertEqual(ours, [])

    def test_all_ranks_use_the_same_kernels(self):
        """Each rank checks its own GPU."""
        config = self.write_config(train_max_steps=1, train_total_batch_tokens=240)
        self.assertEqual(self.log_of("", "--nproc", "2", config), [", ".join(ALL)])
        used, line = self.log_of(f"{KERNEL} wrong 1", "--nproc", "2", config)
        self.assertEqual(used, without(KERNEL))
        self.assertRegex(line, f"^{KERNEL} is not used: on rank 1, bf16, ")

    def test_the_command(self):
        passed = [f"{name} passed\n" for name in ALL]
        self.assertEqual(self.run_with("", "check-kernels"), "".join(passed))
        self.assertEqual(self.run_with(f"{OTHER} wrong 2", "check-kernels", OTHER), f"{OTHER} passed\n")
        self.assertRegex(self.run_with(f"{OTHER} wrong 2", "check-kernels", "--gpu", "2", expect=70),
                         f"^{''.join(passed[:-1])}{OTHER}: bf16 loss: .*\n$")
        self.run_with("", "check-kernels", "no_such", expect=64)
        self.run_with("", "check-kernels", "--gpu", "8", expect=78)
        self.assertEqual(self.run_with("", "check-kernels", program=TRAINER), "")

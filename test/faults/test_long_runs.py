"""A long run uses no more files, threads and memory at its end than near its beginning."""
import os
import re
import subprocess
import time
from pathlib import Path

from campaign import NANO, OPTIONS, Campaign


def usage(pid):
    """Returns open files, threads and resident KiB of a process, or None if it has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return len(os.listdir(f"/proc/{pid}/fd")), *(int(re.search(rf"^{key}:\s+(\d+)", status, re.M)[1])
                                                     for key in ("Threads", "VmRSS"))
    except (OSError, TypeError):  # TypeError: it has released its memory
        return None


class LongRuns(Campaign):
    def test_files_threads_and_memory_do_not_grow(self):
        """With --long: 1,000 checkpoints and 100,000 steps."""
        steps = 100_000 if OPTIONS["long"] else 4_000
        self.write_config(**{**NANO, "train_max_steps": steps, "checkpoint_every_steps": 100,
                             "eval_every_steps": 1000, "sample_every_steps": 1000})
        process = subprocess.Popen(self.command("run"), cwd=self.dir, stdout=subprocess.DEVNULL,
                                   env=self.environment())
        self.addCleanup(process.kill)
        samples = []
        while process.poll() is None:
            samples.append(usage(process.pid))
            time.sleep(0.02)
        self.assertEqual(process.returncode, 0)
        samples = [sample for sample in samples if sample]
        quarter = len(samples) // 4
        self.assertGreater(quarter, 20)
        early, late = ([max(values) for values in zip(*part)] for part in
                       (samples[quarter:2 * quarter], samples[-quarter:]))
        print(f"{steps} steps, {steps // 100} checkpoints: files, threads, KiB {early}, at the end {late}", flush=True)
        self.assertLessEqual(late[0], early[0] + 1)  # a file may be open at the time of a sample
        self.assertLessEqual(late[1], early[1] + 1)
        # The first few thousand steps fill buffers that are then reused.
        self.assertLessEqual(late[2], early[2] + (1024 if OPTIONS["long"] else 4096))

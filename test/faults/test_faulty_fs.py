"""Disks that fail to read, fill up, stall or flip bits, simulated by a FUSE file system (faulty_fs.cpp)."""
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

from campaign import FOREGROUND, NANO, OPTIONS, Campaign, Outcome
from faulty_fs import FaultyFs, why_not
from trainer import wait_until


@unittest.skipIf(why_not(), why_not())
class FaultyDisk(Campaign):
    def setUp(self):
        super().setUp()
        self.disk = FaultyFs(self.dir)
        self.addCleanup(self.disk.unmount)
        for name in ("data", "config.json"):
            source = self.dir / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.disk.backing / name)
        self.start("whole")
        self.whole = self.result("whole")
        self.dir = self.disk.backing

    def start_on_disk(self, run, *flags, rules="", **more):
        """Like start(), with faults of the file system."""
        self.disk.inject(rules)
        before, self.dir = self.dir, self.disk.at
        try:
            return self.start(run, *flags, **more)
        finally:
            self.dir = before
            self.disk.inject()

    def half_a_run(self, **changes):
        """Leaves a run killed after step 8, with checkpoints 3 and 6. The disk then damages the newer one."""
        self.write_config(**{**NANO, **changes})
        outcome = self.start("run", *FOREGROUND, faults="call=pwrite,path=*/run/metrics.jsonl,nth=10,action=kill")
        self.assertEqual(outcome.code, -signal.SIGKILL, outcome)

    def test_an_unreadable_sector_of_the_newest_checkpoint(self):
        """The run uses the older checkpoint and renames nothing, as the disk may become readable again."""
        for name in ("shard_0000.bin", "MANIFEST.json", "COMMIT"):
            with self.subTest(name):
                self.drop("run")
                self.half_a_run()
                outcome = self.start_on_disk("run", "--auto",
                                             rules=f"call=read,path=*/step_00000006/{name},times=all,action=EIO")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(outcome.first_step(), 4, outcome)
                self.assertIn(name, outcome.error)
                self.assertFalse(list(self.dir.glob("run/checkpoints/damaged*")))
                self.check_same("run", self.whole, name)

    def test_an_unreadable_token_shard(self):
        """Reads fail from the middle of the shard, at startup or during training: the message blames the input only."""
        for nth in (1, 2, 3, 5):
            with self.subTest(nth=nth):
                self.drop("run")
                rules = f"call=read,path=/data/train_*,nth={nth},times=all,action=EIO"
                outcome = self.start_on_disk("run", rules=rules)
                if outcome.code != 0:  # otherwise it had read everything
                    self.check_sentence(outcome, f"read {nth}")
                    self.assertIn("train_000000.bin", outcome.error)
                self.recover("run", outcome, self.whole, f"read {nth}")

    def test_a_token_shard_truncated_during_training(self):
        self.check_changed_data(lambda shard: shard.open("r+b").truncate(shard.stat().st_size // 2))

    def test_a_token_shard_overwritten_during_training(self):
        def overwrite(shard):
            with shard.open("r+b") as file:
                file.seek(1100)
                file.write(bytes(2000))
        self.check_changed_data(overwrite)

    def check_changed_data(self, change):
        """A long run reports the changed file, saves a checkpoint and exits; it continues once the file is
        restored."""
        self.write_config(**{**NANO, "train_max_steps": 10**6, "checkpoint_every_steps": 10**5,
                             "eval_every_steps": 0, "sample_every_steps": 0})
        shard = self.dir / "data/train_000000.bin"
        kept = shard.read_bytes()
        with (Path(self.disk.at).parent / "said").open("w+") as said:
            process = subprocess.Popen(self.command("run"), cwd=self.disk.at, stdout=said, stderr=said,
                                       env=self.environment())
            self.addCleanup(process.kill)
            self.wait_for_steps()
            change(shard)
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                self.fail("training continues on the changed data")
            said.seek(0)
            outcome = Outcome(code, said.read(), "")
        shard.write_bytes(kept)
        self.assertIn(code, (65, 74), outcome)
        self.assertIn("train_000000.bin", outcome.out)
        self.assertEqual(len(list(self.dir.glob("run/checkpoints/step_*"))), 1, outcome)

    def test_a_bit_flipped_on_write_keeps_the_valid_checkpoint(self):
        """With checkpoint.keep=1, the newer checkpoint is read back before the older one is deleted."""
        for name in ("shard_0000.bin", "shard_0000.bin.json", "MANIFEST.json*", "COMMIT*"):
            with self.subTest(name):
                self.drop("run")
                self.write_config(**{**NANO, "checkpoint_keep": 1})
                rules = f"call=write,path=*/tmp.00000006*/{name},action=flip"
                outcome = self.start_on_disk(
                    "run", rules=rules, faults="call=pwrite,path=*/run/metrics.jsonl,nth=10,action=kill")
                self.assertEqual(outcome.code, -signal.SIGKILL, outcome)
                again = self.start("run", "--auto")
                self.assertEqual(again.code, 0, f"{outcome}\n{again}")
                self.assertIn(again.first_step(), (4, 7), f"{outcome}\n{again}")
                self.check_same("run", self.whole, name)

    def test_bits_flipped_on_read_never_reach_the_weights(self):
        for path in ("*/step_*/shard_*", "*/step_*/MANIFEST.json", "*/step_*/COMMIT", "/data/train_*"):
            with self.subTest(path):
                self.drop("run")
                self.half_a_run()
                outcome = self.start_on_disk("run", "--auto", rules=f"call=read,path={path},action=flip")
                if "step_" in path:
                    self.assertEqual((outcome.code, outcome.first_step()), (0, 7), outcome)
                    self.assertIn("check this machine's memory and disk", outcome.error)
                    self.assertFalse(list(self.dir.glob("run/checkpoints/damaged*")))
                elif outcome.code != 0:
                    self.assertIn(outcome.code, (65, 66, 78), outcome)  # 78: the data changed
                    self.assertIn("train_gpt: ", outcome.error)
                    outcome = self.start("run", "--auto")
                    self.assertEqual(outcome.code, 0, outcome)
                self.check_same("run", self.whole, path)

    def test_a_stalled_disk_only_delays_the_run(self):
        for call, path in (("read", "/data/*"), ("write", "*/shard_*"), ("fsync", "*/run/checkpoints"),
                           ("read", "*/step_*")):
            with self.subTest(call, path=path):
                self.drop("run")
                outcome = self.start_on_disk("run", rules=f"call={call},path={path},times=2,action=hang:0.7")
                self.assertEqual(outcome.code, 0, outcome)
                self.check_same("run", self.whole, path)

    def test_a_moved_run_directory_is_not_recreated(self):
        self.write_config(**{**NANO, "train_max_steps": 10**6, "checkpoint_every_steps": 50})
        process = subprocess.Popen(self.command("run"), cwd=self.disk.at, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=self.environment())
        self.addCleanup(process.kill)
        self.wait_for_steps()
        wait_until(lambda: list(self.dir.glob("run/checkpoints/step_*")), "no checkpoint")
        (self.disk.at / "run").rename(self.disk.at / "elsewhere")
        try:
            said = process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            said = "it runs on"
        self.assertFalse((self.dir / "run").exists(), said)
        self.assertEqual(process.returncode, 74, said)
        self.assertIn("run", said)
        self.assertTrue(list(self.dir.glob("elsewhere/checkpoints/step_*")))

    def test_a_run_directory_moved_while_a_run_starts(self):
        """The directory is not mistaken for an empty one, and the run continues once it is back."""
        self.half_a_run()
        for call, path in (("opendir", "*/run"), ("open", "*/step_00000006/MANIFEST.json"),
                           ("open", "*/run/metrics.jsonl"), ("fsync", "*/run/samples.jsonl"),
                           ("rename", "*/run/config.json*")):
            with self.subTest(call, path=path):
                self.disk.inject(f"call={call},path={path},times=all,action=hang:2")
                process = subprocess.Popen(self.command("run", "--auto"), cwd=self.disk.at, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.PIPE, text=True, env=self.environment())
                self.addCleanup(process.kill)
                wait_until(lambda: f"pid {process.pid}," in (self.dir / "run/lock").read_text(), "no lock")
                (self.disk.at / "run").rename(self.disk.at / "elsewhere")
                said = process.communicate(timeout=60)[1]
                self.disk.inject()
                self.assertEqual(process.returncode, 74, said)
                self.assertIn("moved or removed", said)
                self.assertFalse((self.dir / "run").exists(), said)
                (self.disk.at / "elsewhere").rename(self.disk.at / "run")
        outcome = self.start_on_disk("run", "--auto")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.first_step(), 7, outcome)
        self.check_same("run", self.whole, "moved and back")


@unittest.skipIf(why_not(), why_not())
class ShortSoak(unittest.TestCase):
    def test_one_fault_of_each_class(self):
        soak = [sys.executable, Path(__file__).with_name("soak.py"), "--faults", "10", "--every", "0", "--minutes",
                "10", "--steps", "1500", "--seed", str(OPTIONS["seed"])]
        result = subprocess.run(soak, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

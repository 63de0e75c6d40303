"""A full disk: the run ends with 74 and the numbers, what was committed stays whole, and with room again it goes on."""
import shutil
import subprocess
import unittest

from trainer import ENVIRONMENT, TRAINER, TrainerTest

MAY_MOUNT = shutil.which("unshare") and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                                                       capture_output=True).returncode == 0
# Mounts are seen by this shell alone and end with it.
SCRIPT = """
mkdir disk
mount -t tmpfs -o size=$1k tmpfs disk || exit 99
"$0" config.json; echo "first exit $?"
cp -r disk/run before
mount -o remount,size=64m disk
"$0" inspect disk/run; echo "inspect exit $?"
"$0" config.json --auto; echo "second exit $?"
cp -r disk/run run
"""


@unittest.skipUnless(MAY_MOUNT, "mounting a small file system is not permitted here")
class FullDisk(TrainerTest):
    def run_on(self, kilobytes):
        for name in ("disk", "before", "run"):
            shutil.rmtree(self.dir / name, ignore_errors=True)
        result = subprocess.run(["unshare", "-m", "bash", "-c", SCRIPT, TRAINER, str(kilobytes)], cwd=self.dir,
                                capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        return result.stdout + result.stderr

    def test_full_disks_of_many_sizes(self):
        self.train(checkpoint_every_steps=2, checkpoint_keep=30, run_dir="whole")
        whole, weights = self.records("whole"), self.weights(20, "whole")
        checkpoint_kb = sum(file.stat().st_size for file in self.step_dir(2, "whole").iterdir()) // 1024
        self.write_config(checkpoint_every_steps=2, checkpoint_keep=30, run_dir="disk/run")
        for kilobytes in [checkpoint_kb // 2, *range(checkpoint_kb, 6 * checkpoint_kb, checkpoint_kb // 2 + 4)]:
            with self.subTest(kilobytes=kilobytes):
                said = self.run_on(kilobytes)
                self.assertIn("first exit 74", said)
                self.assertRegex(said, r"train_gpt: .*disk/run.*\d+")
                kept = list((self.dir / "before").glob("checkpoints/step_*"))
                self.assertIn(f"disk/run: run, {len(kept)} checkpoint(s)", said)
                self.assertIn("inspect exit 0", said)
                self.assertIn("second exit 0", said)
                self.assertEqual(self.records("run"), whole)
                self.assertEqual(self.weights(20, "run"), weights)

"""Full and read-only disks: the run exits with 74 and the reason, committed checkpoints stay intact, and the run
continues once there is room. Also: output that cannot be written."""
import shutil
import subprocess
import unittest

from trainer import ENVIRONMENT, TRAINER, TrainerTest

MAY_MOUNT = shutil.which("unshare") and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                                                       capture_output=True).returncode == 0
# Mounts are private to this shell and end with it.
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


# After the run has trained a few steps, its directory becomes read-only; open files stay writable. The run must not see
# the mount before it is read-only, because a file opened in it would keep it writable.
READ_ONLY = """
"$0" config.json & run=$!
until ls run/checkpoints/step_* > files 2> errors; do kill -0 $run || exit 99; sleep 0.05; done
mkdir frozen
mount --bind run frozen && mount -o remount,ro,bind frozen && mount --move frozen run || { kill $run; exit 99; }
wait $run; echo "exit $?"
"$0" config.json --auto; echo "second exit $?"
"""
SMALL_SHARED_MEMORY = """
mount -t tmpfs -o size=1m none /dev/shm || exit 99
"$0" --nproc 2 config.json; echo "exit $?"
"""


class FullOutput(TrainerTest):
    SENTENCE = "train_gpt: cannot write to standard output: No space left on device\n"

    def check_lost(self, *arguments):
        with self.subTest(arguments=arguments), open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run([TRAINER, *arguments], cwd=self.dir, stdout=full, stderr=subprocess.PIPE, text=True,
                                    timeout=120, env=ENVIRONMENT)
            self.assertEqual(result.returncode, 74, result.stderr)
            self.assertTrue(result.stderr.endswith(self.SENTENCE), result.stderr)
            self.assertEqual(result.stderr.count(self.SENTENCE), 1)

    def test_the_output_of_every_command(self):
        self.train(train_max_steps=2)
        for option in ("--help", "--version", "--help-config", "--markdown-config", "--exit-codes"):
            self.check_lost(option)
        for command in (["plan", "--help"], ["plan", "config.json"], ["inspect", "run"],
                        ["inspect", "data/tokenizer.json"], ["report", "run"], ["eval", "run"],
                        ["sample", "run", "--prompt", "The", "--tokens", "4"],
                        ["export", "run", "--hf", "hf"], ["import", "--hf", "hf", "--out", "imported.json"],
                        ["prepare", "text.txt", "--tokenizer", "bytes", "--minutes", "0", "--out", "more"]):
            self.check_lost(*command)

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_the_output_of_several_ranks(self):
        self.train(train_max_steps=2)
        self.check_lost("--nproc", "2", "eval", "run")
        self.check_lost("eval", "run", "--nproc", "2")
        self.assertEqual(self.run_trainer("eval", "run", "--nproc", "2"), self.run_trainer("eval", "run"))

    def test_a_run_ignores_lost_output(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            subprocess.run([TRAINER, self.write_config()], cwd=self.dir, stdout=full, check=True, timeout=120,
                           env=ENVIRONMENT)


@unittest.skipUnless(MAY_MOUNT, "mounting a small file system is not permitted here")
class Mounted(TrainerTest):
    def run_script(self, script):
        """Runs the script with private mounts; returns its output."""
        result = subprocess.run(["unshare", "-m", "bash", "-c", script, TRAINER], cwd=self.dir, capture_output=True,
                                text=True, timeout=120, env=ENVIRONMENT)
        self.assertNotEqual(result.returncode, 99, result.stderr)
        return result.stdout + result.stderr

    def test_a_run_directory_that_becomes_read_only(self):
        for asynchronous in (False, True):
            with self.subTest(asynchronous=asynchronous):
                for name in ("run", "frozen"):
                    shutil.rmtree(self.dir / name, ignore_errors=True)
                self.write_config(train_max_steps=100000, schedule_name="constant", checkpoint_every_steps=20,
                                  checkpoint_asynchronous=asynchronous)
                said = self.run_script(READ_ONLY)
                self.assertRegex(said, r"save failed 2 of 3 times: .*Read-only file system")
                self.assertRegex(said, r"train_gpt: .*run/checkpoints/.*: Read-only file system\n")
                self.assertIn("\nexit 74", said)
                self.assertIn("second exit 74", said)  # --supervise retries it, too

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_shared_memory_that_is_too_small_for_two_ranks(self):
        self.write_config()
        said = self.run_script(SMALL_SHARED_MEMORY)
        self.assertIn("exit 71", said)
        self.assertRegex(said, r"train_gpt: mpirun ended with exit code 1, .* /dev/shm has [01]\.\d MiB free")


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

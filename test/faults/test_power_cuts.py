"""Power cuts: every step that was reported as committed is on the disk."""
import random
import re
import shutil
import signal
import subprocess
import time
import unittest
from pathlib import Path

from campaign import BUILD, LAST_STEP, OPTIONS, Campaign, Operation, have_private_mounts
from trainer import TRAINER, digest, generated_text

IMAGE_MIB = 48


class CrashStates(Campaign):
    """Disk states that are possible after a power cut during the trainer's operations (crash_states.cpp)."""

    changes = {**Campaign.changes, "checkpoint_every_steps": 1}

    def record(self, ranks=1, **changes):
        """Returns the log of a run's operations as lines; the file `said` has its output."""
        self.write_config(**{**self.changes, **changes})
        log = self.dir / "log"
        faults = f"path={self.dir},action=log;path={self.dir}/run*,action=log;call=fflush,action=log"
        trainer = self.command("run")
        command = ["sh", "-c", 'exec "$0" "$@" > said', *trainer]  # the file's size shows what was printed when
        if ranks > 1:
            command = ["mpirun", "-np", "1", *command, ":", "-np", str(ranks - 1), *trainer]
        subprocess.run(command, cwd=self.dir, check=True, timeout=120, stdout=subprocess.DEVNULL,
                       env=self.environment(faults, log))
        return log.read_text().splitlines(keepends=True)

    def crash(self, log, states):
        """Checks `states` disk states; returns the result of crash_states."""
        (self.dir / "log").write_text("".join(log))
        command = [BUILD / "crash_states", "log", "said", self.dir / "run", "scratch", states, OPTIONS["seed"]]
        return subprocess.run(list(map(str, command)), cwd=self.dir, capture_output=True, text=True)

    def check_protocol(self, **changes):
        result = self.crash(self.record(**changes), 200000 if OPTIONS["long"] else 3000)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        states, last = map(int, re.search(r"^(\d+) states .* (\d+) the last step", result.stdout).groups())
        self.assertEqual(last, LAST_STEP)
        self.assertGreaterEqual(states, 2000)
        self.say(result.stdout.strip())

    def test_each_sync_of_a_save_is_needed(self):
        """Without any one of the syncs, a reported step can be lost: checked by deleting its lines from a run's log."""
        log = self.record(checkpoint_keep=1)
        after_commit = [i + next(k for k, line in enumerate(log[i:]) if line.startswith("fsync"))
                        for i, line in enumerate(log) if line.startswith("rename") and "/COMMIT\t" in line]
        self.assertEqual(len(after_commit), LAST_STEP)
        self.assertRegex(log[after_commit[0]], r"/tmp\.\w+\.\w+\t")
        places = {name: [i for i, line in enumerate(log) if re.match(rf"fsync\t\S*/{name}\t", line)] for name in
                  (r"shard_0000\.bin", r"MANIFEST\S*", r"COMMIT\S*", "checkpoints")}
        for name, lines in {**places, "the directory after COMMIT": after_commit}.items():
            with self.subTest(name):
                self.assertTrue(lines)
                result = self.crash([line for i, line in enumerate(log) if i not in lines], 3000)
                self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                self.assertIn("a power cut after line", result.stdout)

    def test_one_rank_keeping_two_checkpoints(self):
        self.check_protocol()

    def test_one_rank_keeping_one_checkpoint(self):
        self.check_protocol(checkpoint_keep=1)

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_two_ranks(self):
        self.check_protocol(ranks=2, checkpoint_keep=1)


class Prepare(Campaign):
    """The order of prepare's operations shows that everything it names is on the disk."""

    def prepare(self, lines):
        """Returns the operations of a prepare that replaces an older data set."""
        (self.dir / "new.txt").write_text(generated_text(lines))
        log = self.dir / "log"
        log.unlink(missing_ok=True)
        command = [TRAINER, "prepare", "--tokenizer", "bytes", "--minutes", "0", "--force", "--shard-tokens", "2000",
                   "new.txt", "--out", "out"]
        subprocess.run(command, cwd=self.dir, check=True, stdout=subprocess.DEVNULL, timeout=120,
                       env=self.environment(f"path={self.dir}/out*,action=log", log))
        return [operation for operation in map(Operation, log.read_text().splitlines()) if operation.result >= 0]

    def test_shards_are_on_the_disk_before_they_are_named(self):
        out, record = self.dir / "out", self.dir / "out/dataset.json"
        for lines in (200, 300):
            unsynced = set()  # files and directories whose bytes or names a power cut may lose
            begun, removed, moved = set(), set(), 0
            old_record_may_stand = record.exists()
            self.assertEqual(old_record_may_stand, lines == 300)
            for operation in self.prepare(lines):
                path, target = Path(operation.path), Path(operation.detail)
                if operation.call == "pwrite":
                    if path.suffix == ".bin" and operation.detail == "0" and path in begun:
                        self.assertNotIn(path, unsynced, "a header precedes its tokens")
                    begun.add(path)
                    unsynced.add(path)
                elif operation.call == "fsync":
                    unsynced -= {path, *({record} if path == out else ())}
                    old_record_may_stand &= not (path == out and record in removed)
                elif operation.call == "unlink":
                    removed.add(path)
                elif operation.call == "rename":
                    self.assertNotIn(path, unsynced, "a name precedes the bytes")
                    if target == record:
                        self.assertNotIn(out, unsynced, "the record precedes the shards' names")
                        unsynced.add(record)  # until its name is synced
                    elif target.parent == out and path.suffix == ".bin":
                        self.assertFalse(old_record_may_stand, "new shards next to the older record")
                        moved += 1
                    unsynced |= {path.parent, target.parent}
            self.assertGreater(moved, 3)
            self.assertNotIn(record, unsynced)


def may_mount_loop_devices():
    """Returns a reason why not, or an empty string."""
    if not shutil.which("mkfs.ext4"):
        return "there is no mkfs.ext4"
    if not have_private_mounts():
        return "mounting is not permitted here"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


@unittest.skipIf(may_mount_loop_devices(), may_mount_loop_devices())
class LoopDevice(Campaign):
    """ext4 on an image that is copied while the trainer is stopped; the copy lacks dirty pages."""
    changes = {**Campaign.changes, "train_max_steps": 60, "checkpoint_every_steps": 3, "checkpoint_keep": 2}

    def mount(self, image, folder):
        (self.dir / folder).mkdir()
        result = subprocess.run(["mount", "-o", "loop", image, folder], cwd=self.dir, capture_output=True, text=True)
        if result.returncode != 0:
            self.skipTest(f"a loop device cannot be mounted: {result.stderr}")
        self.addCleanup(subprocess.run, ["umount", "-l", self.dir / folder], capture_output=True)

    def unmount(self, folder):
        subprocess.run(["umount", self.dir / folder], check=True)
        (self.dir / folder).rmdir()

    def copy_of_disk(self):
        """Copies the disk until nothing was written during the copy, so that the copy is a state of one moment."""
        while True:
            shutil.copy(self.dir / "disk", self.dir / "copy")
            if digest(self.dir / "copy") == digest(self.dir / "disk"):
                return

    def test_a_reported_step_survives_a_power_cut(self):
        self.start("whole")
        whole = self.records("whole"), self.weights(60, "whole")
        draws = random.Random(OPTIONS["seed"])
        trials = 100 if OPTIONS["long"] else 4
        self.say(f"{trials} power cuts")
        for trial in range(trials):
            with self.subTest(trial=trial):
                self.cut_power(draws.uniform(0, 1.5), whole)

    def cut_power(self, delay, whole):
        (self.dir / "disk").write_bytes(b"")
        subprocess.run(["truncate", "-s", f"{IMAGE_MIB}M", "disk"], cwd=self.dir, check=True)
        subprocess.run(["mkfs.ext4", "-q", "disk"], cwd=self.dir, check=True)
        self.mount("disk", "before")
        said = self.dir / "said"
        with said.open("w") as out:
            process = subprocess.Popen(self.command("before/run"), cwd=self.dir, stdout=out, stderr=out,
                                       env=self.environment())
            time.sleep(delay)
            process.send_signal(signal.SIGSTOP)
            self.copy_of_disk()
            process.kill()
            process.wait()
        reported = max([int(line.split()[1]) for line in said.read_text().splitlines() if "| checkpoint" in line],
                       default=0)
        self.unmount("before")
        self.mount("copy", "after")
        again = self.start("after/run", "--auto")
        self.assertEqual(again.code, 0, f"step {reported} was reported\n{again}")
        if reported:
            self.assertGreater(again.first_step(), reported, again)
        self.assertEqual((self.records("after/run"), self.weights(60, "after/run")), whole)
        self.unmount("after")

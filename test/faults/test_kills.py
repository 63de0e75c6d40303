"""SIGKILL at every file operation and at random times: the run continues from its newest committed step."""
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from campaign import FOREGROUND, LAST_STEP, NANO, OPTIONS, Campaign, sample, supervised
from trainer import trainers_in, wait_until


class Kills(Campaign):
    def places(self, operations, count):
        """Returns the places to kill: before each operation, and after each one that changed something."""
        kinds = [(nth, "kill") for nth in range(1, len(operations) + 1)]
        changing = ("write", "pwrite", "fallocate", "ftruncate", "fsync", "rename", "unlink", "mkdir", "rmdir")
        kinds += [(nth, "kill_after") for nth, operation in enumerate(operations, 1) if operation.call in changing]
        return sample(sorted(kinds), count)

    def check_kills(self, places, *flags, before=None):
        self.say(f"{len(places)} kills")
        for nth, action in places:
            with self.subTest(nth=nth, action=action):
                self.drop("case")
                if before:
                    shutil.copytree(self.dir / before, self.dir / "case")
                outcome = self.start("case", *flags, faults=f"path={self.dir}/case*,nth={nth},action={action}")
                self.assertEqual(outcome.code, -signal.SIGKILL, outcome)
                self.recover("case", outcome, self.whole, f"{action} {nth}")
                names = [path.name for path in (self.dir / "case/checkpoints").iterdir()]
                self.assertTrue(all(name.startswith("step_") for name in names), names)

    def test_a_run_may_be_killed_at_any_operation(self):
        operations = self.operations("whole")
        self.whole = self.result("whole")
        self.assertGreater(len(operations), 200)
        self.check_kills(self.places(operations, 80))

    def test_a_resume_may_be_killed_at_any_operation(self):
        self.start("whole")
        self.whole = self.result("whole")
        self.start("half", faults=f"call=pwrite,path={self.dir}/half/metrics.jsonl,nth=10,action=kill")
        shutil.copytree(self.dir / "half", self.dir / "resumed")
        operations = self.operations("resumed", "--auto")
        self.assertGreater(len(operations), 100)
        self.check_kills(self.places(operations, 40), "--auto", before="half")

    def test_a_run_may_be_killed_repeatedly(self):
        """Kills each start at one of its first operations after the resume, so that it makes little progress."""
        self.start("whole")
        whole = self.result("whole")
        draws = random.Random(OPTIONS["seed"])
        for trial in range(200 if OPTIONS["long"] else 3):
            with self.subTest(trial=trial):
                self.drop("case")
                newest = 0
                for _ in range(6):
                    outcome = self.start("case", "--auto",
                                         faults=f"path={self.dir}/case*,nth={draws.randint(1, 500)},action=kill")
                    if outcome.first_step():
                        self.assertGreater(outcome.first_step(), newest, outcome)
                    newest = max(newest, outcome.reported_step())
                self.recover("case", outcome, whole, f"trial {trial}")


class RankKills(Campaign):
    def kill_after(self, delay, who, *flags, ranks):
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(self.command("case", *flags, ranks=ranks), cwd=self.dir, stdout=said,
                                       stderr=said, env=self.environment())
            self.addCleanup(process.kill)
            time.sleep(delay)
            pids = trainers_in(self.dir)
            victims = {"one": pids[:1], "another": pids[-1:], "all": pids, "mpirun": [process.pid]}[who]
            self.send(victims, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while trainers_in(self.dir):
                self.assertLess(time.monotonic(), deadline, "a rank is still running")
                time.sleep(0.05)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:  # mpirun can hang after its ranks; --supervise ends it then
                process.kill()
                process.wait(60)

    def send(self, pids, number):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it has just exited
                pass


# Layouts of ranks, which give the same bits: data, pipeline, context, tensor and the ZeRO stage.
GRIDS = [(1, 1, 1, 1, 0), (2, 1, 1, 1, 2), (1, 2, 1, 1, 0), (2, 2, 1, 1, 1), (1, 4, 1, 1, 0), (4, 1, 1, 1, 3),
         (2, 1, 1, 2, 2), (1, 2, 2, 1, 0), (1, 2, 1, 2, 0), (2, 1, 2, 1, 3), (1, 1, 2, 2, 1)]


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class KilledGrids(RankKills):
    changes = {**NANO, "model_n_layer": 4, "model_n_head": 2, "model_n_positions": 64, "train_seq_len": 64,
               "train_total_batch_tokens": 64 * 8}

    def test_a_killed_run_continues_on_another_grid(self):
        draws = random.Random(OPTIONS["seed"])
        begin = time.monotonic()
        self.on_grid(self.start, (2, 2, 1, 1, 1), "whole")
        whole, run_s = self.result("whole"), time.monotonic() - begin
        for trial in range(200 if OPTIONS["long"] else 2):
            grids = [draws.choice(GRIDS) for _ in range(3)]
            kills = [(draws.uniform(0, 1.2 * run_s), draws.choice(["one", "another", "all"])) for _ in range(2)]
            with self.subTest(trial=trial, grids=grids, kills=kills):
                self.drop("case")
                for grid, (delay, who) in zip(grids, kills):
                    self.on_grid(self.kill_after, grid, delay, who, "--auto")
                self.on_grid(self.start, grids[-1], "case", "--auto")
                self.check_same("case", whole, f"{grids}, {kills}")

    def result(self, run):
        return {**super().result(run), "weights": self.logical_values(LAST_STEP, run)}  # the shards' sizes differ

    def on_grid(self, start, grid, *arguments):
        """Calls start() or kill_after() with the flags and the number of ranks of a grid."""
        data, pipeline, context, tensor, zero = grid
        keys = {"pipeline": pipeline, "context": context, "tensor": tensor, "zero_stage": zero}
        flags = [word for key, value in keys.items() for word in ("--set", f"parallel.{key}={value}")]
        outcome = start(*arguments, *flags, ranks=data * pipeline * context * tensor)
        self.assertEqual(outcome.code if outcome else 0, 0, outcome)


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class KilledRanks(RankKills):
    ranks = 2

    def test_any_rank_or_all_or_mpirun_may_be_killed_at_any_time(self):
        begin = time.monotonic()
        self.start("whole", ranks=self.ranks)
        run_s = time.monotonic() - begin
        whole = self.result("whole")
        draws = random.Random(OPTIONS["seed"])
        for trial in range(200 if OPTIONS["long"] else 4):
            who = ["one", "all", "mpirun", "another"][trial % 4]
            delay = draws.uniform(0, 1.2 * run_s)
            with self.subTest(trial=trial, who=who, delay=delay):
                self.drop("case")
                self.kill_after(delay, who, ranks=self.ranks)
                again = self.start("case", "--auto", ranks=self.ranks)
                self.assertEqual(again.code, 0, again)
                self.check_same("case", whole, f"{who} after {delay} s")

    def test_a_rank_that_is_stopped_at_the_end_is_noticed(self):
        """The rank is stopped after the last checkpoint, while all ranks shut down together."""
        self.write_config(**{**self.changes, "parallel_silence_s": 3, "parallel_step_timeout_s": 10,
                             "train_max_steps": 300, "checkpoint_every_steps": 0})
        command = [*supervised(self.ranks), "config.json", "--auto", "--set", "run.dir=case"]
        process = subprocess.Popen(command, cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=self.environment())
        self.addCleanup(process.kill)
        ranks = []
        while not (self.step_dir(300, "case") / "COMMIT").exists():
            self.assertIsNone(process.poll())
            ranks = [pid for pid in trainers_in(self.dir) if pid != process.pid] or ranks
        self.send(ranks[-1:], signal.SIGSTOP)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.send(ranks, signal.SIGKILL)
            self.fail("the run did not end within 60 s after a rank was stopped")

    def test_a_rank_may_be_killed_at_any_operation_of_a_save(self):
        operations = self.operations("whole", ranks=self.ranks)
        whole = self.result("whole")
        saving = sum("/checkpoints" in operation.path for operation in operations)
        of_rank_1 = sum("/shard_0001" in operation.path for operation in operations) // 2  # rank 0 opens them too
        places = [(nth, 0) for nth in range(1, saving - of_rank_1)] + [(nth, 1) for nth in range(1, of_rank_1)]
        places = sample(places, 6)
        self.say(f"{len(places)} kills")
        for nth, rank in places:
            with self.subTest(nth=nth, rank=rank):
                self.drop("case")
                rules = f"path={self.dir}/case/checkpoints*,nth={nth},action=kill,rank={rank}"
                outcome = self.start("case", faults=rules, ranks=self.ranks)
                self.recover("case", outcome, whole, rules, ranks=self.ranks)


class Signals(Campaign):
    def test_a_signal_during_a_save_ends_with_a_checkpoint(self):
        """The signal comes while the save's thread or, for a foreground save, the trainer waits for the disk."""
        self.start("whole")
        whole = self.result("whole")
        cases = [([], "metrics.jsonl"), ([], "shard_0000.bin"), ([], "COMMIT*"), (FOREGROUND, "shard_0000.bin"),
                 (FOREGROUND, "COMMIT*")]
        for (flags, file), number in itertools.product(cases, (signal.SIGTERM, signal.SIGINT)):
            with self.subTest(flags, file=file, signal=number):
                self.drop("case")
                nth = 2 if file == "metrics.jsonl" else 1  # the first sync is at opening
                rules = f"call=fsync,path=*/{file},nth={nth},action=hang:0.7"
                process = subprocess.Popen(self.command("case", *flags), cwd=self.dir, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                           env=self.environment(rules))
                self.addCleanup(process.kill)
                wait_until(lambda: list(self.dir.glob("case/checkpoints/tmp.*")), "no save has begun", 20)
                time.sleep(0.2)
                process.send_signal(number)
                said = process.communicate(timeout=60)[0]
                self.assertEqual(process.returncode, 75, said)
                self.assertIn(f"stopped by signal {number.value}", said)
                stopped_at = max(int(path.name[5:]) for path in self.dir.glob("case/checkpoints/step_*"))
                self.assertIn(f"step {stopped_at} | stopped", said)
                outcome = self.start("case", "--resume")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(outcome.first_step(), stopped_at + 1)
                self.check_same("case", whole, said)

"""File system errors at every operation of a run: no committed step is lost, and the run continues."""
import itertools
import os
import re
import shutil
import subprocess

from campaign import ERRORS, FOREGROUND, LAST_STEP, NANO, OPTIONS, Campaign, sample
from trainer import wait_until


class IoErrors(Campaign):
    def cases(self, operations, count):
        """Yields (operation, number, rules) for each error of each operation, both once and persistent."""
        numbered, seen = [], {}
        for operation in operations:
            seen[operation.call] = seen.get(operation.call, 0) + 1
            numbered.append((operation, seen[operation.call]))
        chosen = []
        for call in sorted(seen):  # a sample includes every kind of operation
            of_call = [entry for entry in numbered if entry[0].call == call]
            chosen += sample(itertools.product(of_call, ERRORS, ("1", "all")), count)
        self.say(f"{len(chosen)} errors")
        return [(operation, times,
                 f"call={operation.call},path={self.dir}/case*,nth={nth},times={times},action={error}")
                for (operation, nth), error, times in chosen]

    def is_during_training(self, operations, operation):
        """Returns whether the operation is after startup and before the last save, so that the run must continue."""
        begin = next(i for i, other in enumerate(operations) if other.call == "pwrite" and "metrics" in other.path)
        end = max(i for i, other in enumerate(operations) if other.call == "pwrite" and "metrics" in other.path)
        return begin <= operations.index(operation) <= end

    def test_an_error_at_any_operation_fails_at_most_one_save(self):
        operations = self.operations("whole")
        whole = self.result("whole")
        for operation, times, rules in self.cases(operations, 10):
            with self.subTest(rules, path=operation.path):
                self.drop("case")
                outcome = self.start("case", faults=rules)
                if outcome.code != 0:
                    self.check_sentence(outcome, rules)
                if times == "1" and self.is_during_training(operations, operation):
                    self.assertEqual(outcome.code, 0, f"a single error ended the run: {rules}\n{outcome}")
                self.recover("case", outcome, whole, rules)

    def test_an_error_at_any_operation_of_a_resume_loses_no_step(self):
        whole, half = self.half_a_run()
        shutil.copytree(self.dir / half, self.dir / "resumed")
        operations = self.operations("resumed", "--auto")
        for operation, _, rules in self.cases(operations, 6):
            with self.subTest(rules, path=operation.path):
                self.drop("case")
                shutil.copytree(self.dir / half, self.dir / "case")
                outcome = self.start("case", "--auto", faults=rules)
                if outcome.code != 0:
                    self.check_sentence(outcome, rules)
                    self.assertTrue(self.step_dir(6, "case").exists() or outcome.reported_step() > 6, outcome)
                if outcome.first_step():
                    self.assertIn(outcome.first_step(), (4, 7), f"{rules}: {outcome}")
                self.recover("case", outcome, whole, rules)

    def half_a_run(self):
        """Returns the result of a complete run, and leaves a run killed after step 8 with checkpoints 3 and 6."""
        self.start("whole")
        rules = f"call=pwrite,path={self.dir}/half/metrics.jsonl,nth=10,action=kill"
        outcome = self.start("half", *FOREGROUND, faults=rules)
        self.assertEqual(outcome.code, -9, outcome)
        self.assertEqual(sorted(path.name for path in (self.dir / "half/checkpoints").iterdir()),
                         ["step_00000003", "step_00000006"])
        return self.result("whole"), "half"

    def test_an_unreadable_checkpoint_falls_back_to_the_older_one(self):
        whole, half = self.half_a_run()
        names = ("COMMIT", "MANIFEST.json", "shard_0000.bin")
        for name, call, error in itertools.product(names, ("read|pread", "open"), ("EIO", "ESTALE")):
            with self.subTest(name, call=call, error=error):
                self.drop("case")
                shutil.copytree(self.dir / half, self.dir / "case")
                rules = f"call={call},path=*/step_00000006/{name},times=all,action={error}"
                outcome = self.start("case", "--auto", faults=rules, ranks=1)
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(outcome.first_step(), 4, f"{name} was not read with {call}: {outcome}")
                self.assertIn("step_00000006", outcome.error)
                self.check_same("case", whole, rules)

    def test_a_run_that_cannot_list_its_checkpoints_does_not_start_over(self):
        whole, half = self.half_a_run()
        before = self.contents(half)
        for call, path, error in itertools.product(("stat", "opendir|open", "readdir"), ("checkpoints", ""),
                                                   ("EIO", "ESTALE", "EACCES")):
            with self.subTest(call, path=path, error=error):
                self.drop("case")
                shutil.copytree(self.dir / half, self.dir / "case")
                rules = f"call={call},path={self.dir}/case{'/' * bool(path)}{path},times=all,action={error}"
                outcome = self.start("case", "--auto", faults=rules)
                if outcome.code == 0:
                    self.assertGreater(outcome.first_step(), 6, f"started over with {rules}\n{outcome}")
                else:
                    self.check_sentence(outcome, rules)
                    self.assertEqual({name.replace("case", "half"): digest for name, digest in
                                      self.contents("case").items()}, before, f"changed with {rules}")
                self.recover("case", outcome, whole, rules)

    def test_a_dangling_checkpoints_link_is_not_an_empty_run(self):
        _, half = self.half_a_run()
        (self.dir / half / "checkpoints").rename(self.dir / "elsewhere")
        (self.dir / half / "checkpoints").symlink_to(self.dir / "absent")
        before = self.contents(half)
        outcome = self.start(half, "--auto")
        self.check_sentence(outcome, "a dangling link")
        self.assertEqual(self.contents(half), before)

    def test_a_stat_error_at_the_start_does_not_erase_the_log(self):
        whole, half = self.half_a_run()
        for name in ("metrics.jsonl", "main.log", "samples.jsonl"):
            with self.subTest(name):
                self.drop("case")
                shutil.copytree(self.dir / half, self.dir / "case")
                outcome = self.start("case", "--auto", faults=f"call=stat,path=*/case/{name},action=EIO")
                self.recover("case", outcome, whole, name)

    def test_a_failed_append_to_a_log_loses_no_line(self):
        self.start("whole")
        whole = self.result("whole")
        places = [("metrics.jsonl", 1), ("metrics.jsonl", 7), ("main.log", 1), ("main.log", 7), ("samples.jsonl", 1)]
        for (name, nth), times in itertools.product(places, (1, 3)):
            with self.subTest(name, nth=nth, times=times):
                self.drop("case")
                rules = f"call=pwrite|write,path=*/case/{name},nth={nth},times={times},action=ENOSPC"
                outcome = self.start("case", faults=rules)
                self.assertEqual(outcome.code, 0, outcome)
                self.check_same("case", whole, rules)
                self.assertEqual((self.dir / "case/main.log").read_text(), (self.dir / "whole/main.log").read_text())

    def test_a_data_error_is_reported_even_if_the_last_save_fails(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                self.drop("case")
                rules = (f"call=pread,path=*/data/train*,nth={100 // ranks},times=all,action=EIO;"
                         "call=mkdir,path=*/checkpoints/tmp.*,times=all,action=ENOSPC")
                outcome = self.start("case", faults=rules, ranks=ranks)
                self.assertEqual(outcome.code, 74, outcome)
                self.assertRegex(outcome.error, r"cannot read .*data/train_000000.bin: Input/output error")
                self.assertRegex(outcome.out, r"the last save failed: cannot create .*No space left on device")

    def test_only_the_third_failed_save_in_a_row_ends_the_run(self):
        self.write_config(**{**NANO, "checkpoint_every_steps": 2})
        failures = [f"call=mkdir,path=*/checkpoints/tmp.0000000{step}.*,action=ENOSPC" for step in (2, 4, 8)]
        outcome = self.start("case", *FOREGROUND, faults=";".join(failures))
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(re.findall(r"save failed (\d) of 3 times", outcome.out), ["1", "2", "1"])
        self.drop("case")
        failures.append("call=mkdir,path=*/checkpoints/tmp.00000006.*,action=ENOSPC")
        outcome = self.start("case", *FOREGROUND, faults=";".join(failures))
        self.assertEqual(outcome.code, 74, outcome)
        self.assertEqual(len(self.records("case", "train")), 6)

    def test_a_slow_save_is_reported_once(self):
        self.write_config(**{**NANO, "train_max_steps": 600, "checkpoint_every_steps": 400, "checkpoint_keep": 1,
                             "eval_every_steps": 0, "sample_every_steps": 0})
        # The program's clock advances by half a minute.
        outcome = self.start("case", faults="call=fsync,path=*/tmp.00000400*/shard_0000.bin,action=late:31")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.out.count("the save of step 400 has not finished after"), 1, outcome)

    def test_the_log_of_a_step_is_on_the_disk_before_its_checkpoint_is_committed(self):
        operations = self.operations("whole", *FOREGROUND)
        commits = [i for i, operation in enumerate(operations)
                   if operation.call == "rename" and "/step_" in operation.detail]
        self.assertEqual(len(commits), LAST_STEP // 3)
        for name in ("metrics.jsonl", "main.log"):
            for commit in commits:
                calls = [operation.call for operation in operations[:commit] if operation.path.endswith("/" + name)]
                self.assertEqual(calls[-1], "fsync", name)

    def test_a_commit_that_could_not_be_synced_is_undone(self):
        self.write_config(**{**NANO, "checkpoint_keep": 9})
        outcome = self.start("case", *FOREGROUND, faults="call=fsync,path=*/checkpoints,action=EIO")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("step 3 | save failed 1 of 3 times: cannot sync the directory", outcome.out)
        steps = sorted(path.name for path in self.dir.glob("case/checkpoints/*"))
        self.assertEqual(steps, [f"step_{step:08}" for step in range(6, LAST_STEP + 1, 3)])

    def test_checkpoints_that_cannot_be_deleted_fail_no_save(self):
        self.write_config(**{**NANO, "checkpoint_keep": 1})
        self.start("whole")
        for flags in ([], FOREGROUND):
            with self.subTest(flags=flags):
                self.drop("case")
                outcome = self.start("case", *flags, faults="call=rename,path=*/step_0*,times=all,action=EIO")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(outcome.out.count("| checkpoint "), LAST_STEP // 3, outcome)
                self.assertEqual(outcome.out.count("warning: older checkpoints could not be deleted: cannot rename"),
                                 LAST_STEP // 3 - 1, outcome)
                self.check_same("case", self.result("whole"), flags)

    def test_a_run_on_a_disk_without_locks_refreshes_its_lock_file(self):
        self.write_config(**{**NANO, "train_max_steps": 10**6, "checkpoint_every_steps": 200, "eval_every_steps": 0,
                             "sample_every_steps": 0})
        # The program's clock advances by 11 s during each save; the lock file is refreshed every 10 s.
        faults = "call=flock,times=all,action=ENOSYS;call=fsync,path=*/tmp.*/shard_0000.bin,times=all,action=late:11"
        process = subprocess.Popen(self.command("case"), cwd=self.dir, stdout=subprocess.DEVNULL,
                                   env=self.environment(faults))
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_until(lambda: list(self.dir.glob("case/checkpoints/step_*")), "no checkpoint")
        lock = self.dir / "case/lock"
        os.utime(lock, (0, 0))
        wait_until(lambda: lock.stat().st_mtime > 0, "the lock file was not refreshed", 20)

    def test_training_continues_while_a_save_hangs(self):
        """With --long, the save hangs long enough for a warning."""
        hang_s = 40 if OPTIONS["long"] else 5
        # Steps sync a log when 4 MiB are new; with --long the log grows that large. Longer steps have shorter logs.
        long_steps = {**NANO, "train_total_batch_tokens": 10 * NANO["train_total_batch_tokens"]}
        self.write_config(**{**long_steps, "train_max_steps": 200, "checkpoint_every_steps": 0})
        self.start("case")
        times = {record["step"]: record["time"] for record in self.records("case", "train", without=())}
        every_steps = int((hang_s + 2) * 199 / (times[200] - times[1]))
        for file in ("shard_0000.bin",) if OPTIONS["long"] else ("metrics.jsonl", "shard_0000.bin"):
            with self.subTest(file):
                self.drop("case")
                self.write_config(**{**long_steps, "train_max_steps": 2 * every_steps,
                                     "checkpoint_every_steps": every_steps})
                nth = 2 if file == "metrics.jsonl" else 1  # the first sync is at opening
                outcome = self.start("case", faults=f"call=fsync,path=*/{file},nth={nth},action=hang:{hang_s}",
                                     seconds=6 * hang_s + 60)
                self.assertEqual(outcome.code, 0, outcome)
                saves = re.findall(r"step (\d+) \| checkpoint \S+, \S+ MiB in (\S+) s", outcome.out)
                self.assertEqual([int(step) for step, _ in saves], [every_steps, 2 * every_steps], outcome)
                self.assertGreater(float(saves[0][1]), hang_s - 0.1)
                times = {record["step"]: record["time"] for record in self.records("case", "train", without=())}
                during = [step for step, time in times.items() if 0.5 < time - times[every_steps] < hang_s - 0.5]
                self.assertGreater(len(during), every_steps / 20)
                self.assertEqual(f"the save of step {every_steps} has not finished after 30 s" in outcome.out,
                                 OPTIONS["long"], outcome)

    def test_a_failed_sync_of_a_log_ends_no_rank(self):
        self.start("whole", ranks=3)
        whole = self.result("whole")
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.drop("case")
                rules = "call=fsync,path=*/case/metrics.jsonl,nth=2,action=EIO,rank=0"
                rules = rules if ranks > 1 else rules.replace(",rank=0", "")
                outcome = self.start("case", faults=rules, ranks=ranks)
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(self.records("case"), whole["records"])

    def test_a_checkpoint_whose_directory_could_not_be_synced_is_not_committed(self):
        """A power cut could lose its name. Foreground saves: a save's thread may get no core before the kill."""
        operations = self.operations("whole", *FOREGROUND)
        whole = self.result("whole")
        syncs = [operation for operation in operations
                 if operation.call == "fsync" and operation.path.endswith("/checkpoints")]
        commits = [i for i, sync in enumerate(syncs, 1) if operations[operations.index(sync) - 2].call == "rename"
                   and "/step_" in operations[operations.index(sync) - 2].detail]
        self.assertEqual(len(commits), LAST_STEP // 3)
        for commit, step in zip(commits[:-1], range(3, LAST_STEP, 3)):
            with self.subTest(step=step):
                self.drop("case")
                rules = f"call=fsync,path=*/case/checkpoints,nth={commit},action=EIO;" \
                        f"call=pwrite,path=*/case/metrics.jsonl,nth={step + 3},action=kill"
                outcome = self.start("case", *FOREGROUND, faults=rules)
                self.assertFalse(self.step_dir(step, "case").exists(), outcome)
                self.assertLess(outcome.reported_step(), step)
                self.recover("case", outcome, whole, rules)

    def test_short_and_interrupted_transfers_are_completed(self):
        self.start("whole")
        whole = self.result("whole")
        for action in ("short", "EINTR"):
            with self.subTest(action):
                self.drop("case")
                rules = f"call=read|pread|write|pwrite,path={self.dir}*,rate=0.5,seed=3,action={action}"
                outcome = self.start("case", faults=rules)
                self.assertEqual(outcome.code, 0, outcome)
                self.check_same("case", whole, rules)

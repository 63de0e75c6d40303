"""--supervise and --nproc: a run restarts after errors that a restart can fix, and stops with a checkpoint."""
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from test_ranks import is_gone
from trainer import ENVIRONMENT, FROM_TERMINAL, TRAINER, TrainerTest, trainers_in, wait_until

ENDLESS = {"train_max_steps": 100000, "schedule_name": "constant", "schedule_warmup_steps": 2}
HAS_MPIRUN = bool(shutil.which("mpirun"))
# Steps take seconds even on a fast machine, longer than mpirun waits before it kills the ranks.
LONG_STEPS = {"train_total_batch_tokens": 60 * 20000, "train_max_steps": 1000}


def tree(pid):
    """Returns all descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(text.split()[0]))
    found, unvisited = [], [pid]
    while unvisited:
        children = parents.get(unvisited.pop(), [])
        found += children
        unvisited += children
    return found


class Supervised(TrainerTest):
    program = TRAINER

    def start(self, *args, **changes):
        """Starts the trainer with a configuration in the background, as from a terminal."""
        config = self.write_config(**changes)
        process = subprocess.Popen([self.program, config, *map(str, args)], cwd=self.dir, text=True, **FROM_TERMINAL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        for pid in [process.pid, *tree(process.pid), *self.ranks()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def ended(self, process, code, seconds=120):
        """Requires this exit code and that no started process is left; returns the output."""
        started = tree(process.pid)
        said = process.communicate(timeout=seconds)[1]
        self.assertEqual(process.returncode, code, said)
        wait_until(lambda: all(map(is_gone, started)) and not self.ranks(), "a process is still running")
        return said

    def ranks(self):
        """Returns the pids of the ranks."""
        return trainers_in(self.dir, self.program)

    def committed(self, run="run"):
        return sorted(int(path.name[5:]) for path in (self.dir / run / "checkpoints").glob("step_*"))

    def wait_for_ranks(self, count, without=()):
        wait_until(lambda: len(set(self.ranks()) - set(without)) == count, "the ranks have not begun")
        return [pid for pid in self.ranks() if pid not in without]

    def wait_for_commit(self, after):
        wait_until(lambda: max(self.committed(), default=0) > after, "no checkpoint was committed")

    def check_whole(self, *flags, **changes):
        """Requires the result of an uninterrupted run."""
        steps = len(self.records(kind="train"))
        self.train(*flags, run_dir="whole", threads=1, **{**changes, "train_max_steps": steps})
        self.assertEqual(self.records("run"), self.records("whole"))
        self.assertEqual(self.logical_state(steps, "run"), self.logical_state(steps, "whole"))


class One(Supervised):
    """A run of one rank."""

    def test_a_killed_rank_is_restarted_and_the_run_is_the_same(self):
        changes = dict(ENDLESS, checkpoint_every_steps=20, model_dropout=0.1)
        process = self.start("--supervise", "--fresh", **changes)
        self.wait_for_commit(0)
        for number in (signal.SIGKILL, signal.SIGSEGV):
            ranks = self.wait_for_ranks(1)
            newest = max(self.committed())
            self.wait_for_commit(newest)
            os.kill(ranks[0], number)
            self.wait_for_ranks(1, without=ranks)
            self.wait_for_commit(max(self.committed()))
        process.send_signal(signal.SIGTERM)
        said = self.ended(process, 75)
        self.assertRegex(said, r"exit code 137 \(killed by signal 9, Killed\); restarting in 1 s\n")
        self.assertIn("exit code 139", said)
        self.assertFalse((self.dir / "run.old-1").exists())
        self.check_whole(**{**changes, "checkpoint_every_steps": 0})

    def test_a_stopped_rank_is_detected_and_restarted(self):
        process = self.start("--supervise", **ENDLESS, checkpoint_every_steps=20, parallel_silence_s=4)
        self.wait_for_commit(0)
        ranks = self.wait_for_ranks(1)
        os.kill(ranks[0], signal.SIGSTOP)
        self.wait_for_ranks(1, without=ranks)
        self.wait_for_commit(max(self.committed()))
        process.send_signal(signal.SIGINT)
        said = self.ended(process, 75)
        self.assertRegex(said, rf"rank 0 on \S+ \(pid {ranks[0]}\) hangs: no heartbeat for")
        self.assertIn("exit code 80", said)

    def test_data_that_cannot_be_listed_temporarily_is_retried(self):
        for number in range(60):
            shutil.copytree(self.dir / "data", self.dir / f"part{number}")
        parts = [{"path": f"part{number}/train_*.bin", "weight": 1} for number in range(60)]
        config = self.write_config(data_train=parts)
        process = subprocess.Popen(["prlimit", "--nofile=40:40", TRAINER, "--supervise", config], cwd=self.dir,
                                   text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT)
        self.addCleanup(self.end, process)
        said = process.stderr.readline()
        self.assertRegex(said, r"data.train: cannot list .*: Too many open files")
        self.assertRegex(process.stderr.readline(), r"exit code 74 .*; restarting in 1 s")
        process.send_signal(signal.SIGTERM)
        self.ended(process, 75)

    def test_a_signal_to_the_rank_alone_does_not_end_the_run(self):
        process = self.start("--supervise", **ENDLESS)
        self.wait_for_steps(process)
        ranks = self.wait_for_ranks(1)
        os.kill(ranks[0], signal.SIGTERM)
        self.wait_for_ranks(1, without=ranks)
        process.send_signal(signal.SIGTERM)
        said = self.ended(process, 75)
        self.assertIn("exit code 75 (stopped by a signal, checkpoint committed); restarting in 1 s", said)

    def test_a_signal_at_any_moment_of_the_start_ends_with_75(self):
        for delay_s in (0.02, 0.05, 0.1, 0.2, 0.4):
            with self.subTest(delay_s):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start("--supervise", **ENDLESS)
                time.sleep(delay_s)
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
                # -15: the program had not started yet.
                self.assertIn(process.returncode, (75, -signal.SIGTERM) if delay_s < 0.1 else (75,))
                self.assertLessEqual(len(self.committed()), 1)

    def test_a_second_signal_ends_the_run_at_once(self):
        process = self.start("--supervise", **{**ENDLESS, **LONG_STEPS})
        self.wait_for_ranks(1)
        time.sleep(2)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        self.ended(process, 130, seconds=30)
        self.assertEqual(self.committed(), [])

    def test_final_errors_are_not_restarted(self):
        said = self.run_trainer(self.write_config(data_train="nothing_*.bin"), "--supervise", expect=66)
        self.assertEqual(said.count("nothing_"), 1, said)
        self.assertIn("not restarted", said)
        (self.dir / "run").mkdir()
        (self.dir / "run/file").touch()
        self.assertIn("--resume", self.train("--supervise", expect=64))

    def test_if_the_supervisor_is_killed_its_rank_saves_and_ends(self):
        process = self.start("--supervise", **ENDLESS)
        self.wait_for_steps(process)
        process.kill()
        wait_until(lambda: not self.ranks(), "the rank is still running")
        self.assertEqual(self.committed(), [len(self.records(kind="train"))])

    def test_a_launcher_starts_it_without_a_second_supervisor(self):
        slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                 "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
        said = self.run_trainer(self.write_config(), "--supervise", expect=64, **slurm)
        self.assertIn("start the ranks itself, but Slurm has started 2: use train_gpt --supervise ... -- srun", said)


class Launchers(Supervised):
    """A stand-in for a launcher, which exits with the given codes in turn."""

    def supervise(self, *codes, expect, commits=False):
        (self.dir / "launcher").write_text(f"""#!/bin/bash
            echo "$*" >> calls
            count=$(wc -l < calls)
            {"rm -rf run/checkpoints; mkdir -p run/checkpoints/step_$(printf %08d $count)" if commits else ""}
            exit "$(sed -n "${{count}}p" codes)"
        """)
        (self.dir / "launcher").chmod(0o755)
        (self.dir / "codes").write_text("".join(f"{code}\n" for code in codes))
        said = self.run_trainer(self.write_config(), "--supervise", "--auto", "--", "./launcher", "-np", 3,
                                expect=expect)
        calls = (self.dir / "calls").read_text().splitlines()
        # After the first checkpoint, it may not start from scratch.
        later = "--resume" if commits else "--auto"
        flags = ["--auto", *[later] * (len(calls) - 1)]
        self.assertEqual(calls, [f"-np 3 {TRAINER} config.json {flag}" for flag in flags])
        return len(calls), said

    def test_it_gives_up_after_three_restarts_without_a_checkpoint(self):
        starts, said = self.supervise(76, 137, 80, 74, 0, expect=74)
        self.assertEqual(starts, 4)
        self.assertEqual(re.findall(r"restarting in (\d+) s", said), ["1", "2", "4"])
        self.assertIn("exit code 74 (reading or writing failed, disk full included); giving up after 3 restarts", said)

    def test_it_continues_as_long_as_checkpoints_are_committed(self):
        starts, said = self.supervise(76, 76, 71, 139, 76, 0, expect=0, commits=True)
        self.assertEqual(starts, 6)
        self.assertEqual(re.findall(r"restarting in (\d+) s", said), ["1"] * 5)

    def test_codes_that_are_not_listed_are_final(self):
        starts, said = self.supervise(1, expect=1)
        self.assertEqual(starts, 1)
        self.assertIn("exit code 1, which a restart would not fix: not restarted", said)

    def test_the_launcher_determines_the_number_of_ranks(self):
        (self.dir / "launcher").write_text("#!/bin/bash\nexit 65\n")
        (self.dir / "launcher").chmod(0o755)
        config = self.write_config(parallel_tensor=2, parallel_pipeline=2)
        self.run_trainer(config, "--supervise", "--", "./launcher", expect=65)
        said = self.run_trainer(config, "--supervise", "--nproc", 2, expect=78)
        self.assertIn("the number of ranks (2) must be a multiple", said)

    def test_processes_that_a_launcher_leaves_are_killed(self):
        (self.dir / "launcher").write_text("#!/bin/bash\nsetsid sleep 600 &\necho $! > left\nexit 65\n")
        (self.dir / "launcher").chmod(0o755)
        self.run_trainer(self.write_config(), "--supervise", "--", "./launcher", expect=65)
        self.assertTrue(is_gone(int((self.dir / "left").read_text())))

    @unittest.skipUnless(HAS_MPIRUN, "there is no mpirun")
    def test_mpirun_that_hangs_after_its_ranks_is_killed(self):
        mpirun = self.dir / "bin/mpirun"
        mpirun.parent.mkdir()
        mpirun.write_text("#!/usr/bin/env python3\nimport os, pathlib, subprocess, time\n"
                          "pathlib.Path('pid').write_text(str(os.getpid()))\n"
                          "subprocess.run(['sleep', '1'])\ntime.sleep(600)\n")
        mpirun.chmod(0o755)
        said = self.run_trainer(self.write_config(), "--nproc", 2, expect=80,
                                PATH=f"{mpirun.parent}:{os.environ['PATH']}")
        self.assertIn("all ranks have ended, but mpirun did not end within 20 s", said)
        self.assertTrue(is_gone(int((self.dir / "pid").read_text())))

    def test_a_launcher_that_is_missing(self):
        said = self.run_trainer(self.write_config(), "--supervise", "--", "./nothing", expect=66)
        self.assertIn("train_gpt: cannot start ./nothing: No such file or directory", said)
        self.assertIn("--", self.run_trainer(self.write_config(), "--supervise", "--", expect=64))
        self.assertIn("--nproc", self.run_trainer(self.write_config(), "--nproc", 2, "--supervise", "--", "mpirun",
                                                  expect=64))


class Evaluation(Supervised):
    """Validations of a few seconds, questions and samples that a signal interrupts."""

    CHANGES = {"train_max_steps": 8, "eval_every_steps": 2, "sample_every_steps": 2, "eval_patience": 50,
               "checkpoint_keep_best": True, "checkpoint_keep": 9, "data_val": "data/train_*.bin", "eval_stride": 1,
               "sample_tokens": 5, "checkpoint_every_steps": 0}

    def check(self, *flags, after='"step":2', kinds=("train", "train"), **changes):
        """Sends the signal when `after` is in the log, and requires these kinds of records in it."""
        changes = {**self.CHANGES, **changes}
        self.train(*flags, run_dir="whole", **changes)
        process = self.start(*flags, **changes)
        metrics = self.dir / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and after in metrics.read_text(), "no step was made")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 75, said)
        self.assertEqual([record["kind"] for record in self.records()], list(kinds))
        self.assertEqual(self.committed(), [2])
        # Resume, kill before it saves anything, and resume again: repeated records are written once.
        process = self.start(*flags, "--resume", **changes)
        wait_until(lambda: len(self.records()) > 2, "the validation was not repeated")
        self.end(process)
        process.communicate()
        for step in self.committed():
            if step > 2:
                shutil.rmtree(self.step_dir(step))
        self.train(*flags, "--resume", **changes)
        self.assertEqual(self.records("run"), self.records("whole"))
        self.assertEqual(self.logical_state(8, "run"), self.logical_state(8, "whole"))
        samples = [(self.dir / run / "samples.jsonl").read_text().count("\n") for run in ("run", "whole")]
        self.assertEqual(samples, [4, 4])

    def test_a_resumed_run_repeats_an_interrupted_validation(self):
        self.check()

    def test_a_resumed_run_repeats_interrupted_questions(self):
        question = {"context": "once", "choices": [" upon a", " time"], "label": 0}
        (self.dir / "many.jsonl").write_text((json.dumps(question) + "\n") * 5000)
        self.check(data_val="", eval_questions="many.jsonl", eval_max_questions=5000, eval_patience=0,
                   checkpoint_keep_best=False)

    def test_a_validation_before_an_interrupted_sample_counts_once(self):
        # The most likely token is the one before it, so no sample ends before it has all its tokens.
        self.check(after='"kind":"val","step":2', kinds=("train", "train", "val"), data_val="data/val_*.bin",
                   eval_stride=0, sample_prompt="a", sample_temperature=0, sample_tokens=6000, optim_learning_rate=0)
        self.assertEqual(self.manifest(8)["state"]["best_validation"],
                         self.manifest(8, "whole")["state"]["best_validation"])

    @unittest.skipUnless(HAS_MPIRUN, "there is no mpirun")
    def test_on_two_ranks(self):
        self.check("--nproc", 2)


@unittest.skipUnless(HAS_MPIRUN, "there is no mpirun")
class Several(Supervised):
    """A run of several ranks started by mpirun."""

    def segments(self):
        """Returns the files in the folder of the ranks' shared memory, as named by Open MPI."""
        maps = Path(f"/proc/{self.ranks()[0]}/maps").read_text()
        return os.listdir(re.search(r" (/\S*)/(?:vader|sm)_segment", maps)[1])

    def test_killed_ranks_are_restarted_and_the_run_is_the_same(self):
        changes = dict(ENDLESS, checkpoint_every_steps=20, parallel_deterministic_reduce=True, log_norms_every_steps=0)
        process = self.start("--supervise", "--nproc", 2, **changes)
        self.wait_for_commit(0)
        segments = self.segments()
        for victims in ("first", "second", "both", "mpirun"):
            ranks = self.wait_for_ranks(2)
            launcher = [pid for pid in tree(process.pid) if Path(f"/proc/{pid}/comm").read_text() == "mpirun\n"]
            # Only mpirun removes the shared memory of killed ranks.
            for pid in {"first": ranks[:1], "second": ranks[1:], "both": ranks, "mpirun": launcher}[victims]:
                os.kill(pid, signal.SIGKILL)
            self.wait_for_ranks(2, without=ranks)
            self.wait_for_commit(max(self.committed()))
            self.assertEqual(len(self.segments()), len(segments))  # killed ranks left no segment
        os.killpg(process.pid, signal.SIGINT)
        said = self.ended(process, 75)
        self.assertEqual(said.count("restarting in 1 s"), 4, said)
        self.check_whole(**{**changes, "checkpoint_every_steps": 0})

    def check_stop(self, number, *flags):
        shutil.rmtree(self.dir / "run", ignore_errors=True)
        process = self.start("--nproc", 2, *flags, **LONG_STEPS)
        metrics = self.dir / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text(), "no step was made")
        os.killpg(process.pid, number)
        said = self.ended(process, 75)
        self.assertEqual(self.committed(), [len(self.records())], said)

    def test_long_steps_end_before_the_ranks_are_killed(self):
        self.check_stop(signal.SIGINT)
        self.check_stop(signal.SIGTERM, "--supervise")

    def test_a_signal_at_any_moment_of_the_start_ends_with_75(self):
        for delay_s in (0.1, 0.3, 0.6, 1):
            with self.subTest(delay_s):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start("--supervise", "--nproc", 2, **ENDLESS)
                time.sleep(delay_s)
                process.send_signal(signal.SIGTERM)
                self.ended(process, 75)

    def test_ranks_that_stop_before_the_rendezvous_are_detected(self):
        for supervised in (True, False):
            with self.subTest(supervised=supervised):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start("--nproc", 2, *(["--supervise"] if supervised else []), train_max_steps=3,
                                     parallel_start_timeout_s=25, parallel_step_timeout_s=25)
                wait_until(self.ranks, "no rank has begun")
                victim = self.ranks()[0]
                os.kill(victim, signal.SIGSTOP)
                said = self.ended(process, 0 if supervised else 80)
                self.assertIn("25 s", said)

    def test_all_ranks_are_stopped(self):
        process = self.start("--supervise", "--nproc", 2, **ENDLESS, checkpoint_every_steps=20, parallel_silence_s=5)
        self.wait_for_commit(0)
        ranks = self.wait_for_ranks(2)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        self.wait_for_ranks(2, without=ranks)
        self.wait_for_commit(max(self.committed()))
        process.send_signal(signal.SIGTERM)
        self.assertIn("no heartbeat", self.ended(process, 75))

    def test_if_a_launcher_is_killed_no_rank_is_left(self):
        for name in ("train_gpt", "mpirun"):
            with self.subTest(name):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start("--supervise", "--nproc", 2, **ENDLESS, checkpoint_every_steps=20)
                self.wait_for_commit(0)
                ranks = self.wait_for_ranks(2)
                started = tree(process.pid)
                victim = process.pid if name == "train_gpt" else next(
                    pid for pid in started if Path(f"/proc/{pid}/comm").read_text() == "mpirun\n")
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda: all(map(is_gone, ranks)), "a rank is still running")
                if name == "mpirun":
                    self.wait_for_ranks(2, without=ranks)
                    process.send_signal(signal.SIGTERM)
                    self.assertIn("exit code 137", self.ended(process, 75))

    def test_killed_ranks_leave_no_shared_memory(self):
        for flags in ((), ("--supervise",)):
            with self.subTest(flags):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start(*flags, "--nproc", 2, **ENDLESS, checkpoint_every_steps=20)
                self.wait_for_commit(0)
                ranks = self.wait_for_ranks(2)
                maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in ranks)
                folders = set(re.findall(r"/dev/shm/train_gpt\.\w+", maps))
                self.assertEqual(len(folders), 1, maps)
                if flags:
                    process.send_signal(signal.SIGTERM)  # so that no later start removes the folder
                    os.kill(tree(process.pid)[0], signal.SIGKILL)
                    self.ended(process, 137)
                else:
                    os.kill(ranks[0], signal.SIGKILL)
                    process.communicate(timeout=60)
                self.assertFalse(any(map(os.path.exists, folders)))

    def test_shared_memory_of_killed_launchers_is_removed_at_the_next_start(self):
        processes = [self.start("--nproc", 2, **ENDLESS, run_dir=f"run{number}") for number in (0, 1)]
        wait_until(lambda: len(self.ranks()) == 4, "the ranks have not begun")
        folders = []
        for process in processes:
            environment = Path(f"/proc/{tree(process.pid)[0]}/environ").read_bytes()
            folders.append(Path(re.search(rb"btl_vader_backing_directory=([^\0]+)", environment)[1].decode()))
        self.addCleanup(shutil.rmtree, folders[0], ignore_errors=True)
        processes[0].kill()
        processes[0].wait()
        others = Path(tempfile.mkdtemp(prefix="other.", dir="/dev/shm"))
        self.addCleanup(others.rmdir)
        self.assertTrue(folders[0].exists())
        self.run_trainer("--nproc", 2, self.write_config("short.json", run_dir="short", train_max_steps=1))
        self.assertFalse(folders[0].exists())
        self.assertTrue(folders[1].exists() and others.exists())
        self.assertFalse(list(Path("/dev/shm").glob(".train_gpt.*")))
        processes[1].send_signal(signal.SIGTERM)
        self.ended(processes[1], 75)
        self.assertFalse(folders[1].exists())

    def test_without_a_path_mpirun_is_found(self):
        environment = {key: value for key, value in ENVIRONMENT.items() if key != "PATH"}
        result = subprocess.run([TRAINER, "--nproc", "2", self.write_config(train_max_steps=1)], cwd=self.dir,
                                text=True, timeout=120, env=environment, capture_output=True)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_a_launcher_that_starts_no_rank_is_reported(self):
        (self.dir / "mpirun").write_text("#!/bin/sh\nexit ${CODE}\n")
        (self.dir / "mpirun").chmod(0o755)
        config = self.write_config()
        for code in (1, 127, 213, 243):
            said = self.run_trainer("--nproc", 2, config, expect=71, CODE=str(code), PATH=f"{self.dir}:/usr/bin:/bin")
            self.assertRegex(said, rf"\Atrain_gpt: mpirun ended with exit code {code}, [^\n]+\n\Z")
        for code in (0, 75, 137):
            self.run_trainer("--nproc", 2, config, expect=code, CODE=str(code), PATH=f"{self.dir}:/usr/bin:/bin")
        said = self.run_trainer("--nproc", 2, config, expect=66, PATH=str(self.dir / "none"))
        self.assertEqual(said, "train_gpt: cannot start mpirun: No such file or directory\n")

    def test_ranks_of_one_machine_do_not_listen_on_the_network(self):
        process = self.start("--nproc", 2, **ENDLESS)
        self.wait_for_steps(process)
        for pid in self.wait_for_ranks(2):
            sockets = {os.readlink(file)[8:-1] for file in Path(f"/proc/{pid}/fd").iterdir()
                       if os.readlink(file).startswith("socket:[")}
            for table in ("tcp", "tcp6"):
                rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
                outside = [row[1] for row in rows if row[3] == "0A" and row[9] in sockets
                           and not row[1].startswith("0100007F:")]
                self.assertEqual(outside, [])
        process.send_signal(signal.SIGTERM)
        self.ended(process, 75)


if __name__ == "__main__":
    unittest.main()

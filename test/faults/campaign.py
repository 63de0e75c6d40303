"""Common code of the campaigns: a run of about a second to inject faults into, and the checks after each fault.

After any fault is removed, the run restarted with --auto must end with the same log and weights as a run without
faults. No step that was reported as committed may be missing. Each error message names a file, and each exit code is
documented.
"""
import ctypes
import dataclasses
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "program"))
from test_ranks import MPI_ENVIRONMENT  # noqa: E402
from trainer import ROOT, TRAINER, TrainerTest  # noqa: E402

BUILD = ROOT / "build"
INJECTOR = BUILD / "inject.so"
# Options of `python3 test/faults`: every case instead of a sample, and the seed of the samples.
OPTIONS = {"long": False, "seed": 1}
LAST_STEP = 12
# Four checkpoints, two validations, two samples; 12 micro-steps, so that 1, 2 and 3 ranks do the same work.
NANO = {"model_n_layer": 1, "model_n_head": 1, "model_n_embd": 8, "train_max_steps": LAST_STEP, "train_batch_size": 1,
        "train_total_batch_tokens": 20 * 12, "checkpoint_every_steps": 3, "checkpoint_keep": 2, "eval_every_steps": 6,
        "eval_batches": 2, "sample_every_steps": 6, "sample_tokens": 4, "parallel_deterministic_reduce": True}
# A checkpoint is committed before the next step begins, so a killed run has the checkpoints of all earlier steps.
FOREGROUND = ["--set", "checkpoint.asynchronous=false"]
# System errors that the trainer may report; 70 (internal error) is not one of them.
SYSTEM_CODES = {66, 71, 73, 74, 77}
ERRORS = ["EIO", "ENOSPC", "EACCES", "EMFILE", "ESTALE", "EDQUOT", "EROFS"]


def sample(cases, count):
    """Returns all cases in a long campaign, otherwise `count` random ones; keeps their order."""
    cases = list(cases)
    if OPTIONS["long"] or len(cases) <= count:
        return cases
    return [cases[i] for i in sorted(random.Random(OPTIONS["seed"]).sample(range(len(cases)), count))]


@functools.lru_cache(maxsize=None)
def supervised(ranks):
    """Returns the prefix of a command that starts `ranks` ranks, under the trainer's supervisor if it has one."""
    has_supervisor = "--supervise" in subprocess.run([TRAINER, "--help"], capture_output=True, text=True).stdout
    return [str(TRAINER), *(["--supervise"] if has_supervisor else []), "--nproc", str(ranks)]


def have_private_mounts():
    """Gives this process and its children a private mount namespace. Returns false if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 0x40000
    return libc.unshare(clone_newns) == 0 and libc.mount(b"none", b"/", None, ms_rec | ms_private, None) == 0


@dataclasses.dataclass
class Outcome:
    """Exit code and output of one start of the trainer."""
    code: int
    out: str
    error: str

    def __str__(self):
        return f"exit {self.code}\n{self.out}{self.error}"

    def reported_step(self):
        """Returns the newest step that was reported as committed; 0 if none."""
        return max(map(int, re.findall(r"\| checkpoint \S*/step_(\d+)", self.out)), default=0)

    def first_step(self):
        """Returns the first step that was trained, or that would be the next of a complete run."""
        if complete := re.search(r"is complete: (\d+) steps are done", self.out):
            return int(complete[1]) + 1
        found = re.search(r"^run .*: steps? (?:from )?(\d+)", self.out, re.M)
        return int(found[1]) if found else None


class Operation:
    """One line of the injector's log."""

    def __init__(self, line):
        self.call, self.path, result, self.detail, _ = line.rstrip("\n").split("\t")
        self.result = int(result)


class Campaign(TrainerTest):
    changes = NANO

    def setUp(self):
        super().setUp()
        self.write_config(**self.changes)

    def command(self, run, *flags, ranks=1):
        trainer = [str(TRAINER), "config.json", "--set", f"run.dir={run}", *flags]
        return ["mpirun", "-np", str(ranks), *trainer] if ranks > 1 else trainer

    def environment(self, faults="", log=None):
        # Killed ranks leave shared memory; put it into a folder that is removed with the test.
        environment = {**MPI_ENVIRONMENT, "OMPI_MCA_btl_vader_backing_directory": str(self.dir)}
        if faults:
            environment.update(LD_PRELOAD=str(INJECTOR), FAULTS=faults, FAULTS_LOG=str(log or ""))
        return environment

    def start(self, run, *flags, faults="", log=None, ranks=1, seconds=120):
        """Runs the trainer; fails the test if it does not end in time."""
        process = subprocess.Popen(self.command(run, *flags, ranks=ranks), cwd=self.dir, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(faults, log),
                                   start_new_session=True)
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, error = process.communicate()
            self.fail(f"no end after {seconds} s with {faults}\n{out}{error}")
        return Outcome(process.returncode, out, error)

    def operations(self, run, *flags, ranks=1):
        """Returns the operations of one start on files in run.dir, and its outcome."""
        log = self.dir / f"{run}.log"
        outcome = self.start(run, *flags, faults=f"path={self.dir}/{run}*,action=log", log=log, ranks=ranks)
        self.assertEqual(outcome.code, 0, outcome)
        return [Operation(line) for line in log.read_text().splitlines()]

    def result(self, run):
        """Returns what no fault may change: log, samples and the newest weights."""
        samples = [json.loads(line) for line in (self.dir / run / "samples.jsonl").read_text().splitlines()]
        return {"records": self.records(run), "samples": [(line["step"], line["text"]) for line in samples],
                "weights": self.weights(LAST_STEP, run)}

    def check_same(self, run, reference, what):
        result = self.result(run)
        for part, value in reference.items():
            self.assertEqual(result[part], value, f"{part} of {run} differ: {what}")

    def check_sentence(self, outcome, case):
        """A run that fails reports a system error, and the message names a file."""
        self.assertIn(outcome.code, SYSTEM_CODES, f"{case}: {outcome}")
        sentences = [line for line in outcome.error.splitlines() if line.startswith("train_gpt: ")]
        self.assertTrue(sentences, f"{case}: no message\n{outcome}")
        self.assertRegex(sentences[-1], r"\b(case|half|data|config\.json)\b", f"{case}: {outcome}")

    def recover(self, run, outcome, reference, case, ranks=1):
        """Restarts without faults; the run continues from the newest reported step and ends like the reference."""
        again = self.start(run, "--auto", ranks=ranks)
        self.assertEqual(again.code, 0, f"{case}: {outcome}\nstarted again: {again}")
        if again.first_step():
            self.assertGreater(again.first_step(), outcome.reported_step(), f"{case}: {outcome}\n{again}")
        self.check_same(run, reference, case)
        return again

    def say(self, text):
        """Prints text after the test's name."""
        print(text, end=" ", flush=True)

    def drop(self, run):
        shutil.rmtree(self.dir / run, ignore_errors=True)

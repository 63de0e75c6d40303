"""Runs the stages of a part of gpu_check.py in turn, each within its share of the time, and writes the results after
each stage.
"""
import contextlib
import datetime
import io
import json
import os
import shutil
import signal
import tarfile
import tempfile
import time
from pathlib import Path

import gpu_machine
import gpu_process
import gpu_stage
import gpu_table

MARGIN_S = 12  # part of the limit reserved for ending the last stage and writing the results
MAX_OF_SHARE = 2  # a stage gets at most this multiple of its share, so that one that hangs does not use all spare time
LEAST_OF_SHARE = 0.25  # a stage is not started with less than this fraction of its share
LOGS_BYTES = 10_000_000  # size of all logs before compression
LOG_END_LINES = 15  # lines printed of the log of a stage that did not pass
MAX_DETAIL = 300
# Verdicts that do not count as a failure.
FINE = ("passed", "not run")


def say(text):
    """Prints a line; ignores a closed pipe."""
    with contextlib.suppress(OSError):
        print(text.encode("ascii", "replace").decode(), flush=True)


def plain(text):
    """One printable line of ASCII."""
    line = " ".join(str(text).split()).encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_DETAIL]


def verdict_of(outcome):
    if outcome.interrupted:
        return "interrupted"
    if outcome.timed_out:
        return "timed out"
    if outcome.code is None:
        return "failed"
    if outcome.code < 0:
        with contextlib.suppress(ValueError):
            return f"crashed ({signal.Signals(-outcome.code).name})"
        return f"crashed (signal {-outcome.code})"
    return "failed" if outcome.code else "passed"


def last_line(text):
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else ""


def replace(path, data):
    """Writes a file atomically: it has either the old or the new content at any time."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    os.replace(new, path)


class Results:
    """check.json, check.txt and logs.tgz of a part; rewritten after each stage."""

    def __init__(self, folder, head, stages):
        self.folder = folder
        self.check = {**head, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                      "complete": False, "passed": None, "seconds": 0, "stages": []}
        self.logs = {}  # name -> bytes
        self.log_half = LOGS_BYTES // (2 * (len(stages) + 1))
        self.start = time.monotonic()

    def begin(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("check.json", "check.txt", "logs.tgz"):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def add(self, row, log):
        self.check["stages"].append(row)
        if log:
            self.logs[row["name"] + ".log"] = log

    def finish(self, complete):
        self.check["complete"] = complete
        self.check["passed"] = complete and all(row["verdict"] in FINE or row["is_peer"]
                                                for row in self.check["stages"])

    def archive(self):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6) as tar:
            for name, data in self.logs.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = len(data), int(time.time())
                tar.addfile(entry, io.BytesIO(data))
        return content.getvalue()

    def save(self):
        """Writes the files. A full disk does not end the run, as the table is also printed."""
        self.check["seconds"] = round(time.monotonic() - self.start, 1)
        try:
            replace(self.folder / "check.json", (json.dumps(self.check, indent=1, default=str) + "\n").encode())
            replace(self.folder / "check.txt", self.table().encode())
            replace(self.folder / "logs.tgz", self.archive())
        except OSError as error:
            say(f"gpu_check: cannot write the results: {error}")

    def table(self):
        return gpu_table.table(self.check)


class Part:
    """One part on this machine. Setting the event `stop` ends the running stage; no other one is started."""

    def __init__(self, place, stages, limit, results, sampler, stop):
        self.place, self.stages, self.limit, self.results = place, stages, limit, results
        self.sampler, self.stop = sampler, stop
        self.gpu_is_suspect = False

    def run(self, spent=0.0):
        """Runs all stages within the limit, of which `spent` seconds have passed. The deadline of each stage is the sum
        of the shares up to its own, so it may use the time that earlier stages left but not that of later ones."""
        start, total, due = time.monotonic(), sum(stage.share for stage in self.stages), 0.0
        usable = self.limit - spent - min(MARGIN_S, self.limit / 4)
        for stage in self.stages:
            share = stage.share / total * usable
            due += share
            seconds = start + due - time.monotonic()
            if not stage.is_peer:
                seconds = min(seconds, MAX_OF_SHARE * share)
            if self.stop.is_set():
                return self.results.finish(complete=False)
            self.run_stage(stage, seconds, seconds < LEAST_OF_SHARE * share)
        return self.results.finish(complete=not self.stop.is_set())

    def run_stage(self, stage, seconds, too_late):
        begin = time.monotonic()
        log = gpu_process.Log(self.results.log_half)
        row = {"name": stage.name, "verdict": "", "seconds": 0.0, "bound_s": round(max(seconds, 0.0), 1), "detail": "",
               "is_peer": stage.is_peer, "workload": stage.workload, "clocks": {}, "figures": {}}
        say(f"== {stage.name}, at most {max(0, seconds):.0f} s")
        try:
            if too_late:
                row["verdict"], row["detail"] = "no time", f"{max(0, seconds):.0f} s were left"
            else:
                self.carry_out(stage, seconds, log, row)
        except gpu_stage.NotRun as reason:
            row["verdict"], row["detail"] = "not run", str(reason)
        except Exception as error:  # an error in one stage must not stop the others
            row["verdict"], row["detail"] = "failed", f"{type(error).__name__}: {error}"
        end = time.monotonic()
        row["seconds"], row["clocks"] = round(end - begin, 1), self.sampler.between(begin, end)
        row["detail"] = plain(row["detail"])
        self.results.add(row, log.content())
        self.results.save()
        self.announce(row, log)

    def announce(self, row, log):
        say(f"== {row['name']}: {row['verdict']} after {row['seconds']:.0f} s: {row['detail']}")
        if row["verdict"] not in (*FINE, "missing", "no time", "no GPU"):
            for line in log.text()[-8000:].rstrip().split("\n")[-LOG_END_LINES:]:
                say("   | " + plain(line)[:160])

    def carry_out(self, stage, seconds, log, row):
        missing = [name for name in stage.programs if not os.access(self.place.program(name), os.X_OK)]
        if missing:
            row["verdict"], row["detail"] = "missing", f"{', '.join(missing)} in {self.place.programs}"
            return
        if self.gpu_is_suspect:
            problem = gpu_machine.gpu_problem()
            if problem:
                row["verdict"], row["detail"] = "no GPU", problem
                return
        command = stage.command(self.place, stage, seconds)
        outcome = gpu_process.run(command, seconds, log, self.stop, self.place.environment(stage), self.place.root)
        row["verdict"] = verdict_of(outcome)
        self.gpu_is_suspect = row["verdict"] != "passed"
        if outcome.error:
            row["detail"] = outcome.error
        else:
            self.read(stage, log.text(), row)

    def read(self, stage, output, row):
        """Reads the output. If the program failed, keeps the figures that it wrote before."""
        with contextlib.suppress(Exception):
            row["figures"] = gpu_stage.load_figures(self.place, stage)
        passed = row["verdict"] == "passed"
        try:
            reading = stage.read(self.place, stage, output)
            row["detail"], row["figures"] = reading.detail, gpu_stage.finite(reading.figures) or row["figures"]
            if passed and not reading.good:
                row["verdict"] = "failed"
        except gpu_stage.NotRun:
            raise
        except Exception as error:
            if passed:
                row["verdict"] = "failed"
                row["detail"] = f"cannot read the result: {type(error).__name__}: {error}"
            else:
                row["detail"] = last_line(output)


@contextlib.contextmanager
def work_folder():
    """A temporary folder, removed afterwards if possible."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

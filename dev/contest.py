#!/usr/bin/env python3
"""A contest of language models on a CPU: each trains for 300 s and then predicts held-out text. See docs/contest.md.

    dev/contest.py ENTRY... [--text FILE] [--seconds 300] [--threads 2] [--seeds 1] [--tune] [--out DIR]

ENTRY is a program such as dev/contest_train_gpt.py, or a command such as "python3 mine.py". It is run as

    ENTRY train TRAIN_TEXT OUT SECONDS THREADS
    ENTRY score OUT HELD_OUT_TEXT THREADS

with CONTEST_SEED = 1, 2, ..., --seeds. Prints a table of wall times and bits per byte, next to `xz -9e` (not with
--tune), and appends a line of JSON per result to DIR/results.jsonl. DIR/NAME_SEED/ has the entry's files and output; it
replaces an older one.
Exit codes: 0 every entry has a result, 1 at least one was disqualified, 2 wrong usage.
"""
import argparse
import datetime
import hashlib
import json
import lzma
import math
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peer_torch import end_with_parent

TRAIN_FRACTION = 0.95
GRACE = 0.01  # a training or scoring that takes longer than SECONDS by more than this fraction is ended, disqualified


class Disqualified(Exception):
    """Why an entry has no result."""


def fail(reason):
    print(f"contest: {reason}", file=sys.stderr)
    sys.exit(2)


def read(path):
    """Returns the text in a file, or the King James text if the path is None."""
    try:
        if path:
            return Path(path).read_bytes()
        return subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"{error}" if path else f"{error}; install Debian's package bible-kjv, or name a text with --text")


def split(text):
    """Returns the training part, the first 95 % up to the end of a line, and the rest: the same parts as `prepare`."""
    begin = text.find(b"\n", max(0, int(TRAIN_FRACTION * len(text)) - 1)) + 1
    if begin in (0, len(text)):
        fail(f"the text of {len(text)} bytes cannot be split: no line begins in its last 5 %")
    return text[:begin], text[begin:]


def cpu_name():
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return names[0] if names else platform.machine()


def total_nats(score, size):
    """Returns the sum of the lines "BYTES NATS" of a score. Fails if they do not describe exactly `size` bytes."""
    count, nats = 0, 0.0
    for number, line in enumerate(score.decode(errors="replace").splitlines(), 1):
        try:
            piece, cost = line.split()
            piece, cost = int(piece), float(cost)
        except ValueError:
            piece, cost = 0, math.nan
        if piece < 1 or not 0 <= cost < math.inf:
            raise Disqualified(f"line {number} of the score is {line[:80]!r}, but must be BYTES NATS")
        count, nats = count + piece, nats + cost
    if count != size:
        raise Disqualified(f"the pieces of the score have {count} bytes, the held-out text {size}")
    return nats


class Contest:
    def __init__(self, options, text):
        self.options, self.out = options, Path(options.out).resolve()
        self.train_text, self.held_out = split(text)
        self.cpus = sorted(os.sched_getaffinity(0))[:options.threads]
        self.out.mkdir(parents=True, exist_ok=True)
        self.paths = {name: self.out / f"{name}.txt" for name in ("train", "held_out")}
        self.record = dict(seconds=options.seconds, threads=options.threads, cpu=cpu_name(), tuning=options.tune,
                           text_sha256=hashlib.sha256(text).hexdigest(), held_out_bytes=len(self.held_out))

    def in_child(self):
        os.sched_setaffinity(0, self.cpus)
        end_with_parent()

    def run(self, entry, folder, seed, *arguments):
        """Runs a subcommand and ends all its processes. Returns its wall time in seconds and its output."""
        what, limit = arguments[0], self.options.seconds * (1 + GRACE)
        environment = {**os.environ, "CONTEST_SEED": str(seed), "OMP_NUM_THREADS": str(self.options.threads),
                       "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "tmp")}
        output = folder / f"{what}.out"
        with output.open("wb") as stdout, (folder / f"{what}.err").open("wb") as stderr:
            begin = time.monotonic()
            try:
                process = subprocess.Popen([*shlex.split(entry), *map(str, arguments)], env=environment, stdout=stdout,
                                           stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True,
                                           preexec_fn=self.in_child)
            except OSError as error:
                raise Disqualified(f"cannot start: {error}") from error
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise Disqualified(f"{what} took more than {limit:g} s") from None
            finally:
                took = time.monotonic() - begin
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        if took > limit:
            raise Disqualified(f"{what} took {took:.2f} s, more than {limit:g} s")
        if code != 0:
            raise Disqualified(f"{what} failed with exit code {code}, see {stderr.name}")
        return took, output.read_bytes()

    def result(self, entry, name, seed):
        """Returns the record of one training and scoring. Each text exists only while the entry may see it."""
        folder = self.out / f"{name}_{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        for subfolder in ("out", "tmp"):
            (folder / subfolder).mkdir(parents=True)
        record = dict(seed=seed, settings=os.environ.get("CONTEST_SETTINGS", ""))
        try:
            self.paths["train"].write_bytes(self.train_text)
            record["train_s"], _ = self.run(entry, folder, seed, "train", self.paths["train"], folder / "out",
                                            f"{self.options.seconds:g}", self.options.threads)
            self.paths["train"].unlink(missing_ok=True)
            self.paths["held_out"].write_bytes(self.held_out)
            record["score_s"], score = self.run(entry, folder, seed, "score", folder / "out", self.paths["held_out"],
                                                self.options.threads)
            record["nats"] = total_nats(score, len(self.held_out))
            record["bits_per_byte"] = record["nats"] / math.log(2) / len(self.held_out)
        except Disqualified as reason:
            record["disqualified"] = str(reason)
        finally:
            for path in self.paths.values():
                path.unlink(missing_ok=True)
        return self.log(name, record)

    def xz(self):
        """Returns the record of xz: the bits that the held-out text adds to the compressed training text."""
        train, both = (len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
                       for text in (self.train_text, self.train_text + self.held_out))
        return self.log("xz -9e", dict(bits_per_byte=8 * (both - train) / len(self.held_out)))

    def log(self, name, result):
        date = datetime.datetime.now().isoformat(timespec="seconds")
        record = dict(entry=name, date=date, **self.record, **result)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record


def table(results):
    """Returns the lines of a Markdown table; the results of an entry differ by their seed."""
    lines = ["| entry | training, s | scoring, s | bits per byte |", "|---|---:|---:|---:|"]
    for name, records in results.items():
        reasons = [record["disqualified"] for record in records if "disqualified" in record]
        if reasons:
            lines.append(f"| {name} | | | disqualified: {reasons[0]} |")
            continue
        bits = [record["bits_per_byte"] for record in records]
        times = [f"{max(record[key] for record in records):.1f}" if key in records[0] else ""
                 for key in ("train_s", "score_s")]
        seeds = f" ({min(bits):.4f} to {max(bits):.4f}, {len(bits)} seeds)" if len(bits) > 1 else ""
        lines.append(f"| {name} | {times[0]} | {times[1]} | {statistics.mean(bits):.4f}{seeds} |")
    return lines


def names_of(entries):
    """Returns a name for each entry: the stem of its last word, with a number if it occurs twice."""
    names = []
    for entry in entries:
        stem = Path(shlex.split(entry)[-1]).stem
        names.append(next(name for name in [stem, *(f"{stem}_{i}" for i in range(2, 1000))] if name not in names))
    return names


def main():
    parser = argparse.ArgumentParser(description="A contest of language models on a CPU; see docs/contest.md.")
    parser.add_argument("entries", nargs="+", metavar="ENTRY", help="a program, or a command in quotes")
    parser.add_argument("--text", metavar="FILE", help="default: the King James text of Debian's package bible-kjv")
    parser.add_argument("--seconds", type=float, default=300, help="time of a training, and of a scoring")
    parser.add_argument("--threads", type=int, default=2, help="number of CPUs that an entry may use")
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings of each entry")
    parser.add_argument("--tune", action="store_true", help="use only the training part as the text, to try settings")
    parser.add_argument("--out", metavar="DIR", default="runs/contest")
    options = parser.parse_args()
    if not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads {options.threads}: this machine has {len(os.sched_getaffinity(0))} CPUs")
    if options.seconds <= 0 or options.seeds < 1:
        parser.error("--seconds and --seeds must be positive")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through Contest.run(), which ends the entry
    text = read(options.text)
    contest = Contest(options, split(text)[0] if options.tune else text)
    names = names_of(options.entries)
    results = {name: [] for name in names}
    for seed in range(1, options.seeds + 1):
        for entry, name in zip(options.entries, names):
            record = contest.result(entry, name, seed)
            results[name].append(record)
            print(f"{name}, seed {seed}:", record.get("disqualified") or f"{record['bits_per_byte']:.4f} bits per byte",
                  flush=True)
    if not options.tune:
        results["xz -9e"] = [contest.xz()]
    print("", *table(results), sep="\n")
    sys.exit(any("disqualified" in record for records in results.values() for record in records))


if __name__ == "__main__":
    main()

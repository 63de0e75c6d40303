#!/usr/bin/env python3
"""Runs a test command repeatedly while busy loops run, and keeps the output of the runs that fail.

    dev/repeat_tests.py [--times 200] [--at-once 2] [--loops 2] [--seconds S] [--out FOLDER] COMMAND...

Runs --at-once commands at a time next to --loops busy loops, and starts no more after --seconds. The last line has the
number of runs that passed and failed, and their times. Exit code 0 only if all --times runs passed. `make flakiness`
runs tests that have been flaky before.
"""
import argparse
import collections
import concurrent.futures
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from busy_cores import Loops


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more runs after this time")
    parser.add_argument("--out", type=Path, help="folder for the output of failed runs (default: a temporary folder)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("no command given")
    folder = args.out or Path(tempfile.mkdtemp(prefix="repeat_tests_"))
    folder.mkdir(parents=True, exist_ok=True)
    begin, verdicts, seconds = time.monotonic(), collections.Counter(), []

    def run(number):
        start = time.monotonic()
        if start - begin > args.seconds:
            return
        output = folder / f"run_{number}.txt"
        with open(output, "w", encoding="utf-8") as file:
            code = subprocess.run(args.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                  check=False).returncode
        seconds.append(time.monotonic() - start)
        verdicts["passed" if code == 0 else "failed"] += 1
        if code == 0:
            output.unlink()
        else:
            print(f"run {number}: exit code {code}: {output}", flush=True)

    with Loops(args.loops), concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(run, range(1, args.times + 1)))
    print(f"{verdicts['passed']} passed, {verdicts['failed']} failed of {args.times}; a run took "
          f"{statistics.median(seconds or [0]):.1f} s (median), {max(seconds, default=0):.1f} s at most, "
          f"{args.at_once} at a time next to {args.loops} busy loops: {' '.join(args.command)}")
    return verdicts["passed"] != args.times


if __name__ == "__main__":
    sys.exit(main())

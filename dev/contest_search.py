#!/usr/bin/env python3
"""Tries settings of an entry to dev/contest.py, on the training part of the text, with a given number of trials.

    dev/contest_search.py ENTRY --trials 20 --try optim.learning_rate 0.002 0.004 0.008 --try prepare.copies 4 11

Each trial is a contest with --tune and other CONTEST_SETTINGS: a random choice from all combinations, without
repetition, added to the CONTEST_SETTINGS in the environment. Trials whose settings are in DIR/results.jsonl are not
repeated. Prints all settings, the best first. Other options go to dev/contest.py.
"""
import argparse
import itertools
import json
import math
import os
import random
import shlex
import statistics
import subprocess
from pathlib import Path

CONTEST = Path(__file__).with_name("contest.py")


def results(path):
    """Returns bits per byte for each settings: the mean over the seeds, infinite if one was disqualified."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        record = json.loads(line)
        found.setdefault(record["settings"], []).append(record.get("bits_per_byte", math.inf))
    return {settings: statistics.fmean(bits) for settings, bits in found.items()}


def main():
    parser = argparse.ArgumentParser(description="Tries settings of an entry to dev/contest.py.")
    parser.add_argument("entry", metavar="ENTRY")
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--try", dest="choices", nargs="+", action="append", required=True, metavar="KEY VALUE")
    parser.add_argument("--random-seed", type=int, default=1, help="of the choice of the trials")
    parser.add_argument("--out", metavar="DIR", default="runs/contest_search")
    options, others = parser.parse_known_args()
    words = [[shlex.quote(f"{key}={value}") for value in values] for key, *values in options.choices]
    trials = [" ".join(combination) for combination in itertools.product(*words)]
    random.Random(options.random_seed).shuffle(trials)
    given = os.environ.get("CONTEST_SETTINGS", "")
    trials = [f"{given} {trial}".strip() for trial in trials[:options.trials]]
    path = Path(options.out, "results.jsonl")
    for number, trial in enumerate(trials, 1):
        print(f"trial {number} of {len(trials)}: {trial}", flush=True)
        if trial not in results(path):
            subprocess.run([CONTEST, options.entry, "--tune", "--out", options.out, *others], check=False,
                           env={**os.environ, "CONTEST_SETTINGS": trial}, stdout=subprocess.DEVNULL)
    found = results(path)
    for trial in sorted(trials, key=lambda trial: (found.get(trial, math.inf), trial)):
        print(f"{found.get(trial, math.inf):.4f}  {trial}")


if __name__ == "__main__":
    main()

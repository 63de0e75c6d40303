#!/usr/bin/env python3
"""Compares a group of instruction probes on the GPU with the simulator's twins, word by word.

    scripts/gpu_probe.py --expected build/ptx_probe_simt --actual build/ptx_probe_cuda --json FILE GROUP

Prints a line per probe with the first differing words as soon as it has run; FILE contains the same and is rewritten
after each probe. Exit codes: 0 all words are equal; 1 words differ or probes are missing; 3 the simulator failed; that
of the GPU program if it fails. If a signal ends the GPU program, the same signal ends this one.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

MAX_DIFFERENCES = 200  # lines


def parse(line):
    """Parses "WRAPPER COUNT WORDS" into (name, words). Raises ValueError if the line is truncated."""
    name, count, words = line.split()
    if len(words) != 8 * int(count):
        raise ValueError(f"{name}: {len(words)} digits for {count} words")
    return name, [words[i:i + 8] for i in range(0, len(words), 8)]


def expected_words(program, group):
    """name -> words of the simulator's probes, in order."""
    result = subprocess.run([program, group], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        print(f"{program} {group} failed with {result.returncode}")
        sys.exit(3)
    return dict(parse(line) for line in result.stdout.splitlines())


def differences(expected, actual):
    """(index, expected, actual) of each differing word; None for a missing word."""
    pairs = [(expected[i] if i < len(expected) else None, actual[i] if i < len(actual) else None)
             for i in range(max(len(expected), len(actual)))]
    return [(i, a, b) for i, (a, b) in enumerate(pairs) if a != b]


class Report:
    def __init__(self, path, group, names):
        self.path, self.left = path, MAX_DIFFERENCES
        self.content = {"group": group, "expected": names, "probes": []}
        self.write()

    def write(self):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content) + "\n")
        os.replace(new, self.path)

    def add(self, name, expected, actual):
        found = differences(expected, actual)
        crc = f"{zlib.crc32(''.join(actual).encode()):08x}"
        print(f"{name}: {len(actual)} words, crc {crc}, " + (f"{len(found)} differ" if found else "equal"), flush=True)
        for index, a, b in found[:self.left]:
            print(f"  word {index}: expected {a}, got {b}")
        self.left -= min(len(found), self.left)
        self.content["probes"].append({"name": name, "words": len(actual), "crc32": crc, "differences": len(found)})
        self.write()


def main():
    parser = argparse.ArgumentParser(description="Compares a group of instruction probes with the simulator's twins.")
    parser.add_argument("--expected", required=True)
    parser.add_argument("--actual", required=True)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("group")
    options = parser.parse_args()
    expected = expected_words(options.expected, options.group)
    report = Report(options.json, options.group, list(expected))
    process = subprocess.Popen([options.actual, options.group], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        name, words = parse(line)
        report.add(name, expected.get(name, []), words)
    code = process.wait()
    if code < 0:
        print(f"{options.actual} {options.group} was ended by {signal.Signals(-code).name}", flush=True)
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        print(f"{options.actual} {options.group} failed with {code}")
        return code
    run = [probe["name"] for probe in report.content["probes"]]
    missing = [name for name in expected if name not in run]
    if missing:
        print(f"not run: {', '.join(missing)}")
    return 1 if missing or any(probe["differences"] for probe in report.content["probes"]) else 0


if __name__ == "__main__":
    sys.exit(main())

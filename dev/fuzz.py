#!/usr/bin/env python3
"""Fuzzes parsers under AddressSanitizer and UBSan, resumably, and prints a table of what was executed.

    dev/fuzz.py build/fuzzed/fuzzer [--runs N] [--minutes M] [--minimize] [PARSER...]

Each parser is executed N times in all (default: 10,000,000), in slices of ten minutes at most. What a slice has found
stays in build/fuzz/: the inputs that reach new code, and the number of executions in progress.json. Another call goes
on from there until every parser has had its N; --minutes ends it before that. --minimize then merges the inputs into
test/fuzz/corpus/: a few that reach different code. Parsers: those that have a folder there. Exit code 1 after a
finding, whose input is kept as build/fuzz/PARSER-crash-...: once it is mended, put the input into the corpus.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORPUS, WORK = ROOT / "test/fuzz/corpus", ROOT / "build/fuzz"
PROGRESS = WORK / "progress.json"
SLICE_S = 600
LONGEST_BYTES = 4096
MOST_INPUTS = 40  # of a corpus, besides its seeds
# Inputs that are longer than that even when small: a tokenizer has a token for each byte.
LONGER = {"tokenizer": 8192}
MEMORY = "/dev/shm"  # where directories of inputs are made, if there is one
SEEDS = re.compile(r"seed_\w+|found_\w+")


def command(fuzzer, parser, *options):
    return [fuzzer, f"-max_len={LONGER.get(parser, LONGEST_BYTES)}", "-timeout=25", "-rss_limit_mb=2560",
            f"-artifact_prefix={WORK}/{parser}-", *options, "-ignore_remaining_args=1", parser]


def run(line):
    environment = dict(os.environ)
    if os.path.isdir(MEMORY):
        environment["TMPDIR"] = MEMORY
    return subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False)


def fuzz(fuzzer, parser, done, runs, seconds):
    """One slice. Returns what libFuzzer said if there is a finding."""
    found = WORK / parser
    found.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    result = run(command(fuzzer, parser, f"-runs={runs}", f"-max_total_time={max(1, int(seconds))}",
                         "-print_final_stats=1", found, CORPUS / parser))
    executed = re.search(r"number_of_executed_units:\s*(\d+)", result.stdout)
    done["runs"] += int(executed[1]) if executed else 0
    done["seconds"] += time.monotonic() - start
    if reached := re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", result.stdout):
        done["cov"], done["ft"], done["inputs"] = map(int, reached[-1])
    return result.stdout[-6000:] if result.returncode != 0 else None


def minimize(fuzzer, parser):
    """Seeds and inputs of findings stay; of the others some of those that reach other code, named by their hashes."""
    folder = CORPUS / parser
    for old in folder.iterdir():
        if not SEEDS.fullmatch(old.name):
            old.unlink()
    run(command(fuzzer, parser, "-set_cover_merge=1", "-use_counters=0", folder, WORK / parser))
    for further in sorted(old for old in folder.iterdir() if not SEEDS.fullmatch(old.name))[MOST_INPUTS:]:
        further.unlink()


def table(progress):
    rows = ["| parser | executions | executions/s | edges | features | inputs |", "|---|---|---|---|---|---|"]
    for parser, done in progress.items():
        rows.append(f"| {parser} | {done['runs']:,} | {done['runs'] / max(1, done['seconds']):,.0f} | "
                    f"{done.get('cov', 0):,} | {done.get('ft', 0):,} | {done.get('inputs', 0):,} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fuzzer", type=Path)
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all parsers together")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("parsers", nargs="*")
    args = parser.parse_intermixed_args()
    WORK.mkdir(parents=True, exist_ok=True)
    progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    chosen = args.parsers or sorted(folder.name for folder in CORPUS.iterdir())
    end = time.monotonic() + 60 * args.minutes
    for index, name in enumerate(chosen):
        done = progress.setdefault(name, {"runs": 0, "seconds": 0.0})
        share_end = time.monotonic() + (end - time.monotonic()) / (len(chosen) - index)  # of the minutes
        while done["runs"] < args.runs and time.monotonic() < share_end:
            said = fuzz(args.fuzzer.resolve(), name, done, args.runs - done["runs"],
                        min(SLICE_S, share_end - time.monotonic()))
            PROGRESS.write_text(json.dumps(progress, indent=1))
            print(f"{name}: {done['runs']:,} executions in {done['seconds']:.0f} s", flush=True)
            if said:
                sys.exit(said)
        if args.minimize:
            minimize(args.fuzzer.resolve(), name)
    print(table(progress))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Fuzzes the parsers under AddressSanitizer and UBSan, resumably, and prints a table of executions.

    dev/fuzz.py build/fuzzed/fuzzer [--runs N] [--minutes M] [--jobs N] [--revision R] [--minimize] [PARSER...]

Executes each parser N times in total (default: 10,000,000), in slices of at most ten minutes, --jobs parsers at a time.
test/fuzz/executions.json counts the executions by the revision that the fuzzer was built from; inputs that reach new
code are kept in build/fuzz/. Another call continues until every parser has had N executions. --minutes limits the time
and divides it among the parsers, fastest first, so that the time they leave goes to the others. Ctrl-C ends it at once
and keeps the count. --minimize then merges a few inputs that reach different code into test/fuzz/corpus/. PARSER is a
folder there. Exit code 1 after a finding. Its input is kept as build/fuzz/PARSER-crash-...; after fixing the bug, add
the input to the corpus.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORPUS, WORK = ROOT / "test/fuzz/corpus", ROOT / "build/fuzz"
EXECUTIONS = ROOT / "test/fuzz/executions.json"
SLICE_S = 600
LONGEST_BYTES = 4096
MOST_INPUTS = 40  # inputs of a corpus, in addition to its seeds
# Parsers whose smallest inputs are longer than the default: a tokenizer has a token for each byte.
LONGER = {"tokenizer": 8192}
MEMORY = "/dev/shm"  # for the directories of inputs, if it exists
SEEDS = re.compile(r"seed_\w+|found_\w+")
# No allocation stacks: replaying a finding shows them. A quarantine that is small enough for the cache, but holds the
# freed memory of several executions.
SANITIZERS = {"ASAN_OPTIONS": "malloc_context_size=0:quarantine_size_mb=1:thread_local_quarantine_size_kb=16"}
# Words of JSON documents in addition to those of the seeds.
JSON_WORDS = ["null", "true", "false", "[]", "{}", '""', "-1", "0", "1e308", "1e999", "18446744073709551615",
              "9223372036854775808", "2147483648", '"nan"', "\\u0000", "\\ud800", "\\udc00", "0.1", "-0.0", '":', ","]


def revision():
    """The current commit, and whether there are changes other than the counts."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{EXECUTIONS.relative_to(ROOT)}")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def dictionary(parser):
    """Writes libFuzzer's dictionary: the strings of the text seeds."""
    words = set(JSON_WORDS)
    for seed in (CORPUS / parser).glob("seed_*"):
        content = seed.read_bytes()
        words.update(word.decode() for word in re.findall(rb'"[ -~]{1,40}?"', content[:20000]))
    path = WORK / f"{parser}.dict"
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"\n'
                            for word in sorted(words)))
    return path


def command(fuzzer, parser, *options):
    # Check for leaks only at the end of a slice: libFuzzer's thousand attempts during it take half a minute each time.
    # Faster inputs are mutated more often.
    return [fuzzer, f"-max_len={LONGER.get(parser, LONGEST_BYTES)}", "-timeout=25", "-rss_limit_mb=2560",
            "-detect_leaks=0", "-entropic_scale_per_exec_time=1", f"-artifact_prefix={WORK}/{parser}-", *options,
            "-ignore_remaining_args=1", parser]


def run(line):
    """Returns exit code, output and processor time in seconds."""
    environment = {**os.environ, **SANITIZERS}
    if os.path.isdir(MEMORY):
        environment["TMPDIR"] = MEMORY
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace")
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, usage.ru_utime + usage.ru_stime


class Campaign:
    """The executions of all calls, including this one."""

    def __init__(self, args):
        self.args = args
        self.lock = threading.Lock()
        self.revisions = json.loads(EXECUTIONS.read_text()) if EXECUTIONS.exists() else {}
        mine = {"date": time.strftime("%Y-%m-%d"), "parsers": {}}
        self.mine = self.revisions.setdefault(args.revision or revision(), mine)["parsers"]
        self.end = time.monotonic() + 60 * args.minutes
        self.waiting = sorted(args.parsers or (folder.name for folder in CORPUS.iterdir()), key=self.seconds_left)

    def executions(self, parser):
        return sum(revision["parsers"].get(parser, {}).get("executions", 0) for revision in self.revisions.values())

    def seconds_left(self, parser):
        done = [revision["parsers"][parser] for revision in self.revisions.values() if parser in revision["parsers"]]
        rate = done[-1]["executions"] / max(1, done[-1]["seconds"]) if done else 1
        return max(0, self.args.runs - self.executions(parser)) / max(1e-3, rate)

    def add(self, parser, executed, seconds, reached):
        with self.lock:
            done = self.mine.setdefault(parser, {"executions": 0, "seconds": 0})
            done["executions"] += executed
            done["seconds"] = round(done["seconds"] + seconds, 1)
            if reached:
                done["edges"], done["features"], done["inputs"] = map(int, reached)
            EXECUTIONS.write_text(json.dumps(self.revisions, indent=1) + "\n")
            print(f"{parser}: {executed:,} executions in {seconds:.0f} s of processor time, "
                  f"{self.executions(parser):,} in all", flush=True)

    def slice(self, parser, seconds):
        """Runs one slice. Returns libFuzzer's output if there is a finding."""
        found = WORK / parser
        found.mkdir(parents=True, exist_ok=True)
        code, said, used = run(command(
            self.args.fuzzer, parser, f"-runs={self.args.runs - self.executions(parser)}",
            f"-max_total_time={max(1, int(seconds))}", "-print_final_stats=1", "-reload=0", "-len_control=100",
            f"-dict={dictionary(parser)}", found, CORPUS / parser))
        executed = re.search(r"number_of_executed_units:\s*(\d+)", said)
        reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said)
        self.add(parser, int(executed[1]) if executed else 0, used, reached[-1] if reached else None)
        is_finding = code != 0 and "libFuzzer: run interrupted" not in said
        return said[-6000:] if is_finding else None

    def work(self, _):
        """Fuzzes parser after parser. Returns the findings."""
        findings = []
        while True:
            with self.lock:
                if not self.waiting:
                    return findings
                share = (self.end - time.monotonic()) * self.args.jobs / len(self.waiting)
                parser = self.waiting.pop(0)
            share_end = time.monotonic() + share
            while self.executions(parser) < self.args.runs:
                left = min(share_end, self.end) - time.monotonic()
                if left <= 0:
                    break
                if said := self.slice(parser, min(SLICE_S, left)):
                    findings.append(said)
                    break

    def stop(self, *_):
        """Handles Ctrl-C. The fuzzers get it too and print their executions."""
        self.end = 0

    def table(self):
        """The table: executions of all revisions, and the coverage of the last one."""
        rows = ["| parser | executions | executions/s | edges | features | inputs |", "|---|---|---|---|---|---|"]
        for parser in sorted({name for revision in self.revisions.values() for name in revision["parsers"]}):
            done = [revision["parsers"][parser] for revision in self.revisions.values()
                    if parser in revision["parsers"]][-1]
            rows.append(f"| {parser} | {self.executions(parser):,} | "
                        f"{done['executions'] / max(1, done['seconds']):,.0f} | {done.get('edges', 0):,} | "
                        f"{done.get('features', 0):,} | {done.get('inputs', 0):,} |")
        return "\n".join(rows)


def minimize(fuzzer, parser):
    """Keeps the seeds and the inputs of findings, and some others that reach different code, named by their hashes."""
    folder = CORPUS / parser
    for old in folder.iterdir():
        if not SEEDS.fullmatch(old.name):
            old.unlink()
    run(command(fuzzer, parser, "-set_cover_merge=1", "-use_counters=0", folder, WORK / parser))
    for further in sorted(old for old in folder.iterdir() if not SEEDS.fullmatch(old.name))[MOST_INPUTS:]:
        further.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fuzzer", type=Path)
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit for all parsers together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parsers to fuzz at a time")
    parser.add_argument("--revision", help="revision that the fuzzer was built from (default: the current commit)")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("parsers", nargs="*")
    args = parser.parse_intermixed_args()
    args.fuzzer = args.fuzzer.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(args)
    signal.signal(signal.SIGINT, campaign.stop)
    chosen = list(campaign.waiting)
    with ThreadPoolExecutor(args.jobs) as pool:
        findings = sum(pool.map(campaign.work, range(args.jobs)), [])
    if args.minimize and not findings:
        for name in chosen:
            minimize(args.fuzzer, name)
    print(campaign.table())
    if findings:
        sys.exit("\n".join(findings))


if __name__ == "__main__":
    main()

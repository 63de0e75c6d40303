#!/usr/bin/env python3
"""Benchmarks and tests the programs of this repository, or of an unpacked kit, on a GPU.

    scripts/gpu_check.py [measure] [prove] [sanitize] [--out FOLDER] [--programs FOLDER] [--limit SECONDS]
                         [--stages NAME,NAME ...] [--list]

Needs the driver (nvidia-smi), bash, python3 and the CUDA libraries that scripts/cuda_libraries.py finds. It builds
nothing: make gpu-check builds the programs for this machine's GPU first; a kit contains them. Without a GPU it only
checks that the programs start and that nothing else is missing.

    measure    wgmma and tensor maps against their twins; memory bandwidth and peak GEMM rate; ops, steps, GEMMs and the
               trainer at GPT-2's sizes, a step of Llama; six kernels in Nsight Compute; PyTorch's step
    prove      every other instruction against its twin, the model against PyTorch's outputs, loss curves against the
               CPU's, repeated and resumed runs bit by bit, NCCL with one rank
    sanitize   memcheck and racecheck of compute-sanitizer over the op tests

By default all three parts run, each for at most --limit seconds (540). The stages of a part run in order (--list), the
most valuable first. Each stage has its own process group and time limit, and may also use the time that earlier stages
left. --stages takes names or prefixes: "probe" selects every probe_GROUP.

The results in FOLDER/PART (build/gpu_check/PART) are updated after each stage: check.json (everything), check.txt (the
table, at most 8000 characters, also printed at the end) and logs.tgz (the programs' output).

Exit codes: 0 every stage that could run has passed (PyTorch's stages do not count); 1 a stage failed; 64 wrong
arguments; 69 no GPU or no CUDA libraries; 130 and 143 interrupted by Ctrl-C or SIGTERM, with the results so far.
"""
import argparse
import importlib.util
import signal
import sys
import threading
import time
from pathlib import Path

import cuda_libraries
import gpu_machine
import gpu_process
import gpu_runner
import gpu_stages

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_LIMIT_S = 540
MAX_LIMIT_S = 86400
EXIT_NOT_PASSED, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 64, 69


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"gpu_check: {message}\n")


def seconds(text):
    value = int(text)
    if not 1 <= value <= MAX_LIMIT_S:
        raise ValueError(text)
    return value


def parse_arguments():
    parser = Parser(prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="measure, prove, sanitize; default: all")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "build/gpu_check",
                        help="folder for the results, one subfolder per part (default: build/gpu_check)")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", default=ROOT / "build",
                        help="folder of the programs (default: build)")
    parser.add_argument("--limit", type=seconds, metavar="SECONDS", default=DEFAULT_LIMIT_S,
                        help=f"time limit per part, 1 to {MAX_LIMIT_S} (default: {DEFAULT_LIMIT_S})")
    parser.add_argument("--stages", metavar="NAMES", help="run only these stages, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the stages and their share of the default limit")
    # For tests on the simulator, which cannot run a real model.
    parser.add_argument("--workloads", default=",".join(gpu_stages.GPU_WORKLOADS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    for names, known, what in ((options.parts, gpu_stages.PARTS, "part"),
                               (options.workloads, gpu_stages.WORKLOADS, "workload")):
        for name in names:
            if name not in known:
                parser.error(f"'{name}' is not a {what}: {', '.join(known)}")
    options.out, options.programs = options.out.absolute(), options.programs.absolute()
    return parser, options


def choose(parser, options, place):
    """part -> the selected stages."""
    parts = [part for part in gpu_stages.PARTS if part in options.parts or not options.parts]
    chosen = {part: gpu_stages.stages_of(part, place, options.workloads) for part in parts}
    if options.stages is None:
        return chosen
    names = options.stages.split(",")
    for name in names:
        if not any(matches(stage, name) for stages in chosen.values() for stage in stages):
            parser.error(f"--stages: '{name}' is not a stage of {', '.join(parts)}; see --list")
    chosen = {part: [stage for stage in stages if any(matches(stage, name) for name in names)]
              for part, stages in chosen.items()}
    return {part: stages for part, stages in chosen.items() if stages}


def matches(stage, name):
    return stage.name == name or stage.name.startswith(name + "_")


def print_list(chosen):
    for part, stages in chosen.items():
        for stage in stages:
            print(f"{part:<10} {stage.name:<24} {stage.share:4.0f} s")


def report_without_gpu(place, why):
    """Checks everything that can be checked without a GPU."""
    found = gpu_machine.problems(place)
    notes = list(place.libraries.optional_missing)
    if importlib.util.find_spec("torch") is None:
        notes.append("this python3 has no PyTorch; the comparison is skipped")
    for text in notes:
        print(f"gpu_check: optional: {text}")
    for text in found:
        print(f"gpu_check: problem: {text}")
    print(f"gpu_check: no GPU ({why}); "
          + (f"{len(found)} other problems" if found else "no other problems"))
    return EXIT_UNAVAILABLE


def run_parts(options, place, chosen, gpu, begin, stop):
    """Runs the parts; the first began at `begin`. Returns whether everything that counts has passed."""
    head = gpu_machine.describe(place, gpu)
    passed = True
    for part, stages in chosen.items():
        if stop.is_set():
            return False
        results = gpu_runner.Results(options.out / part, {"part": part, "limit_s": options.limit, **head}, stages)
        results.begin()
        sampler = gpu_process.Sampler()
        sampler.start()
        gpu_runner.Part(place, stages, options.limit, results, sampler, stop).run(time.monotonic() - begin)
        sampler.stop()
        results.logs["clocks.csv"] = sampler.csv().encode()
        results.save()
        gpu_runner.say(f"== results are in {results.folder}")
        gpu_runner.say(results.table().rstrip("\n"))
        passed = passed and results.check["passed"]
        begin = time.monotonic()
    return passed


def main():
    begin = time.monotonic()
    parser, options = parse_arguments()
    with gpu_runner.work_folder() as work:
        place = gpu_stages.Place(ROOT, options.programs, work, cuda_libraries.Libraries(), "")
        chosen = choose(parser, options, place)
        if options.list:
            print_list(chosen)
            return 0
        stop, received = threading.Event(), []

        def interrupt(number, _frame):
            received.append(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup makes it
                signal.signal(number, interrupt)
        place.libraries = cuda_libraries.find()
        try:
            gpu = gpu_machine.query_gpu()
        except LookupError as problem:
            return report_without_gpu(place, problem)
        if place.libraries.missing:
            for text in place.libraries.missing:
                print(f"gpu_check: {text}", file=sys.stderr)
            return EXIT_UNAVAILABLE
        place.capability = gpu["capability"]
        passed = run_parts(options, place, chosen, gpu, begin, stop)
        if received:
            return 128 + received[0]
        return 0 if passed else EXIT_NOT_PASSED


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Milliseconds of a training step while other programs use the same cores: `make busy-cores`.

    dev/busy_cores.py [TRAINER ...] [--torch PYTHON] [--loops 0 2 4] [--steps 150] [--rounds 3]
    dev/busy_cores.py --pairs 20 OLD NEW                                      old and new in turn, on quiet cores
    dev/busy_cores.py --pairs 20 OLD_BENCH NEW_BENCH --workload small-4 ...   the same for two build/bench_cpu

The step: 4 layers, 128 channels, 12 sequences of 64 tokens, fp32. The programs run in turn while --loops busy loops run
on the same cores. Prints the mean over all steps except the first ten, its ratio to the same program's mean next to 0
loops, and the fair share: next to l loops, a program of n threads gets n / (n + l) of n cores, so a step takes
1 + l / n times as long. PYTHON is an interpreter with PyTorch; it runs the model of dev/peer_torch_step.py.

Cores are quiet if nothing else uses them; the share of the cores that other processes used during a run is printed too.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DEV = Path(__file__).resolve().parent
LAYERS, HEADS, WIDTH, VOCAB, BATCH, LENGTH = 4, 4, 128, 2048, 12, 64
WARM_UP = 10
TORCH = f"""
import sys, time
sys.path.insert(0, {str(DEV)!r})
import torch, peer_torch, peer_torch_step
torch.manual_seed(1)
torch.set_num_threads(len(__import__("os").sched_getaffinity(0)))
shape = peer_torch.gpt({LAYERS}, {HEADS}, {WIDTH}, {LENGTH}, {VOCAB})
step = peer_torch_step.make_step(peer_torch_step.Gpt(**shape), "cpu", "fp32", shape, {BATCH}, {LENGTH})
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    step()
    print((time.perf_counter() - start) * 1000)
"""


def prepare_data(folder, trainer):
    words = random.Random(1)
    Path(folder, "text.txt").write_text("\n".join("".join(words.choices("etaoinshrdlu", k=5)) for _ in range(20000)))
    subprocess.run([trainer, "prepare", "--tokenizer", "bytes", "text.txt", "--out", "data"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)


def trainer_times(folder, trainer, steps):
    config = {
        "run": {"dir": "run"},
        "model": {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": LENGTH, "vocab_size": VOCAB},
        "data": {"train": "data/train_*.bin", "val": "", "tokenizer": ""},
        "train": {"max_steps": steps, "batch_size": BATCH, "seq_len": LENGTH, "total_batch_tokens": BATCH * LENGTH,
                  "precision": "fp32"},
        "schedule": {"warmup_steps": 5}, "checkpoint": {"every_steps": 0}, "eval": {"every_steps": 0, "batches": 0},
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    subprocess.run(["rm", "-rf", "run"], cwd=folder, check=True)
    subprocess.run([trainer, "config.json"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [line["step_ms"] for line in lines if line["kind"] == "train"]


def torch_times(folder, python, steps):
    said = subprocess.run([python, "-c", TORCH, str(steps)], cwd=folder, check=True, capture_output=True, text=True)
    return [float(line) for line in said.stdout.split()]


def bench_ms(bench, workload):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([bench, "fp32", "--workload", workload, "--steps-only", "--seconds", "2", "--json", file.name],
                       check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(file.name).read_text())["results"][0]["step_ms"]


class Others:
    """The share of the cores that other processes used, without those of this session."""

    def __enter__(self):
        self.before = self.read()
        return self

    def __exit__(self, *_):
        own, busy, total = (after - before for before, after in zip(self.before, self.read()))
        self.share = max(0.0, busy - own) / total

    @staticmethod
    def read():
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        own = os.times()
        return ((own.user + own.system + own.children_user + own.children_system) * ticks,
                user + nice + system + sum(rest), user + nice + system + sum(rest) + idle + iowait)


class Loops:
    """Starts `count` busy loops, which run until this process ends."""

    COUNT = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.processes = [subprocess.Popen([sys.executable, "-c", self.COUNT]) for _ in range(self.count)]

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def compare_next_to_loops(folder, options):
    cores = len(os.sched_getaffinity(0))
    programs = [(trainer, trainer_times, trainer) for trainer in options.trainers]
    if options.torch:
        programs.append(("PyTorch", torch_times, options.torch))
    quiet = {}
    print(f"{cores} cores; milliseconds a step: mean of each round, their median, its ratio to that next to 0 loops",
          flush=True)
    for loops in options.loops:
        means, others = {name: [] for name, _, _ in programs}, []
        for _ in range(options.rounds):
            for name, times_of, program in programs:
                with Others() as other, Loops(loops):
                    times = times_of(folder, program, options.steps)[WARM_UP:]
                means[name].append(statistics.mean(times))
                others.append(other.share)
        print(f"{loops} loops, fair share {1 + loops / cores:.1f}; others used up to {max(others):.0%} of the cores")
        for name, values in means.items():
            middle = statistics.median(values)
            if loops == 0:
                quiet[name] = middle
            ratio = f"{middle / quiet[name]:5.2f}" if name in quiet else "    -"
            print(f"  {' '.join(f'{ms:7.1f}' for ms in values)}   {middle:7.1f}  {ratio}  {name}", flush=True)


def compare_pairs(folder, options):
    """Prints medians of old and new, measured in turn in alternating order."""
    for workload in options.workload or ["trainer"]:
        def measure(program):
            if options.workload:
                return bench_ms(program, workload)
            return statistics.median(trainer_times(folder, program, options.steps)[WARM_UP:])
        ratios, both = [], []
        for pair in range(options.pairs):
            with Others() as other:
                order = options.trainers if pair % 2 == 0 else options.trainers[::-1]
                ms = {program: measure(program) for program in order}
            old, new = (ms[program] for program in options.trainers)
            ratios.append(new / old)
            both.append((old, new))
            print(f"  {old:8.2f} {new:8.2f}  {new / old:.3f}   others {other.share:.0%}", flush=True)
        old, new = (statistics.median(values) for values in zip(*both))
        print(f"{workload}: {old:.2f} and {new:.2f} ms a step, median of {len(ratios)} ratios "
              f"{statistics.median(ratios):.3f}, quartiles {' '.join(f'{q:.3f}' for q in quartiles(ratios))}")


def quartiles(values):
    return statistics.quantiles(values, n=4)[::2] if len(values) > 1 else values


def main():
    parser = argparse.ArgumentParser(description="A training step next to other programs.")
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", default=["build/train_gpt_cpu"])
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 2, 4])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--workload", action="append")
    options = parser.parse_args()
    options.trainers = [os.path.abspath(trainer) for trainer in options.trainers]
    options.torch = options.torch and os.path.abspath(options.torch)
    with tempfile.TemporaryDirectory() as folder:
        if not options.workload:
            prepare_data(folder, options.trainers[0])
        (compare_pairs if options.pairs else compare_next_to_loops)(folder, options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The bubble of a pipeline of two CPU ranks: the part of a step in which stages idle, by schedule and micro-steps.

    dev/pipeline_bubble.py [--rounds 5] [--steps 8] [--micro-steps 2 4 8 16]

Trains 8 layers, 256 channels, vocabulary 256, B=2, T=128 on one rank and on two stages of four layers, one thread each,
in interleaved rounds. With the step times T1 and T2 the stages idle 1 - T1 / (2 T2) of a step, messages and updates
included. Needs two idle cores: without them, the stages compete with other processes.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from exposed_communication import TRAINER, write_tokens

B, T = 2, 128
MODEL = {"n_layer": 8, "n_head": 4, "n_embd": 256, "n_positions": T, "vocab_size": 256}
# The name, its parallel section and the bubble of p stages in m micro-steps: Narayanan et al., arXiv 2104.04473, 2.2.
SCHEDULES = {
    "one rank": ({}, None),
    "gpipe": ({"pipeline": 2, "pipeline_schedule": "gpipe"}, lambda m: 1 / (m + 1)),
    "1f1b": ({"pipeline": 2}, lambda m: 1 / (m + 1)),
    "interleaved": ({"pipeline": 2, "pipeline_schedule": "interleaved"}, lambda m: 1 / (2 * m + 1)),
    # Qi et al., arXiv 2401.10241, with passes of equal time
    "zero_bubble": ({"pipeline": 2, "pipeline_schedule": "zero_bubble"}, lambda m: 1 / (3 * m + 1)),
}


def step_ms(folder, micro_steps, parallel, steps):
    """The median without the first steps."""
    config = {"run": {"dir": "run"}, "model": MODEL, "data": {"train": "tokens.bin", "val": ""},
              "train": {"max_steps": steps, "batch_size": B, "seq_len": T, "head_rows": B * T,
                        "total_batch_tokens": B * T * micro_steps, "precision": "fp32"},
              "schedule": {"warmup_steps": 1}, "eval": {"every_steps": 0}, "checkpoint": {"every_steps": 0},
              "parallel": parallel}
    (folder / "config.json").write_text(json.dumps(config))
    command = [TRAINER, *(["--nproc", "2"] if parallel else []), "config.json", "--fresh"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["step_ms"] for line in lines if line["kind"] == "train"][2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-steps", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "tokens.bin", 400_000, MODEL["vocab_size"])
        print("| micro-steps | schedule | step ms | bubble | formula |\n|---|---|---|---|---|")
        for m in options.micro_steps:
            times = {schedule: [] for schedule in SCHEDULES}
            for _ in range(options.rounds):
                for schedule, (parallel, _) in SCHEDULES.items():
                    times[schedule].append(step_ms(folder, m, parallel, options.steps))
            one = statistics.median(times["one rank"])
            for schedule, (_, formula) in SCHEDULES.items():
                ms = statistics.median(times[schedule])
                bubble = f"{1 - one / (2 * ms):.3f} | {formula(m):.3f}" if formula else " | "
                print(f"| {m} | {schedule} | {ms:.1f} | {bubble} |", flush=True)


if __name__ == "__main__":
    main()

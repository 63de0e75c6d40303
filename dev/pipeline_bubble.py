#!/usr/bin/env python3
"""The bubble of pipelines of CPU ranks: the part of a step in which stages idle, by schedule and micro-steps.

    dev/pipeline_bubble.py [--ranks 2] [--rounds 5] [--steps 8] [--micro-steps 4 8 16] [--layers 8] [--channels 256]
                           [--share 1]

Trains a model with vocabulary 256, B=2, T=128 on one rank and on pipelines of ranks, one thread each, in interleaved
rounds. With the step times T1 and Tp the p stages idle 1 - T1 / (p Tp) of a step, messages and updates included. Needs
an idle core per rank: without, the stages compete with each other. With --share 0.4 each rank, one rank alone too, may
use at most 0.4 of a core (a quota of the kernel, for which the script must run as root), so that two idle cores do for
four ranks.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from exposed_communication import TRAINER, write_tokens

B, T, VOCABULARY = 2, 128, 256
PERIOD_US = 5000
GROUPS = Path("/sys/fs/cgroup")
# The name, its parallel section and the bubble of p stages in m micro-steps: Narayanan et al., arXiv 2104.04473, 2.2.
SCHEDULES = {
    "gpipe": ({"pipeline_schedule": "gpipe"}, lambda p, m: (p - 1) / (m + p - 1)),
    "1f1b": ({"pipeline_schedule": "1f1b"}, lambda p, m: (p - 1) / (m + p - 1)),
    "interleaved": ({"pipeline_schedule": "interleaved"}, lambda p, m: (p - 1) / (2 * m + p - 1)),
    # Qi et al., arXiv 2401.10241, with passes of equal time
    "zero_bubble": ({"pipeline_schedule": "zero_bubble"}, lambda p, m: (p - 1) / (3 * m + p - 1)),
}


@contextlib.contextmanager
def quotas(ranks, share):
    """Creates a control group for each rank and yields the text before the rank's number in their names."""
    is_v2 = (GROUPS / "cgroup.controllers").exists()
    names = [(GROUPS if is_v2 else GROUPS / "cpu") / f"pipeline_bubble_{os.getpid()}_{rank}" for rank in range(ranks)]
    quota = round(share * PERIOD_US)
    try:
        for name in names:
            name.mkdir()
            if is_v2:
                (name / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (name / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (name / "cpu.cfs_quota_us").write_text(str(quota))
        yield str(names[0])[:-1]
    finally:
        for name in names:
            name.rmdir()


def step_ms(folder, ranks, micro_steps, parallel, options):
    """The median without the first steps."""
    model = {"n_layer": options.layers, "n_head": 4, "n_embd": options.channels, "n_positions": T,
             "vocab_size": VOCABULARY}
    config = {"run": {"dir": "run"}, "model": model, "data": {"train": "tokens.bin", "val": ""},
              "train": {"max_steps": options.steps, "batch_size": B, "seq_len": T, "head_rows": B * T,
                        "total_batch_tokens": B * T * micro_steps, "precision": "fp32"},
              "schedule": {"warmup_steps": 1}, "eval": {"every_steps": 0}, "checkpoint": {"every_steps": 0},
              "parallel": parallel}
    (folder / "config.json").write_text(json.dumps(config))
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
    with quotas(ranks, options.share) if options.share < 1 else contextlib.nullcontext() as groups:
        join = f"echo $$ > {groups}${{OMPI_COMM_WORLD_RANK:-0}}/cgroup.procs; " if groups else ""
        subprocess.run([*mpirun, "sh", "-c", f"{join}exec {TRAINER} config.json --fresh"], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                       "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                                       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["step_ms"] for line in lines if line["kind"] == "train"][2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-steps", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--share", type=float, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "tokens.bin", 400_000, VOCABULARY)
        print("| ranks | micro-steps | schedule | step ms | bubble | formula |\n|---|---|---|---|---|---|")
        for m in options.micro_steps:
            runs = {(1, "one rank"): {}}
            runs.update({(p, schedule): {"pipeline": p, **section}
                         for p in options.ranks for schedule, (section, _) in SCHEDULES.items()})
            times = {run: [] for run in runs}
            for _ in range(options.rounds):
                for run, parallel in runs.items():
                    times[run].append(step_ms(folder, run[0], m, parallel, options))
            one = statistics.median(times[1, "one rank"])
            for p, schedule in runs:
                ms = statistics.median(times[p, schedule])
                bubble = f"{1 - one / (p * ms):.3f} | {SCHEDULES[schedule][1](p, m):.3f}" if p > 1 else " | "
                print(f"| {p} | {m} | {schedule} | {ms:.1f} | {bubble} |", flush=True)


if __name__ == "__main__":
    main()

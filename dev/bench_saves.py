#!/usr/bin/env python3
"""The cost of checkpoints: mean step time with one every 100 steps, in interleaved pairs with runs that save none.

    dev/bench_saves.py --data DIR [--pairs 10] [--steps 300] [--foreground] [--program build/train_gpt_cpu]

DIR is a data set of `train_gpt prepare`. The model is the one of the quickstart. Measures from the end of the first
step to the end of the last but one: this includes background work of saves, but not the start and the last checkpoint,
for which a run waits. Prints the ratio of each pair (saving / not saving) and the median. As a run may be a tenth
slower than the next, it also prints how much longer the steps after a save take than other steps of the same run.
"""
import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAVE_STEPS = 15  # steps during which a save may be in progress


def excess_ms(times):
    """The extra time of the steps during which a save is copied and written, for each save. `times` are the ends of all
    steps, with a checkpoint every 100 steps."""
    steps = {step: 1000 * (after - before) for step, (before, after) in enumerate(zip(times, times[1:]), 2)}
    # The time of a step's record is taken before the step's own save.
    rest = statistics.mean(ms for step, ms in steps.items() if not 1 <= step % 100 <= SAVE_STEPS)
    return [sum(steps[step] - rest for step in range(saved + 1, saved + SAVE_STEPS + 1))
            for saved in range(100, len(times) - SAVE_STEPS, 100)]


def step_ends(options, every_steps):
    """When each step but the last ended, in seconds."""
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        changes = {"run.dir": f"{folder}/run", "data.train": f"{options.data}/train_*.bin", "data.val": "",
                   "data.tokenizer": f"{options.data}/tokenizer.json", "train.max_steps": options.steps,
                   "checkpoint.every_steps": every_steps, "checkpoint.asynchronous": not options.foreground,
                   "eval.every_steps": 0, "sample.every_steps": 0, "schedule.warmup_steps": 10}
        settings = [argument for key, value in changes.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        subprocess.run([options.program, ROOT / "configs/quickstart.json", *settings], check=True,
                       stdout=subprocess.DEVNULL)
        lines = (json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines())
        return [line["time"] for line in lines if line["kind"] == "train"][:-1]


def mean_step_ms(times):
    return 1000 * (times[-1] - times[0]) / (len(times) - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--disk", type=Path, help="folder for the runs")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--foreground", action="store_true", help="set checkpoint.asynchronous=false")
    parser.add_argument("--program", default=ROOT / "build/train_gpt_cpu")
    options = parser.parse_args()
    options.data = options.data.resolve()
    ratios, steps_ms, excesses = [], [], []
    for pair in range(options.pairs):
        order = (0, 100) if pair % 2 == 0 else (100, 0)
        ends = {every: step_ends(options, every) for every in order}
        means = {every: mean_step_ms(times) for every, times in ends.items()}
        ratios.append(means[100] / means[0])
        steps_ms.append(means[100])
        excesses += excess_ms(ends[100])
        print(f"pair {pair + 1}: {means[0]:.2f} ms without, {means[100]:.2f} ms with: {ratios[-1]:.4f}", flush=True)
    print(f"median {statistics.median(ratios):.4f}, mean {statistics.mean(ratios):.4f} of {len(ratios)} pairs")
    per_save, of_100_steps = statistics.mean(excesses), 100 * statistics.mean(steps_ms)
    error = statistics.stdev(excesses) / len(excesses) ** 0.5
    print(f"within the saving runs: {per_save:.1f} +- {error:.1f} ms per save (of {len(excesses)}), "
          f"{per_save / of_100_steps:.2%} +- {error / of_100_steps:.2%} of 100 steps")


if __name__ == "__main__":
    main()

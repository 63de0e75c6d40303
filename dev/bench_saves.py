#!/usr/bin/env python3
"""What checkpoints cost: mean step time with one every 100 steps, in interleaved pairs with runs that save none.

    dev/bench_saves.py --data DIR [--pairs 10] [--steps 300] [--foreground] [--program build/train_gpt_cpu]

DIR is what `train_gpt prepare` has written. The model is the quickstart's. The time is that from the end of the first
step to the end of the last but one, so that what a save does in the background counts, and the start and the last
checkpoint, for which a run waits, do not. Prints saving / not saving of each pair, and their median.
"""
import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def mean_step_ms(options, every_steps):
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        changes = {"run.dir": f"{folder}/run", "data.train": f"{options.data}/train_*.bin", "data.val": "",
                   "data.tokenizer": f"{options.data}/tokenizer.json", "train.max_steps": options.steps,
                   "checkpoint.every_steps": every_steps, "checkpoint.asynchronous": not options.foreground,
                   "eval.every_steps": 0, "sample.every_steps": 0, "schedule.warmup_steps": 10}
        settings = [argument for key, value in changes.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        subprocess.run([options.program, ROOT / "configs/quickstart.json", *settings], check=True,
                       stdout=subprocess.DEVNULL)
        lines = (json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines())
        times = [line["time"] for line in lines if line["kind"] == "train"]
        return 1000 * (times[-2] - times[0]) / (len(times) - 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--disk", type=Path, help="where the runs are written")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--foreground", action="store_true", help="checkpoint.asynchronous=false")
    parser.add_argument("--program", default=ROOT / "build/train_gpt_cpu")
    options = parser.parse_args()
    options.data = options.data.resolve()
    ratios = []
    for pair in range(options.pairs):
        order = (0, 100) if pair % 2 == 0 else (100, 0)
        times = {every: mean_step_ms(options, every) for every in order}
        ratios.append(times[100] / times[0])
        print(f"pair {pair + 1}: {times[0]:.2f} ms without, {times[100]:.2f} ms with: {ratios[-1]:.4f}", flush=True)
    print(f"median {statistics.median(ratios):.4f}, mean {statistics.mean(ratios):.4f} of {len(ratios)} pairs")


if __name__ == "__main__":
    main()

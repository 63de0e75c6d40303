#!/usr/bin/env python3
"""Compares two builds of the trainer, for changes that must not affect results: `bits` or `time`.

    dev/side_by_side.py bits OLD/build/train_gpt_cpu build/train_gpt_cpu
    dev/side_by_side.py bits OLD/build/train_gpt_simt build/train_gpt_simt --simulated
    dev/side_by_side.py time OLD/build/train_gpt_cpu build/train_gpt_cpu

bits: trains 20 steps in each precision, at each recompute level, on one rank and on two at each ZeRO stage. The losses
and gradient norms of each step, and the weights and optimizer state of the last checkpoint, must have the same bits.
time: median step time of interleaved pairs of runs, for three model sizes in bf16; prints new / old.
"""
import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PRECISIONS, LEVELS = ("fp32", "bf16", "fp16"), ("none", "gelu", "norm", "block")
STEPS = 20
SIZES = {"1 layer, 128 channels": (1, 2, 128, 128), "4 layers, 256 channels": (4, 4, 256, 128),
         "6 layers, 384 channels": (6, 6, 384, 128)}  # n_layer, n_head, n_embd, seq_len


def configuration(simulated):
    """A configuration with odd sizes; small enough for the simulator to take a tenth of a second per step."""
    layers, length, batch = (1, 10, 1) if simulated else (2, 20, 3)
    return {"model": {"n_layer": layers, "n_head": 3, "n_embd": 48, "n_positions": 24, "vocab_size": 257},
            "data": {"train": "data/train_*.bin", "val": "data/val_*.bin", "tokenizer": "data/tokenizer.json"},
            "train": {"max_steps": STEPS, "batch_size": batch, "seq_len": length,
                      "total_batch_tokens": 4 * batch * length},
            "optim": {"learning_rate": 1e-2}, "schedule": {"warmup_steps": 5}, "run": {"seed": 7},
            "checkpoint": {"every_steps": 0}, "eval": {"every_steps": 0, "batches": 0}}


def train(program, folder, run, config, changes, ranks=1):
    """Trains from the start. Returns the records of the steps and the bytes of the last checkpoint's shards."""
    config = {**config, "run": {**config.get("run", {}), "dir": str(run)}}
    (folder / "config.json").write_text(json.dumps(config))
    command = [program, *(["--nproc", str(ranks)] if ranks > 1 else []), "config.json", "--fresh",
               *(word for change in changes for word in ("--set", change))]
    shutil.rmtree(folder / run, ignore_errors=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    shards = [shard.read_bytes() for shard in sorted((folder / run).glob("checkpoints/step_*/shard_*.bin"))]
    return records, shards


def compare_bits(old, new, folder, simulated, precisions, levels, stages):
    failed = compared = 0
    places = [(1, 0), *((2, stage) for stage in stages)]
    for precision, level, (ranks, stage) in itertools.product(precisions, levels, places):
        changes = [f"train.precision={precision}", f"train.recompute={level}", f"parallel.zero_stage={stage}"]
        if precision == "fp16":
            changes += ["loss_scale.dynamic=true", "loss_scale.initial=1024"]
        results = [train(program, folder, Path(run), configuration(simulated), changes, ranks)
                   for program, run in ((old, "old"), (new, "new"))]
        (old_records, old_shards), (new_records, new_shards) = results
        same = [all(a[key] == b[key] for a, b in zip(old_records, new_records, strict=True))
                for key in ("loss", "grad_norm")] + [len(old_shards) == ranks and old_shards == new_shards]
        compared += 1
        failed += not all(same)
        if not all(same):
            print(f"{precision} recompute {level} ranks {ranks} ZeRO {stage}: same losses, norms, state: {same}",
                  flush=True)
    print(f"{compared} runs of {STEPS} steps compared, {failed} differ")
    return failed


def compare_time(old, new, folder, pairs):
    for name, (layers, heads, channels, length) in SIZES.items():
        config = configuration(False)
        config["model"].update(n_layer=layers, n_head=heads, n_embd=channels, n_positions=length)
        config["train"].update(max_steps=24, batch_size=4, seq_len=length, total_batch_tokens=4 * length,
                               precision="bf16")
        ratios, times = [], {old: [], new: []}
        for pair in range(pairs):
            for program in (old, new) if pair % 2 else (new, old):
                records, _ = train(program, folder, Path("run"), config, [])
                times[program].append(statistics.median(record["step_ms"] for record in records[2:]))
            ratios.append(times[new][-1] / times[old][-1])
        print(f"{name}: old {statistics.median(times[old]):.2f} ms, new {statistics.median(times[new]):.2f} ms, "
              f"new / old of {pairs} pairs: median {statistics.median(ratios):.4f}, "
              f"from {min(ratios):.4f} to {max(ratios):.4f}", flush=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["bits", "time"])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--simulated", action="store_true", help="use a smaller model, for the simulated GPU")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--precisions", nargs="*", default=PRECISIONS)
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--stages", nargs="*", type=int, default=range(4), help="ZeRO stages on two ranks")
    arguments = parser.parse_args()
    old, new = arguments.old.resolve(), arguments.new.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
        (folder / "text.txt").write_text(text * 4)
        subprocess.run([old, "prepare", "--tokenizer", "bytes", "text.txt", "--out", "data"], cwd=folder,
                       check=True, stdout=subprocess.DEVNULL)
        if arguments.part == "bits":
            return 1 if compare_bits(old, new, folder, arguments.simulated, arguments.precisions, arguments.levels,
                                     arguments.stages) else 0
        return compare_time(old, new, folder, arguments.pairs)


if __name__ == "__main__":
    sys.exit(main())

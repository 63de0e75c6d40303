#!/usr/bin/env python3
"""Exposed communication by ZeRO stage: how long ranks wait for each other in a step.

    dev/exposed_communication.py [--ranks 2] [--steps 12] [--bucket-mb 0 32] [--threads 1]

Trains 6 layers, 384 channels, vocabulary 4096, B=4, T=256 on CPU ranks of this machine, and prints medians of
metrics.jsonl next to those of a single rank with as many sequences. Ranks on one machine compete for its cores and
memory: compare stages only within one run.
"""
import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import tempfile
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "build/train_gpt_cpu"
MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 4096}


def write_tokens(path, count, vocabulary=4096):
    """A shard in llm.c's format: a header of 256 32-bit words, three of them used, then 16-bit tokens."""
    tokens = random.Random(1)
    header = struct.pack("<3i", 20240520, 1, count) + bytes(1024 - 12)
    path.write_bytes(header + struct.pack(f"<{count}H", *(tokens.randrange(vocabulary) for _ in range(count))))


def medians(folder, ranks, stage, bucket_mb, steps, threads):
    config = {"run": {"dir": f"run_{ranks}_{stage}_{bucket_mb}"}, "model": MODEL,
              "data": {"train": "tokens.bin", "val": ""},
              "train": {"max_steps": steps, "batch_size": 4, "seq_len": 256, "total_batch_tokens": 1024 * ranks,
                        "precision": "bf16"},
              "schedule": {"warmup_steps": 1}, "eval": {"every_steps": 0},
              "parallel": {"zero_stage": stage, "bucket_mb": bucket_mb}}
    (folder / "config.json").write_text(json.dumps(config))
    command = [TRAINER, "--nproc", str(ranks), "config.json"] if ranks > 1 else [TRAINER, "config.json"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    lines = [json.loads(line) for line in (folder / config["run"]["dir"] / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    later = lines[len(lines) // 3:]
    keys = ("step_ms", "compute_ms", "comm_ms", "data_ms", "optimizer_ms", "comm_bytes")
    return [statistics.median(line[key] for line in later) for key in keys]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "tokens.bin", 400_000)
        print("| ranks | stage | bucket MiB | step ms | compute | for ranks | for tokens | optimizer | MB sent |")
        print("|---|---|---|---|---|---|---|---|---|")
        cases = [(1, 0, 0)] + [(options.ranks, stage, mb) for mb in options.bucket_mb for stage in range(4)]
        for ranks, stage, mb in cases:
            *times, sent = medians(folder, ranks, stage, mb, options.steps, options.threads)
            cells = [str(ranks), str(stage), str(mb), *(f"{ms:.1f}" for ms in times), f"{sent / 1e6:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

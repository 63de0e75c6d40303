#!/usr/bin/env python3
"""Ablation between GPT-2 and Llama: trains the same model while replacing one part at a time.

    dev/ablation.py --text TEXT --out DIR [--steps 1200] [--seeds 3] [--learning-rates 0.001,0.002,0.004,0.008]

Trains a model of 6 layers and 256 channels (5 million parameters) on TEXT and measures bits per byte on its last 5 %.
Each row keeps the parts of the rows above it, except that squared ReLU replaces SwiGLU. All MLPs have the same number
of weights. First measures the throughput of all rows in turn, in several rounds: it gives the number of steps that each
row makes in the time that GPT-2 needs for --steps, so that the trainings themselves may run on busy cores. Then tries
the learning rates on the first and the last row with one seed. Trains every row with the best rate of GPT-2, for an
equal number of tokens and for equal time. Prints Markdown tables. Reuses the runs that exist in DIR.
"""
import argparse
import json
import math
import shutil
import statistics
import subprocess
from pathlib import Path

WIDTH, TOKENS_PER_STEP = 256, 1024
PARTS = {
    "GPT-2": {},
    "RoPE": {"position": "rope", "rope_theta": 10000},
    "RMSNorm": {"norm": "rmsnorm", "norm_bias": False},
    "SwiGLU": {"activation": "silu", "gated_mlp": True, "hidden_size_mlp": 688},  # 2/3 of 4 WIDTH, in multiples of 16
    "no biases (Llama)": {"attention_bias": "none", "mlp_bias": False},
    "QK norm": {"qk_norm": "weight"},
    "squared ReLU for SwiGLU": {"activation": "relu2", "gated_mlp": False, "hidden_size_mlp": 4 * WIDTH},
}
ROWS = list(PARTS)


class Ablation:
    def __init__(self, options):
        self.options = options
        self.out = Path(options.out)
        self.data = self.out / "data"
        if not (self.data / "config.json").exists():
            self.call("prepare", options.text, "--vocab-size", "2048", "--copies", "4", "--bpe-dropout", "0.03",
                      "--out", self.data)

    def call(self, *arguments):
        subprocess.run([self.options.program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)

    def records(self, row, steps, learning_rate, seed, take="", **changes):
        """The records of one run; trains it if it does not exist."""
        run = self.out / f"{ROWS.index(row)}_{steps}_{learning_rate:g}_{seed}{take}"
        path, metrics = Path(f"{run}.json"), Path(f"{run}.jsonl")
        if not metrics.exists():
            model = {"n_layer": 6, "n_head": 4, "n_embd": WIDTH, "n_positions": 128, "vocab_size": 2048}
            for part in ROWS[:ROWS.index(row) + 1]:
                model |= PARTS[part]
            config = {
                "run": {"dir": str(run), "seed": seed},
                "model": model,
                "data": {"train": f"{self.data}/train_*.bin", "val": f"{self.data}/val_*.bin",
                         "tokenizer": f"{self.data}/tokenizer.json"},
                "train": {"max_steps": steps, "batch_size": 8, "seq_len": 128, "total_batch_tokens": TOKENS_PER_STEP,
                          "precision": "bf16"},
                "optim": {"learning_rate": learning_rate, "beta2": 0.99},
                "schedule": {"name": "wsd", "warmup_steps": min(100, steps // 2), "cooldown_fraction": 0.5,
                             "final_lr_fraction": 0},
                "eval": {"every_steps": steps, "batches": 0, "stride": 64},
                "checkpoint": {"every_steps": 0}, **changes}
            path.write_text(json.dumps(config), encoding="utf-8")
            self.call(path, "--fresh")
            (run / "metrics.jsonl").rename(metrics)
            shutil.rmtree(run)
        return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]

    def bits_per_byte(self, row, steps, learning_rate, seed):
        return [record for record in self.records(row, steps, learning_rate, seed) if record["kind"] == "val"][-1][
            "bits_per_byte"]

    def rates(self):
        """Tokens per second of each row: the median over the rounds, each by its median step."""
        found = {row: [] for row in ROWS}
        for take in range(self.options.rounds):
            for row in ROWS:
                records = self.records(row, 60, 0.001, 1, f"_rate{take}", eval={"every_steps": 0})
                step_ms = [record["step_ms"] for record in records if record["kind"] == "train"]
                found[row].append(1000 * TOKENS_PER_STEP / statistics.median(step_ms[20:]))
        print("| parts | " + " | ".join(f"round {take + 1}" for take in range(self.options.rounds)) + " | median |")
        print("|---|" + "---:|" * (self.options.rounds + 1))
        for row, values in found.items():
            print(f"| {row} | " + " | ".join(f"{v:.0f}" for v in [*values, statistics.median(values)]) + " |")
        return {row: statistics.median(values) for row, values in found.items()}

    def learning_rate(self):
        """The best of --learning-rates for GPT-2 with one seed; also prints those of the last row."""
        choices = [float(text) for text in self.options.learning_rates.split(",")]
        print("\n| parts | " + " | ".join(f"{choice:g}" for choice in choices) + " |\n|---|" + "---:|" * len(choices))
        best = {}
        for row in (ROWS[0], ROWS[-1]):
            bits = [self.bits_per_byte(row, self.options.steps, choice, 1) for choice in choices]
            best[row] = choices[bits.index(min(bits))]
            print(f"| {row} | " + " | ".join(f"{value:.4f}" for value in bits) + " |", flush=True)
        return best[ROWS[0]]

    def table(self, title, steps_of, learning_rate):
        seeds = range(1, self.options.seeds + 1)
        heads = [title, "steps", *(f"seed {seed}" for seed in seeds), "mean", "change", "standard error"]
        print("\n| " + " | ".join(heads) + " |\n|---|" + "---:|" * (len(heads) - 1), flush=True)
        before = None
        for row in ROWS:
            bits = [self.bits_per_byte(row, steps_of[row], learning_rate, seed) for seed in seeds]
            cells = [f"{steps_of[row]}", *(f"{value:.4f}" for value in [*bits, statistics.mean(bits)])]
            if before:
                changes = [now - then for now, then in zip(bits, before)]
                error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
                cells += [f"{statistics.mean(changes):+.4f}", f"{error:.4f}"]
            print(f"| {row} | " + " | ".join(cells + [""] * (len(heads) - 1 - len(cells))) + " |", flush=True)
            before = bits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--program", default="build/train_gpt_cpu")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learning-rates", default="0.001,0.002,0.004,0.008")
    options = parser.parse_args()
    ablation = Ablation(options)
    rates = ablation.rates()
    learning_rate = ablation.learning_rate()
    ablation.table("equal tokens", {row: options.steps for row in ROWS}, learning_rate)
    ablation.table("equal minutes", {row: round(options.steps * rates[row] / rates[ROWS[0]]) for row in ROWS},
                   learning_rate)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tokens per second of `sample` with and without a KV cache.

    dev/bench_generation.py --without OLDER/build/train_gpt_cpu --text TEXT [--with build/train_gpt_cpu] [--rounds 5]

--without is a program without the KV cache (commit 45084c9 or earlier). Both run in turn on the same models: 6 layers,
384 channels, 6 heads, vocabulary 4096, 256 positions, trained for a few steps. The loading time, measured with a short
text, is subtracted. Prints a Markdown table of medians; for eight prompts at once, counts the tokens of all prompts.
"""
import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

FEW, MANY = 8, 208
PROMPTS = ["First Citizen:", "KING RICHARD:", "My lord,", "O Romeo", "What", "The", "Enter", "Speak"]
MODELS = {"GPT-2": {"family": "gpt2"}, "Llama, 2 key-value heads": {"family": "llama", "n_kv_head": 2}}


def train(program, place, name, model, precision):
    config = {
        "run": {"dir": str(place / name)},
        "model": {**model, "n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 4096},
        "data": {"train": f"{place}/data/train_*.bin", "val": "", "tokenizer": f"{place}/data/tokenizer.json"},
        "train": {"max_steps": 12, "batch_size": 4, "seq_len": 256, "total_batch_tokens": 1024, "precision": precision},
        "schedule": {"warmup_steps": 2}}
    path = place / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    subprocess.run([program, path], check=True, capture_output=True)
    return place / name


def measured(program, run, prompts):
    """Returns tokens per second and the longer text."""
    seconds = []
    for tokens in (FEW, MANY):
        flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
        start = time.perf_counter()
        done = subprocess.run([program, "sample", run, *flags, "--tokens", str(tokens), "--seed", "3"], check=True,
                              capture_output=True)
        seconds.append(time.perf_counter() - start)
    return len(prompts) * (MANY - FEW) / (seconds[1] - seconds[0]), done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", required=True)
    parser.add_argument("--with", dest="cached", default="build/train_gpt_cpu")
    parser.add_argument("--text", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| model | type | without | with | 8 prompts at once | same text |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        subprocess.run([options.cached, "prepare", options.text, "--vocab-size", "4096", "--out", place / "data"],
                       check=True, capture_output=True)
        runs = {(name, precision): train(options.without, place, f"{model['family']}_{precision}", model, precision)
                for name, model in MODELS.items() for precision in ("fp32", "bf16")}
        rates = {run: ([], [], []) for run in runs}
        texts = {}
        for _ in range(options.rounds):
            for run, path in runs.items():
                kinds = [(options.without, PROMPTS[:1]), (options.cached, PROMPTS[:1]), (options.cached, PROMPTS)]
                found = [measured(program, path, prompts) for program, prompts in kinds]
                for rate, (tokens_per_s, _) in zip(rates[run], found):
                    rate.append(tokens_per_s)
                texts[run] = found[0][1] == found[1][1]
        for run, rate in rates.items():
            medians = " | ".join(f"{statistics.median(values):.0f}" for values in rate)
            print(f"| {run[0]} | {run[1]} | {medians} | {'yes' if texts[run] else 'no'} |")


if __name__ == "__main__":
    main()

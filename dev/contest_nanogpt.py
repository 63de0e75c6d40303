#!/usr/bin/env python3
"""nanoGPT's model and recipe in PyTorch, an entry to dev/contest.py.

    dev/contest_nanogpt.py train TRAIN_TEXT OUT SECONDS THREADS
    dev/contest_nanogpt.py score OUT HELD_OUT_TEXT THREADS

Needs an interpreter with PyTorch and NumPy, and for the tokenizer "bpe" build/train_gpt_cpu. The environment variable
CONTEST_SETTINGS overrides SETTINGS: "tokenizer=chars n_layer=6".

The model is nanoGPT's GPT-2 (LayerNorm, learned positions, GELU in its tanh approximation, tied head, weights of
standard deviation 0.02, of the projections into the residual stream 0.02 / sqrt(2 n_layer)), trained by AdamW that
decays only matrices, on windows at random positions. The cosine schedule follows the clock instead of max_iters.
"""
import time

BEGIN = time.monotonic()  # importing PyTorch takes seconds

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / os.environ.get("TRAINER", "build/train_gpt_cpu")
SETTINGS = {
    "tokenizer": "bpe",  # or "chars": bytes, which are the characters of an ASCII text
    "vocab_size": 2048, "copies": 1, "bpe_dropout": 0.0,  # options of `train_gpt prepare`
    # nanoGPT's README, "I only have a macbook":
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0,
    # config/train_shakespeare_char.py, and the defaults of train.py:
    "learning_rate": 1e-3, "min_lr": 1e-4, "warmup_iters": 100, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1,
    "grad_clip": 1.0, "bias": 0,
    "dtype": "auto",  # "bfloat16" (autocast), "float32"; auto: bfloat16 if the CPU has instructions for it
    "compile": 1, "fused": 1,
    "tune_malloc": 1,  # set TUNED, which makes PyTorch's steps on a CPU faster: dev/results/2026-11-26-pytorch.md
    "end_s": 3.0,  # from the last step to the exit
    "stride": 4,  # scoring: tokens between the starts of windows
}
TUNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads",
         "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=40000000000"
                           ":glibc.malloc.top_pad=268435456"}


def settings():
    """Returns SETTINGS with the changes in CONTEST_SETTINGS, which keep the types."""
    chosen = dict(SETTINGS)
    for word in shlex.split(os.environ.get("CONTEST_SETTINGS", "")):
        key, value = word.split("=", 1)
        if key not in SETTINGS:
            sys.exit(f"contest_nanogpt: CONTEST_SETTINGS has {key}, but must have some of {', '.join(SETTINGS)}")
        chosen[key] = type(SETTINGS[key])(value)
    return chosen


CHOSEN = settings()
if CHOSEN["tune_malloc"] and "CONTEST_BEGIN" not in os.environ:  # the C library reads TUNED when a program starts
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED, "CONTEST_BEGIN": str(BEGIN)})
BEGIN = float(os.environ.get("CONTEST_BEGIN", BEGIN))

import contextlib

import numpy
import torch

from peer_torch_step import Gpt


def tokens_of(text, out, name):
    """Returns the token ids of a text. Training makes the tokenizer, scoring reads it."""
    if CHOSEN["tokenizer"] == "chars":
        return torch.from_numpy(numpy.frombuffer(b"\n" + Path(text).read_bytes(), numpy.uint8).astype(numpy.int64))
    folder, is_new = out / name, name == "train"
    options = ["bpe", "--vocab-size", CHOSEN["vocab_size"], "--copies", CHOSEN["copies"], "--bpe-dropout",
               CHOSEN["bpe_dropout"]] if is_new else [out / "train/tokenizer.json"]
    subprocess.run([TRAINER, "prepare", text, "--val-fraction", "0", "--minutes", "0", "--out", folder, "--force",
                    "--tokenizer", *map(str, options)], check=True, stdout=sys.stderr)
    shards = [numpy.fromfile(path, numpy.uint16, offset=1024) for path in sorted(folder.glob("train_*.bin"))]
    return torch.from_numpy(numpy.concatenate(shards).astype(numpy.int64))


def make_model():
    vocab = 256 if CHOSEN["tokenizer"] == "chars" else CHOSEN["vocab_size"]
    model = Gpt(CHOSEN["n_layer"], CHOSEN["n_head"], CHOSEN["n_embd"], CHOSEN["block_size"], vocab,
                bool(CHOSEN["bias"]), CHOSEN["dropout"])
    for name, weights in model.named_parameters():
        if weights.dim() == 2:
            is_projection = name.endswith("proj.weight")
            torch.nn.init.normal_(weights, std=0.02 / math.sqrt(2 * CHOSEN["n_layer"]) if is_projection else 0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weights)
    return model


def autocast():
    flags = Path("/proc/cpuinfo").read_text().split()
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    is_bf16 = CHOSEN["dtype"] == "bfloat16" or (CHOSEN["dtype"] == "auto" and has_bf16)
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_bf16 else contextlib.nullcontext()


def windows(tokens, begins, length):
    """Returns inputs and targets (windows, length)."""
    found = tokens[begins[:, None] + torch.arange(length + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def learning_rate(step, progress):
    """The rate of a step (0, 1, ...) when this part of the time has passed."""
    if step < CHOSEN["warmup_iters"]:
        return CHOSEN["learning_rate"] * (step + 1) / (CHOSEN["warmup_iters"] + 1)
    low = CHOSEN["min_lr"]
    return low + (CHOSEN["learning_rate"] - low) * 0.5 * (1 + math.cos(math.pi * progress))


def train(text, out, seconds):
    end = BEGIN + seconds - CHOSEN["end_s"]
    torch.manual_seed(int(os.environ.get("CONTEST_SEED", "1")))
    tokens, model = tokens_of(text, out, "train"), make_model()
    matrices = [weights for weights in model.parameters() if weights.dim() >= 2]
    vectors = [weights for weights in model.parameters() if weights.dim() < 2]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=CHOSEN["weight_decay"]), dict(params=vectors, weight_decay=0.0)],
        lr=0.0, betas=(CHOSEN["beta1"], CHOSEN["beta2"]), **{"fused" if CHOSEN["fused"] else "foreach": True})
    forward = torch.compile(model) if CHOSEN["compile"] else model

    def gradient():
        begins = torch.randint(len(tokens) - CHOSEN["block_size"], (CHOSEN["batch_size"],))
        with autocast():
            loss = forward(*windows(tokens, begins, CHOSEN["block_size"]))
        loss.backward()
        return loss

    gradient()  # compiles
    optimizer.zero_grad()
    begin, step, told = time.monotonic(), 0, 0.0
    print(f"begins after {begin - BEGIN:.1f} s", file=sys.stderr)
    while (now := time.monotonic()) < end:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, (now - begin) / (end - begin))
        loss = gradient()
        if CHOSEN["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CHOSEN["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if now - told > 5:
            print(f"step {step} | loss {loss.item():.4f} | {(time.monotonic() - begin) / step * 1000:.1f} ms",
                  file=sys.stderr, flush=True)
            told = now
    print(f"trained {step} steps", file=sys.stderr)
    torch.save(model.state_dict(), out / "model.pt")


@torch.no_grad()
def total_nats(model, tokens):
    """Returns the loss of tokens[1:]. Windows overlap, so that all but the first predictions have a long context."""
    count, done, nats = len(tokens) - 1, 0, 0.0
    length = min(CHOSEN["block_size"], count)
    ends = [*range(length, count, CHOSEN["stride"]), count]
    for first in range(0, len(ends), 64):
        chunk = torch.tensor(ends[first:first + 64])
        losses = model(*windows(tokens, chunk - length, length), reduction="none").view(-1, length)
        for row, end in zip(losses, chunk.tolist()):
            nats += row[length - (end - done):].double().sum().item()
            done = end
    return nats


def score(out, text):
    model = make_model()
    model.load_state_dict(torch.load(out / "model.pt"))
    model.eval()
    print(Path(text).stat().st_size, total_nats(model, tokens_of(text, out, "held_out")))


def main():
    torch.set_num_threads(int(sys.argv[-1]))
    if sys.argv[1] == "train":
        train(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    else:
        score(Path(sys.argv[2]), sys.argv[3])


if __name__ == "__main__":
    main()

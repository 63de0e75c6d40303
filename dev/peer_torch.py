#!/usr/bin/env python3
"""The same training step in PyTorch, on the CPU: what build/bench_cpu is measured against.

    dev/peer_torch.py [fp32|bf16 ...]

Prints the median step time of each workload of dev/bench_cpu.cpp. Run both in turn on an otherwise idle machine and
compare within the run. Threads: all cores. bf16 is autocast, with FP32 masters, as in nanoGPT.
"""
import contextlib
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

GPT2 = dict(layers=12, heads=12, width=768, positions=1024, vocab=50257)
SMALL = dict(layers=6, heads=6, width=384, positions=256, vocab=4096)
WORKLOADS = [
    ("GPT-2 124M, B=4, T=64", GPT2, 4, 64),
    ("6 layers, 384 wide, vocabulary 4096, B=4, T=256", SMALL, 4, 256),
    ("6 layers, 384 wide, vocabulary 4096, B=8, T=256", SMALL, 8, 256),
]


def gelu(x):
    try:
        return F.gelu(x, approximate="tanh")
    except TypeError:
        return F.gelu(x)


class Block(torch.nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.fc, self.fc_proj = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def attend(self, q, k, v):
        if hasattr(F, "scaled_dot_product_attention"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln_1(x)).split(width, dim=2))
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.fc_proj(gelu(self.fc(self.ln_2(x))))


class Gpt(torch.nn.Module):
    def __init__(self, layers, heads, width, positions, vocab):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, width), torch.nn.Embedding(positions, width)
        self.blocks = torch.nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def step_ms(shape, batch, length, precision, steps=7):
    torch.manual_seed(1)
    model = Gpt(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    tokens = torch.randint(shape["vocab"], (batch, length + 1))
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        with cast:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[2:])


def main():
    torch.set_num_threads(os.cpu_count())
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, shape, batch, length in WORKLOADS:
        for precision in sys.argv[1:] or ["fp32", "bf16"]:
            print(f"{name}, {precision}: {step_ms(shape, batch, length, precision):.1f} ms a step", flush=True)


main()

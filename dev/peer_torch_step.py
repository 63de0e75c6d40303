#!/usr/bin/env python3
"""The training step of dev/bench_workloads.cpp in PyTorch; dev/peer_torch.py runs one process per row.

    dev/peer_torch_step.py '{"device": "cuda", "precision": "bf16", "batch": 64, "seq_len": 1024, "shape": {...},
                             "compile": true, "seconds": 100, "step_seconds": 4}'

Prints each figure as one line of JSON as soon as it is measured, and notes on stderr. Measures the eager step first,
then the compiled one. bf16 is autocast with FP32 master weights, as in nanoGPT; the optimizer is AdamW with clipping at
1. On a GPU: fused AdamW, the fastest attention backend for the shape, the vocabulary padded as in ours; no step
synchronizes with the GPU.
"""
import contextlib
import gc
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

GPU = "cuda"
OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tell(**figures):
    print(json.dumps(figures), flush=True)


def note(text):
    print(f"  {text}", file=sys.stderr, flush=True)


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def gelu(x):
    try:
        return F.gelu(x, approximate="tanh")
    except TypeError:
        return F.gelu(x)


def layer_norm(width, bias):
    return torch.nn.LayerNorm(width) if bias else torch.nn.LayerNorm(width, bias=False)  # PyTorch 2.0 has no bias=


class Block(torch.nn.Module):
    def __init__(self, heads, width, bias=True, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = layer_norm(width, bias), layer_norm(width, bias)
        self.qkv, self.proj, self.fc, self.fc_proj = (
            torch.nn.Linear(*sizes, bias=bias)
            for sizes in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)))

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def attend(self, q, k, v):
        if hasattr(F, "scaled_dot_product_attention"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                  dropout_p=self.dropout if self.training else 0.0)
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        return self.drop(scores.masked_fill(~mask, float("-inf")).softmax(-1)) @ v

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln_1(x)).split(width, dim=2))
        x = x + self.drop(self.proj(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.fc_proj(gelu(self.fc(self.ln_2(x)))))


class Gpt(torch.nn.Module):
    def __init__(self, layers, heads, width, positions, vocab, bias=True, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, width), torch.nn.Embedding(positions, width)
        self.blocks = torch.nn.ModuleList(Block(heads, width, bias, dropout) for _ in range(layers))
        self.ln_f, self.dropout = layer_norm(width, bias), dropout
        for weights in (self.wte.weight, self.wpe.weight):
            torch.nn.init.normal_(weights, std=0.02)

    def forward(self, tokens, targets, reduction="mean"):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1), reduction=reduction)


class LlamaBlock(torch.nn.Module):
    def __init__(self, heads, kv_heads, width, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(width, eps=1e-5), torch.nn.RMSNorm(width, eps=1e-5)
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.proj = torch.nn.Linear(width, width, bias=False)
        self.gate_up, self.down = (torch.nn.Linear(*sizes, bias=False)
                                   for sizes in ((width, 2 * hidden), (hidden, width)))

    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), 1)
        attended = F.scaled_dot_product_attention(self.rotate(q, cos, sin), self.rotate(k, cos, sin), v,
                                                  is_causal=True, enable_gqa=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, layers, heads, kv_heads, width, hidden, vocab):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab, width), torch.nn.Linear(width, vocab, bias=False)
        self.blocks = torch.nn.ModuleList(LlamaBlock(heads, kv_heads, width, hidden) for _ in range(layers))
        self.norm, self.size = torch.nn.RMSNorm(width, eps=1e-5), width // heads
        for weights in (self.embed.weight, self.head.weight):
            torch.nn.init.normal_(weights, std=0.02)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        exponents = torch.arange(0, self.size, 2, device=tokens.device, dtype=torch.float32) / self.size
        angles = torch.outer(positions, 10000.0 ** -exponents)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def make_model(shape):
    sizes = {name: value for name, value in shape.items() if name != "family"}
    return Llama(**sizes) if shape.get("family") == "llama" else Gpt(**sizes)


def make_step(model, device, precision, shape, batch, length, compiled=False):
    """Returns a function that runs one step. It does not synchronize with the GPU."""
    settings = dict(fused=True) if device == GPU else dict(foreach=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **settings)
    tokens = torch.randint(shape["vocab"], (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    forward = torch.compile(model) if compiled else model

    def step():
        half = HALVES.get(precision)
        with torch.autocast(device, dtype=half) if half else contextlib.nullcontext():
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


def cpu_times(call, warm_up, seconds):
    for _ in range(warm_up):
        call()
    times, start = [], time.perf_counter()
    while len(times) < 7 or (time.perf_counter() - start < seconds and len(times) < 200):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1000)
    return times


def gpu_times(call, warm_up, seconds):
    """Milliseconds of each call, by events that are synchronized at the end, so that the GPU never idles."""
    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(5, min(200, int(seconds / (time.perf_counter() - start))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def attention_times(job, seconds):
    """Milliseconds of attention, forward and backward, by available backend. Starts none after `seconds`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    start, shape, took = time.perf_counter(), job["shape"], {}
    size = (job["batch"], job["seq_len"], shape["heads"], shape["width"] // shape["heads"])
    dtype = HALVES.get(job["precision"], torch.float32)
    q, k, v = (torch.randn(size, device=GPU, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        if time.perf_counter() - start > seconds:
            note(f"{name}: not tried, for lack of time")
            continue
        try:
            with sdpa_kernel([getattr(SDPBackend, name)]):
                times = gpu_times(lambda: torch.autograd.grad(
                    F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad), 2, 0.1)
            took[name] = statistics.median(times)
        except (RuntimeError, AttributeError) as error:
            note(f"{name}: not here ({first_line(error)})")
    return took


def with_attention(backend):
    if not backend:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel([getattr(SDPBackend, backend)])


def free_memory(device):
    gc.collect()
    if device == GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_step(job, backend, compiled):
    """Milliseconds of each step."""
    device, shape = job["device"], job["shape"]
    padded = dict(shape, vocab=(shape["vocab"] + 127) // 128 * 128) if device == GPU else shape
    torch.manual_seed(1)
    with with_attention(backend):
        step = make_step(make_model(padded).to(device), device, job["precision"], shape, job["batch"], job["seq_len"],
                         compiled)
        return (gpu_times if device == GPU else cpu_times)(step, 3, job["step_seconds"])


def measure(job):
    device, backend = job["device"], None
    if device == GPU:
        took = attention_times(job, min(15, job["seconds"] / 4))
        backend = min(took, key=took.get, default="MATH")
        tell(attention=backend, attention_ms=took)
    for compiled in (False, True) if job["compile"] else (False,):
        kind = "compiled" if compiled else "eager"
        try:
            times = measure_step(job, backend, compiled)
        except OUT_OF_MEMORY:
            note(f"{kind}: out of memory")
            tell(**{f"{kind}_error": "out of memory"})
        except Exception as error:  # for example, no C compiler or no Python headers
            note(f"{kind}: {first_line(error)}")
            tell(**{f"{kind}_error": first_line(error)})
        else:
            figures = {f"{kind}_ms": statistics.median(times), "steps": len(times)}
            if device == GPU:
                figures["memory_bytes"] = torch.cuda.max_memory_allocated()
            tell(**figures)
        free_memory(device)


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(os.cpu_count())
    if job["device"] == GPU and not torch.cuda.is_available():
        tell(version=torch.__version__, error="this PyTorch finds no GPU")
        return
    tell(version=torch.__version__,
         device_name=torch.cuda.get_device_name() if job["device"] == GPU else f"{torch.get_num_threads()} threads")
    measure(job)


if __name__ == "__main__":
    main()

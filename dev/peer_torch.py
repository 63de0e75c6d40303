#!/usr/bin/env python3
"""The same training step in PyTorch: what build/bench_cpu and build/bench_cuda are measured against.

    dev/peer_torch.py [fp32|bf16 ...] [--workload KEY ...] [--json FILE]                    on the CPU
    dev/peer_torch.py --device cuda --against build/bench_cuda [--seconds N] [--json FILE]  on a GPU

Prints the median step time of each workload of dev/bench.cpp. Run both in turn on an otherwise idle machine and
compare within the run; --against does that: our steps, PyTorch's, ours again, for each workload. bf16 is autocast, with
FP32 masters, as in nanoGPT; the optimizer is AdamW with clipping at 1.

CPU: all cores. GPU: torch.compile, fused AdamW, the attention backend that is fastest at the workload's shape,
vocabulary padded as ours; nothing in a step waits for the GPU.
"""
import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F


def gpt(layers, heads, width, positions=1024, vocab=50257):
    return dict(layers=layers, heads=heads, width=width, positions=positions, vocab=vocab)


# Key: name, shape, sequences, length. As in dev/bench.cpp.
CPU_WORKLOADS = {
    "124M": ("GPT-2 124M", gpt(12, 12, 768), 4, 64),
    "small-4": ("6 layers, 384 wide, vocabulary 4096", gpt(6, 6, 384, 256, 4096), 4, 256),
    "small-8": ("6 layers, 384 wide, vocabulary 4096", gpt(6, 6, 384, 256, 4096), 8, 256),
}
GPU_WORKLOADS = {
    "124M": ("GPT-2 124M", gpt(12, 12, 768), 64, 1024),
    "1558M": ("GPT-2 1558M", gpt(48, 25, 1600), 16, 1024),
    "350M": ("GPT-2 350M", gpt(24, 16, 1024), 32, 1024),
    "774M": ("GPT-2 774M", gpt(36, 20, 1280), 32, 1024),
}
GPU = "cuda"
TINY = {"tiny": ("2 layers, 64 wide, vocabulary 256", gpt(2, 2, 64, 32, 256), 2, 32)}  # to try this


OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


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
        for weights in (self.wte.weight, self.wpe.weight):
            torch.nn.init.normal_(weights, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def make_step(model, device, precision, shape, batch, length, compiled=False):
    """A function that does one step. The GPU's is waited for by nobody."""
    settings = dict(fused=True) if device == GPU else dict(foreach=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **settings)
    tokens = torch.randint(shape["vocab"], (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    forward = torch.compile(model) if compiled else model

    def step():
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        with torch.autocast(device, dtype=half) if half else contextlib.nullcontext():
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


def cpu_step_ms(shape, batch, length, precision, steps=7):
    torch.manual_seed(1)
    step = make_step(Gpt(**shape), "cpu", precision, shape, batch, length)
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[2:])


def gpu_times(call, warm_up, seconds):
    """Milliseconds of each call: events around it, waited for at the end, so that the GPU never idles."""
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


def best_attention(shape, batch, length, precision):
    """The backend whose forward and backward are fastest, and what each took in milliseconds."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = (batch, length, shape["heads"], shape["width"] // shape["heads"])
    q, k, v = (torch.randn(size, device=GPU, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)
    took = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        try:
            with sdpa_kernel([getattr(SDPBackend, name)]):
                times = gpu_times(lambda: torch.autograd.grad(
                    F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad), 3, 0.2)
            took[name] = statistics.median(times)
        except (RuntimeError, AttributeError) as error:
            print(f"  {name}: not here ({str(error).splitlines()[0][:90]})", flush=True)
    return min(took, key=took.get, default="MATH"), took


def gpu_measure(shape, batch, length, precision, seconds):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    start = time.perf_counter()
    padded = dict(shape, vocab=(shape["vocab"] + 127) // 128 * 128)
    backend, took = best_attention(shape, batch, length, precision)

    def measure(compiled):
        torch.manual_seed(1)
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            step = make_step(Gpt(**padded).to(GPU), GPU, precision, shape, batch, length, compiled)
            return gpu_times(step, 5, seconds)

    compiled = True
    try:
        times = measure(compiled)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:  # the compiler needs a C compiler and Python's headers, say
        print(f"  torch.compile does not work here ({str(error).splitlines()[0][:200]}): eager", flush=True)
        compiled = False
        times = measure(compiled)
    memory = torch.cuda.max_memory_allocated()
    free_memory()
    return dict(step_ms=statistics.median(times), steps=len(times), attention=backend, attention_ms=took,
                compiled=compiled, memory_bytes=memory, seconds_with_compiling=time.perf_counter() - start)


def free_memory():
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def our_step(program, key, precision, seconds):
    """The result of our bench for one workload, or a reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.json")
        result = subprocess.run([program, precision, "--workload", key, "--steps-only", "--seconds", str(seconds),
                                 "--json", path], capture_output=True, text=True)
        if result.returncode or not path.exists():
            return None, (result.stderr or result.stdout).strip()
        return json.loads(path.read_text())["results"][0], ""


def compare(options, name, shape, batch, length, key, precision):
    """Ours, PyTorch's, ours again."""
    ours = []
    row = dict(workload=key, precision=precision, batch=batch, seq_len=length)

    def measure_ours():
        result, reason = our_step(options.against, key, precision, options.step_seconds)
        if result:
            ours.append(result["step_ms"])
            row["batch"] = result["batch"]
        else:
            print(f"{name}, {precision}: {options.against} failed: {reason[-300:]}", flush=True)

    if options.against:
        measure_ours()
    batch = row["batch"]
    if options.device != "cpu":
        row["torch"] = gpu_measure(shape, batch, length, precision, options.step_seconds)
    else:
        row["torch"] = dict(step_ms=cpu_step_ms(shape, batch, length, precision))
    theirs = row["torch"]["step_ms"]
    text = f"{name}, B={batch}, T={length}, {precision}: "
    if options.against:
        measure_ours()
    if ours:
        row.update(ours_ms=ours, ratio=theirs / statistics.mean(ours))
        text += f"ours {' and '.join(f'{ms:.1f}' for ms in ours)} ms a step, PyTorch "
    text += f"{theirs:.1f} ms a step"
    if "attention" in row["torch"]:
        text += f" ({'compiled' if row['torch']['compiled'] else 'eager'}, {row['torch']['attention']})"
    if ours:
        text += f": {row['ratio']:.3f} times as long"
    print(text, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description="The training step of dev/bench.cpp in PyTorch.")
    parser.add_argument("precisions", nargs="*", metavar="PRECISION")
    parser.add_argument("--device", choices=["cpu", GPU], default="cpu")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--against", metavar="BENCH", help="our bench, run in turn with this")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1e9, help="no workload is begun that might not fit into these")
    parser.add_argument("--step-seconds", type=float, default=4, help="how long each step is measured")
    options = parser.parse_args()
    on_gpu = options.device == GPU
    if on_gpu and not torch.cuda.is_available():
        sys.exit("this PyTorch finds no GPU")
    start = time.perf_counter()
    torch.set_num_threads(os.cpu_count())
    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    print(f"PyTorch {torch.__version__}, {device}", flush=True)

    default = GPU_WORKLOADS if on_gpu else CPU_WORKLOADS
    rows, longest = [], 0.0
    for key in options.workload or default:
        name, shape, batch, length = {**default, **TINY}[key]
        for precision in options.precisions or (["bf16"] if on_gpu else ["fp32", "bf16"]):
            left = options.seconds - (time.perf_counter() - start)
            if left < 1.3 * longest:
                print(f"{name}, {precision}: not measured, {left:.0f} s are left")
                continue
            begin = time.perf_counter()
            try:
                rows.append(compare(options, name, shape, batch, length, key, precision))
            except OUT_OF_MEMORY:
                print(f"{name}, B={batch}, {precision}: PyTorch runs out of memory", flush=True)
                free_memory()
            longest = max(longest, time.perf_counter() - begin)
            if options.json:
                Path(options.json).write_text(json.dumps(dict(torch=torch.__version__, device=device, rows=rows),
                                                         indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The same training step in PyTorch, to compare with build/bench_cpu and build/bench_cuda.

    dev/peer_torch.py [fp32|bf16 ...] [--workload KEY ...] [--json FILE]                    on the CPU
    dev/peer_torch.py --device cuda --against build/bench_cuda [--seconds N] [--json FILE]  on a GPU

For each workload of dev/bench_workloads.cpp: our step, PyTorch's (eager; on a GPU also compiled), then ours again, to
see changes of the machine. FILE is replaced after every figure: {"torch", "device", "rows": [{"workload", "precision",
"batch", "seq_len", "ours_ms": [before, after], "torch": {"step_ms", "eager_ms", "compiled_ms", "compiled", "attention",
"attention_ms", "steps", "memory_bytes"}, "ratio"}]}. step_ms is compiled_ms or, if missing, eager_ms; ratio is step_ms
over the mean of ours_ms. Failures are in "error", "eager_error", "compiled_error" or "ours_error".

PyTorch runs in a separate process (dev/peer_torch_step.py) of the interpreter --python, which is ended if it takes too
long: torch.compile may take minutes. Ends after --seconds with the figures so far.
Exit codes: 0 PyTorch's step was measured for at least one row, 1 for none.
"""
import argparse
import ctypes
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP = Path(__file__).with_name("peer_torch_step.py")


def gpt(layers, heads, width, positions=1024, vocab=50257):
    return dict(layers=layers, heads=heads, width=width, positions=positions, vocab=vocab)


def llama(layers, heads, kv_heads, width, hidden, vocab):
    return dict(family="llama", layers=layers, heads=heads, kv_heads=kv_heads, width=width, hidden=hidden, vocab=vocab)


# Key: name, shape, sequences, length. As in dev/bench_workloads.cpp.
CPU_WORKLOADS = {
    "124M": ("GPT-2 124M", gpt(12, 12, 768), 4, 64),
    "small-4": ("6 layers, 384 wide, vocabulary 4096", gpt(6, 6, 384, 256, 4096), 4, 256),
    "small-8": ("6 layers, 384 wide, vocabulary 4096", gpt(6, 6, 384, 256, 4096), 8, 256),
    "llama-small": ("Llama, 6 layers, 384 wide, 2 of 6 heads for keys, vocabulary 4096",
                    llama(6, 6, 2, 384, 1024, 4096), 4, 256),
}
GPU_WORKLOADS = {
    "124M": ("GPT-2 124M", gpt(12, 12, 768), 64, 1024),
    "1558M": ("GPT-2 1558M", gpt(48, 25, 1600), 16, 1024),
    "350M": ("GPT-2 350M", gpt(24, 16, 1024), 32, 1024),
    "774M": ("GPT-2 774M", gpt(36, 20, 1280), 32, 1024),
    "llama-1.1B": ("Llama 1.1B, 4 of 32 heads for keys", llama(22, 32, 4, 2048, 5632, 32000), 8, 2048),
}
GPU = "cuda"
TINY = {"tiny": ("2 layers, 64 wide, vocabulary 256", gpt(2, 1, 64, 32, 256), 2, 16)}  # for tests


class Report:
    """The JSON file, which is replaced atomically."""

    def __init__(self, path):
        self.path = path
        self.content = dict(torch=None, device=None, rows=[])

    def write(self):
        if not self.path:
            return
        part = f"{self.path}.part"
        Path(part).write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self.path)


def end_with_parent():
    """Called in the child: ends it if the parent is killed, so that it does not keep the GPU busy."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(command):
    """A process in its own process group, with its output as bytes."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True, preexec_fn=end_with_parent)


def lines_of(command, seconds):
    """Yields the output of a process line by line, and ends it after `seconds`. The last item is its exit code, or None
    if it was ended. Raises OSError if it cannot start."""
    deadline = time.monotonic() + seconds
    process = start(command)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while selector.select(max(0, deadline - time.monotonic())):
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                *whole, rest = (rest + piece).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        try:
            code = process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        yield code
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # includes the compiler's processes
        except ProcessLookupError:
            pass
        process.stdout.close()
        process.wait()


def our_step(program, key, precision, step_seconds, seconds):
    """The result of our benchmark for one workload, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.json")
        said = []
        try:
            said = list(lines_of([program, precision, "--workload", key, "--steps-only", "--seconds", str(step_seconds),
                                  "--json", str(path)], seconds))
            result = json.loads(path.read_text())["results"][0]
            result["step_ms"] + result["batch"]
            return result, ""
        except (OSError, ValueError, LookupError, TypeError) as error:
            if said and said[-1] is None:
                return None, f"it was ended after {seconds:.0f} s"
            words = [line for line in said[:-1] if line.strip()]
            return None, (words[-1] if words else str(error))[-300:]


class Row:
    """One workload in one precision: ours, PyTorch's, ours again."""

    def __init__(self, options, report, key, workload, precision, deadline):
        self.options, self.report, self.deadline = options, report, deadline
        self.name, self.shape, batch, length = workload
        self.key, self.precision, self.ours_took = key, precision, 0.0
        self.row = dict(workload=key, precision=precision, batch=batch, seq_len=length, ours_ms=[], torch={})
        report.content["rows"].append(self.row)

    def left(self):
        return self.deadline - time.monotonic()

    def update(self):
        torch, ours = self.row["torch"], self.row["ours_ms"]
        torch["compiled"] = "compiled_ms" in torch
        if "compiled_ms" in torch or "eager_ms" in torch:
            torch["step_ms"] = torch.get("compiled_ms", torch.get("eager_ms"))
            if ours:
                self.row["ratio"] = torch["step_ms"] / statistics.mean(ours)
        self.report.write()

    def measure_ours(self, seconds):
        if not self.options.against or seconds <= 0:
            return
        begin = time.monotonic()
        result, reason = our_step(self.options.against, self.key, self.precision, self.options.step_seconds, seconds)
        self.ours_took = time.monotonic() - begin
        if result:
            self.row["ours_ms"].append(result["step_ms"])
            self.row["batch"] = result["batch"]  # the largest batch that fits in GPU memory
        else:
            self.row["ours_error"] = f"{self.options.against}: {reason}"
            print(f"{self.name}, {self.precision}: {self.row['ours_error']}", flush=True)
        self.update()

    def measure_torch(self):
        seconds = self.left()
        if self.row["ours_ms"]:
            seconds -= 1.5 * self.ours_took + 2  # reserved for the second run of ours
        if seconds <= 0:
            return
        job = dict(device=self.options.device, precision=self.precision, batch=self.row["batch"],
                   seq_len=self.row["seq_len"], shape=self.shape, compile=self.options.compile, seconds=seconds,
                   step_seconds=self.options.step_seconds)
        torch, last = self.row["torch"], ""
        try:
            for line in lines_of([self.options.python, str(STEP), json.dumps(job)], seconds):
                if isinstance(line, str):
                    last = line.strip() or last
                    self.take(line)
                elif line is None:
                    torch["error"] = f"ended after {seconds:.0f} s"
                elif line != 0:
                    torch["error"] = f"exit code {line}: {last[-200:]}"
        except OSError as error:
            torch["error"] = str(error)
        if "error" in torch:
            print(f"{self.name}, {self.precision}: PyTorch: {torch['error']}", flush=True)
        self.update()

    def take(self, line):
        """Handles a line of dev/peer_torch_step.py: a figure, or a note to print."""
        try:
            figures = json.loads(line)
            assert isinstance(figures, dict)
        except (ValueError, AssertionError):
            print(line, flush=True)
            return
        if "version" in figures:
            self.report.content["torch"] = figures.pop("version")
        if "device_name" in figures:
            self.report.content["device"] = figures.pop("device_name")
        self.row["torch"].update(figures)
        self.update()

    def measure(self):
        self.measure_ours(self.left() / 3)
        self.measure_torch()
        if self.row["ours_ms"]:
            self.measure_ours(self.left())
        print(self.words(), flush=True)

    def words(self):
        torch, ours = self.row["torch"], self.row["ours_ms"]
        text = f"{self.name}, B={self.row['batch']}, T={self.row['seq_len']}, {self.precision}: "
        if ours:
            text += f"ours {' and '.join(f'{ms:.1f}' for ms in ours)} ms a step, "
        if "step_ms" not in torch:
            return text + "PyTorch was not measured"
        kinds = [f"{kind} {torch[f'{kind}_ms']:.1f}" for kind in ("eager", "compiled") if f"{kind}_ms" in torch]
        text += f"PyTorch {', '.join(kinds)} ms a step"
        if "attention" in torch:
            text += f" ({torch['attention']})"
        return text + (f": {self.row['ratio']:.3f} times as long" if "ratio" in self.row else "")


def main():
    parser = argparse.ArgumentParser(description="The training step of dev/bench_workloads.cpp in PyTorch.")
    parser.add_argument("precisions", nargs="*", metavar="PRECISION")
    parser.add_argument("--device", choices=["cpu", GPU], default="cpu")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--against", metavar="BENCH", help="our benchmark, run before and after PyTorch")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1e6, help="total time limit")
    parser.add_argument("--step-seconds", type=float, default=4, help="measuring time per step")
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help="interpreter with PyTorch")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        help="measure the compiled step too (default: on a GPU)")
    options = parser.parse_args()
    on_gpu = options.device == GPU
    if options.compile is None:
        options.compile = on_gpu
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through lines_of(), which ends the child
    deadline = time.monotonic() + options.seconds

    default = GPU_WORKLOADS if on_gpu else CPU_WORKLOADS
    known = {**default, **TINY}
    report = Report(options.json)
    report.write()
    for key in options.workload or default:
        if key not in known:
            parser.error(f"unknown workload {key}; choose from {', '.join(known)}")
        for precision in options.precisions or (["bf16"] if on_gpu else ["fp32", "bf16"]):
            if time.monotonic() >= deadline:
                print(f"{known[key][0]}, {precision}: not measured, no time left", flush=True)
                continue
            Row(options, report, key, known[key], precision, deadline).measure()
    sys.exit(not any("step_ms" in row["torch"] for row in report.content["rows"]))


if __name__ == "__main__":
    main()

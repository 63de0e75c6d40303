"""What each stage of gpu_check.py runs, its share of the part's time, and how its result is read.

A stage's program leaves its figures in Place.figures(stage), where it rewrites them after each measurement, so that
they can be read also when it did not end well.
"""
import importlib.util
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import cuda_libraries

PARTS = ("measure", "prove", "sanitize")
MAX_FIGURES_BYTES = 1_000_000


class NotRun(Exception):
    """The stage cannot run on this machine, which is no failure; says why."""


@dataclass
class Place:
    """What the stages know about where they run."""
    root: Path  # of the repository or of the unpacked kit
    programs: Path
    work: Path  # a temporary folder
    libraries: cuda_libraries.Libraries
    capability: str  # compute capability: "9.0"

    def program(self, name):
        return self.programs / name

    def figures(self, stage):
        return self.work / f"{stage.name}.json"

    def environment(self, stage=None):
        """For our programs; PyTorch brings its own CUDA libraries."""
        if stage and stage.is_peer:
            return dict(os.environ)
        variables = stage.variables if stage else {}
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries.ld_library_path, "TMPDIR": str(self.work), **variables}


@dataclass
class Reading:
    """What a stage's output says: a line for the table, its figures, and whether they are as they must be."""
    detail: str
    figures: dict = field(default_factory=dict)
    good: bool = True


@dataclass
class Stage:
    name: str
    share: float  # seconds of the default limit; other limits are divided in the same proportion
    programs: tuple  # of Place.programs
    command: Callable  # (place, stage, seconds) -> [program, argument, ...]; may raise NotRun
    read: Callable  # (place, stage, output) -> Reading; any exception means that the stage failed
    variables: dict = field(default_factory=dict)
    is_peer: bool = False  # the verdict does not count, and it may take all the time that earlier stages left
    workload: str = ""


@dataclass
class Workload:
    """`config` and `changes` are what the trainer runs, by section."""
    key: str
    config: str = ""
    changes: dict = field(default_factory=dict)
    steps: int = 30


WORKLOADS = {
    "124M": Workload("124M", "configs/gpt2_124M.json"),
    "1558M": Workload("1558M"),
    # For machines without a GPU, where the simulator's programs stand in for the GPU's.
    "tiny": Workload("tiny", "configs/gpt2_124M.json", {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32, "vocab_size": 256},
        "train": {"batch_size": 2, "seq_len": 32, "total_batch_tokens": 64}}, 4),
}
GPU_WORKLOADS = ["124M", "1558M"]


def finite(value):
    """A value of JSON without infinities and NaN, which Python reads and writes but JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_figures(place, stage):
    """What the stage's program measured. Raises what is wrong with the file."""
    path = place.figures(stage)
    if path.stat().st_size > MAX_FIGURES_BYTES:
        raise ValueError(f"the figures have {path.stat().st_size} bytes, more than {MAX_FIGURES_BYTES}")
    figures = finite(json.loads(path.read_text()))
    if not isinstance(figures, dict):
        raise ValueError("the figures are not a JSON object")
    return figures


# ---- tests in Catch2's words ----------------------------------------------------------------------------------------

def read_tests(place, stage, output):
    """The summary of a test program, and which test cases failed."""
    good = re.findall(r"^All tests passed \((.*)\)", output, re.M)
    counts = re.findall(r"^test cases: *(\d+)(.*)", output, re.M)
    if good:
        return Reading(good[-1])
    if not counts:
        return Reading("no test ran", good=False)
    failing = re.findall(r"^-{70,}\n(\S.*)\n(?: .*\n)*-{70,}\n", output, re.M)
    failing += re.findall(r"^(?:FAIL|ERROR): (\S+)", output, re.M)
    names = list(dict.fromkeys(failing))
    passed, failed = (re.search(rf"(\d+) {word}", counts[-1][1]) for word in ("passed", "failed"))
    detail = f"{counts[-1][0]} test cases" + "".join(f", {found[0]}" for found in (passed, failed) if found)
    if names:
        detail += ": " + ", ".join(names)
    is_good = bool(passed and int(passed[1])) and not (failed and int(failed[1]))
    return Reading(detail, {"failing": names}, is_good)


def tests(place, stage, spec):
    return [place.program("test_cuda"), spec]


# ---- measure --------------------------------------------------------------------------------------------------------

def choices(place):
    """Each program chooses algorithms once, in a file that no earlier run left behind."""
    return ["--choices", place.work / "choices.json"]


def roofs(place, stage, seconds):
    return [place.program("bench_cuda"), "--roofs", "--json", place.figures(stage)]


def read_roofs(place, stage, output):
    figures = load_figures(place, stage)
    return Reading("copy {copy_gb_per_s:.0f} GB/s, bf16 GEMM {bf16_tflops:.1f} TFLOP/s".format(**figures["roofs"]),
                   figures)


def bench(place, stage, seconds):
    """Every op, or the whole step, of a workload."""
    figures, measured = place.figures(stage), place.work / "roofs.json"
    command = [place.program("bench_cuda"), "bf16", "--workload", stage.workload, "--json", figures, *choices(place)]
    if stage.name.startswith("step_"):
        return [*command, "--steps-only"]
    return [*command, "--ops-only"] + (["--roofs-from", measured] if measured.exists() else [])


def read_ops(place, stage, output):
    figures = load_figures(place, stage)
    ops = figures["results"][0]["ops"]
    above = sum(float(op["ms_above_roof"]) for op in ops)
    return Reading(f"{len(ops)} ops, {sum(float(op['total_ms']) for op in ops):.2f} ms a step, "
                   f"{above:.2f} ms of them above the roofline", figures, len(ops) > 0)


def percent(share):
    return "n/a" if share is None else f"{100 * share:.1f} %"


def read_step(place, stage, output):
    figures = load_figures(place, stage)
    result = figures["results"][0]
    return Reading(f"{result['step_ms']:.2f} ms a step, {result['tokens_per_s']:.0f} tokens/s, "
                   f"MFU {percent(result.get('mfu'))}", figures)


def peer(place, stage, seconds):
    """PyTorch's step, and before and after it ours, which alone gets the CUDA libraries that were found."""
    if importlib.util.find_spec("torch") is None:
        raise NotRun("this python3 has no PyTorch")
    ours = place.work / "bench_cuda"
    ours.write_text(f"#!/usr/bin/env bash\nexport LD_LIBRARY_PATH='{place.libraries.ld_library_path}'\n"
                    f"exec '{place.program('bench_cuda')}' \"$@\"\n")
    ours.chmod(0o755)
    return [sys.executable, place.root / "dev/peer_torch.py", "--device", "cuda", "--workload", stage.workload,
            "--against", ours, "--json", place.figures(stage), "--seconds", str(max(1, int(seconds - 8)))]


def read_peer(place, stage, output):
    figures = load_figures(place, stage)
    row = figures["rows"][0]
    step_ms, ratio = row["torch"].get("step_ms"), row.get("ratio")
    detail = f"{step_ms:.2f} ms a step" if step_ms else f"eager {row['torch']['eager_ms']:.2f} ms a step"
    return Reading(detail + (f", {ratio:.3f} times ours" if ratio else ""), figures)


def write_shards(folder, tokens, vocab_size):
    """Training tokens without a pattern, as one of llm.c's shards."""
    ids = array("H", random.Random(1).getrandbits(16 * tokens).to_bytes(2 * tokens, "little"))
    header = array("i", [20240520, 1, tokens] + [0] * 253)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_000000.bin").write_bytes(header.tobytes()
                                              + array("H", (token % vocab_size for token in ids)).tobytes())


def trainer(place, stage, seconds):
    """The trainer with a configuration of the repository as it is, on synthetic tokens, without evaluation. The last
    two steps are traced."""
    work, workload = place.work / stage.name, WORKLOADS[stage.workload]
    config = json.loads((place.root / workload.config).read_text())
    for section, changes in workload.changes.items():
        config[section].update(changes)
    write_shards(work, 2 * config["train"]["total_batch_tokens"] + 1, config["model"]["vocab_size"])
    config["run"]["dir"] = str(work / "run")
    config["data"] = {"train": str(work / "train_*.bin"), "val": ""}
    config["train"]["max_steps"] = workload.steps
    config["schedule"]["warmup_steps"] = 2
    config["eval"]["every_steps"] = config["checkpoint"]["every_steps"] = 0
    (work / "config.json").write_text(json.dumps(config, indent=1))
    return [place.program("train_gpt"), work / "config.json", "--fresh", "--profile",
            f"{workload.steps - 1}:{workload.steps}"]


def traced_ops(path):
    """Per step of a trace of --profile: calls, milliseconds and share of the roofline by op, the slowest first."""
    trace = json.loads(path.read_text())
    steps = trace["otherData"]["last_step"] - trace["otherData"]["first_step"] + 1
    ops = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and "flops" in event["args"]:
            op = ops.setdefault(event["name"], {"name": event["name"], "calls": 0, "ms": 0.0, "roof_ms": 0.0})
            op["calls"] += 1 / steps
            op["ms"] += event["dur"] / 1000 / steps
            op["roof_ms"] += event["dur"] / 1000 / steps * event["args"].get("roofline_share", 0)
    return sorted(ops.values(), key=lambda op: -op["ms"])


def read_trainer(place, stage, output):
    """From metrics.jsonl, a line per step; the first steps choose algorithms and warm the GPU up."""
    path = place.work / stage.name / "run/metrics.jsonl"
    lines = [line for line in path.read_text().split("\n")[:-1]]
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    steady = records[min(5, len(records) // 2):]
    step_ms, rate = (statistics.median(record[key] for record in steady) for key in ("step_ms", "tokens_per_s"))
    shares = [record["mfu"] for record in steady if record["mfu"] is not None]
    config = json.loads((path.parent.parent / "config.json").read_text())["train"]
    figures = {"steps": len(records), "step_ms": step_ms, "tokens_per_s": rate,
               "mfu": statistics.median(shares) if shares else None, "batch": config["batch_size"],
               "seq_len": config["seq_len"], "losses": [records[0]["loss"], records[-1]["loss"]],
               "ops": traced_ops(next(path.parent.glob("profile/rank_0.*.json")))}
    for key in ("power_w", "gpu_temperature_c", "sm_clock_mhz"):  # where NVML tells
        known = [record[key] for record in steady if key in record]
        figures.update({key: statistics.median(known)} if known else {})
    figures["throttle"] = sorted({record["throttle"] for record in steady if record.get("throttle")})
    place.figures(stage).write_text(json.dumps(figures))
    traced_ms = sum(op["ms"] for op in figures["ops"])
    detail = f"{len(records)} steps, {step_ms:.2f} ms a step, {rate:.0f} tokens/s, MFU {percent(figures['mfu'])}, " \
             f"{traced_ms:.2f} ms in ops"
    if "power_w" in figures:
        detail += f", {figures['power_w']:.0f} W"
    return Reading(detail, figures, len(records) == WORKLOADS[stage.workload].steps and traced_ms > 0)


def matmul(place, stage, seconds):
    return [place.program("bench_matmul_cuda"), "--workload", stage.workload, "--json", place.figures(stage),
            "--seconds", str(max(1, int(seconds - 8)))]


def read_matmul(place, stage, output):
    figures = load_figures(place, stage)
    products = figures["products"]
    chosen = [one for one in products if one["chosen"]]
    mismatches = sum(int(one["chosen"]["mismatches"]) for one in chosen)
    faster = [one for one in chosen if one["excluded"] and one["excluded"]["ms"] < one["chosen"]["ms"]]
    detail = (f"{len(products)} GEMMs, {mismatches} repeats of the chosen algorithms with other bits, "
              f"an excluded one faster for {len(faster)}")
    without = [one for one in products if not one["chosen"]]
    if without:
        detail += f", no algorithm for {len(without)}"
    # Where the library has no fused epilogue, training adds it to the plain product.
    good = bool(products) and mismatches == 0 and all(one["epilogue"] != "plain" for one in without)
    return Reading(detail, figures, good)


def measure(workloads):
    """Most valuable results first: had the machine only N minutes, they are those of the first N."""
    def stages(kind, shares, *how, keys=workloads, **more):
        return [Stage(f"{kind}_{key}", shares[i > 0], *how, workload=key, **more) for i, key in enumerate(keys)]
    first, rest = workloads[:1], workloads[1:]

    def steps(keys, share):
        return stages("step", (share, share), ("bench_cuda",), bench, read_step, keys=keys)

    def peers(keys, share):
        return stages("peer", (share, share), (), peer, read_peer, keys=keys, is_peer=True)

    trained = [key for key in first if WORKLOADS[key].config]
    return [Stage("roofs", 20, ("bench_cuda",), roofs, read_roofs),
            Stage("ops", 70, ("test_cuda",), lambda place, stage, _: tests(place, stage, "[ops]"), read_tests),
            *stages("ops", (35, 35), ("bench_cuda",), bench, read_ops),
            *steps(first, 25),
            *peers(first, 150),
            *stages("trainer", (35, 35), ("train_gpt",), trainer, read_trainer, keys=trained),
            *stages("matmul", (40, 40), ("bench_matmul_cuda",), matmul, read_matmul),
            *steps(rest, 30),
            *peers(rest, 60)]


# ---- prove ----------------------------------------------------------------------------------------------------------

# Of test/ptx_probe, as ptx_probe_simt --list prints them.
PROBE_GROUPS = {
    "sm_80": ["fragments", "copies", "barriers", "conversions"],
    "sm_90a": ["stmatrix", "mbarrier", "bulk", "cluster", "registers", "wgmma_sizes", "wgmma_layouts",
               "wgmma_registers", "tensor_copies", "tensor_multicast", "tensor_swizzle"],
}


def probe(architecture, group):
    def command(place, stage, seconds):
        if architecture == "sm_90a" and not place.capability.startswith("9."):
            raise NotRun(f"instructions of sm_90a; this GPU's compute capability is {place.capability}")
        return [sys.executable, place.root / "scripts/gpu_probe.py", "--expected", place.program("ptx_probe_simt"),
                "--actual", place.program("ptx_probe_cuda"), "--json", place.figures(stage), group]
    return command


def read_probe(place, stage, output):
    figures = load_figures(place, stage)
    probes = figures["probes"]
    unlike = [one["name"] for one in probes if one["differences"]]
    left = figures["expected"][len(probes):]
    words = sum(one["words"] for one in probes)
    detail = f"{len(probes)} probes, {words} words, " + (f"unlike the twin: {', '.join(unlike)}" if unlike else "equal")
    if left:
        detail += f"; not finished: {', '.join(left)}"
    return Reading(detail, figures, bool(probes) and not unlike and not left)


def gpu_trainer(test):
    def command(place, stage, seconds):
        return [sys.executable, place.root / "test/program", f"gpu_trainer.GpuTrainer.{test}"]
    return command


def trainer_variables(place):
    return {"TRAINER": str(place.program("train_gpt")), "CPU_TRAINER": str(place.program("train_gpt_cpu"))}


def read_gpu_trainer(place, stage, output):
    """The lines about single runs, too."""
    reading = read_tests(place, stage, output)
    lines = re.findall(r"^(\w+ \w+: .*)$", output, re.M)
    reading.figures["lines"] = lines[:50]
    return reading


def comm(place, stage, seconds):
    if place.libraries.optional_missing:
        raise NotRun(place.libraries.optional_missing[0])
    return tests(place, stage, "[comm]")


def prove(place):
    probes = [Stage(f"probe_{group}", 12, ("ptx_probe_cuda", "ptx_probe_simt"), probe(architecture, group), read_probe)
              for architecture, groups in PROBE_GROUPS.items() for group in groups]
    trainers = ("train_gpt", "train_gpt_cpu")
    return [*probes,
            Stage("reference", 90, ("test_cuda",), lambda place, stage, _: tests(place, stage, "[model]"), read_tests),
            Stage("curves", 135, trainers, gpu_trainer("test_loss_curves_follow_the_cpu"), read_gpu_trainer,
                  trainer_variables(place)),
            Stage("resume", 90, trainers, gpu_trainer("test_two_runs_and_a_resumed_one_give_the_same_bits"),
                  read_gpu_trainer, trainer_variables(place)),
            # A machine that is lent for minutes may have no other network interface, and NCCL wants one.
            Stage("comm", 40, ("test_cuda",), comm, read_tests, {"NCCL_SOCKET_IFNAME": "lo"})]


# ---- sanitize -------------------------------------------------------------------------------------------------------

# The names of op tests, by group. Not the products of the library, whose kernels are not ours and take the tools
# minutes; and one precision.
OP_GROUPS = {
    "attention": ["attention*"],
    "norm": ["norm_backward*", "residual_norm*"],
    "loss": ["cross_entropy*", "loss_sum*"],
    "update": ["squared_sums*", "grad_norm_finish*", "adamw_update*", "sgd_update*"],
    "embedding": ["embedding*"],
    "activation": ["activation*", "gated_activation*"],
    "rope": ["qk_norm_rope*"],
    "dropout": ["dropout*"],
    "fill": ["normal_fill*", "add*", "fill*", "cast*"],
}
NOT_SANITIZED = ["matmul*"]
OTHER_PRECISIONS = ["*float", "*fp16", "*fp16 *"]
SANITIZERS = {"memcheck": (220, ["--leak-check", "no"]), "racecheck": (320, [])}
ERROR_FOUND = 9


def test_spec(group):
    """A test specification of Catch2 for a group: every pattern but the other precisions."""
    without = "".join(f'~"{pattern}"' for pattern in OTHER_PRECISIONS)
    return ",".join(f'[ops]"{pattern}"{without}' for pattern in OP_GROUPS[group])


def sanitizer_program():
    """compute-sanitizer of PATH or of a toolkit."""
    for root in ["", *cuda_libraries.toolkit_roots()]:
        for folder in ("bin", "compute-sanitizer") if root else ("",):
            found = shutil.which(os.path.join(root, folder, "compute-sanitizer"))
            if found:
                return found
    raise NotRun("compute-sanitizer is neither on PATH nor in a CUDA toolkit")


def sanitizer(tool, more, group):
    def command(place, stage, seconds):
        return [sanitizer_program(), "--tool", tool, "--error-exitcode", str(ERROR_FOUND), *more,
                place.program("test_cuda"), test_spec(group)]
    return command


def read_sanitizer(place, stage, output):
    """The tool's own summary, the different findings, and that the tests passed under it."""
    summary = re.findall(r"^=+ (ERROR SUMMARY: \d+ errors?|RACECHECK SUMMARY: .*)", output, re.M)
    found = re.findall(r"^=+ ((?:Error|Warning|Invalid|Uninitialized|Race|Program hit|Internal|Out-of-range).*)",
                       output, re.M)
    findings = list(dict.fromkeys(re.sub(r"0x[0-9a-f]+", "0x..", line) for line in found))
    tests_said = read_tests(place, stage, output)
    detail = f"{summary[-1] if summary else 'no summary'}; {tests_said.detail}"
    if findings:
        detail = f"{len(findings)} findings: {findings[0]}; {detail}"
    clean = bool(summary) and re.search(r": 0 (errors|hazards)", summary[-1]) is not None and not findings
    return Reading(detail, {"findings": findings[:20], "summary": summary[-1:]}, clean and tests_said.good)


def sanitize():
    return [Stage(f"{tool}_{group}", share / len(OP_GROUPS), ("test_cuda",), sanitizer(tool, more, group),
                  read_sanitizer)
            for tool, (share, more) in SANITIZERS.items() for group in OP_GROUPS]


def stages_of(part, place, workloads):
    """The stages of a part, in the order in which they run."""
    return {"measure": lambda: measure(workloads), "prove": lambda: prove(place), "sanitize": sanitize}[part]()

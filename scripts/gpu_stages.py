"""The stages of each part of gpu_check.py."""
import importlib.util
import json
import random
import re
import statistics
import sys
from array import array
from dataclasses import dataclass, field

import cuda_libraries  # noqa: F401  tests use it from here
from gpu_stage import NotRun, Place, Reading, Stage, load_figures, read_tests, tests
from gpu_tools import OP_GROUPS, ncu, read_ncu, sanitize, test_spec  # noqa: F401

PARTS = ("measure", "prove", "sanitize")


@dataclass
class Workload:
    """`config` and `changes` are what the trainer runs, by section."""
    key: str
    config: str = ""
    changes: dict = field(default_factory=dict)
    steps: int = 15
    batches: tuple = ()  # of further steps
    has_ops: bool = True  # whether the benchmarks have its ops and its GEMMs
    peer: str = ""  # the part that measures PyTorch's step


WORKLOADS = {
    "124M": Workload("124M", "configs/gpt2_124M.json", batches=(32, 128), peer="measure"),
    "1558M": Workload("1558M", batches=(32,), peer="prove"),
    "llama-1.1B": Workload("llama-1.1B", has_ops=False),
    # For machines without a GPU, with the simulator's programs in place of the GPU programs.
    "tiny": Workload("tiny", "configs/gpt2_124M.json", {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32, "vocab_size": 256},
        "train": {"batch_size": 2, "seq_len": 32, "total_batch_tokens": 64}}, 4, (4,), peer="measure"),
}
GPU_WORKLOADS = ["124M", "llama-1.1B", "1558M"]


# ---- measure --------------------------------------------------------------------------------------------------------

def roofs(place, stage, seconds):
    return [place.program("bench_cuda"), "--roofs", "--json", place.figures(stage)]


def read_roofs(place, stage, output):
    figures = load_figures(place, stage)
    return Reading("copy {copy_gb_per_s:.0f} GB/s, bf16 GEMM {bf16_tflops:.1f} TFLOP/s".format(**figures["roofs"]),
                   figures)


# By the end of a stage's name.
FLAGS = {"_queued": "--no-graphs", "_tuned": "--tune", "_portable": "--portable", "_offload": "--offload=optimizer",
         "_offload_all": "--offload=all"}


def bench(place, stage, seconds):
    """Measures every op, or the whole step, of a workload."""
    figures, measured = place.figures(stage), place.work / "roofs.json"
    precision = "fp8" if stage.name.endswith("_fp8") else "bf16"
    command = [place.program("bench_cuda"), precision, "--workload", stage.workload, "--json", figures]
    command += [flag for end, flag in FLAGS.items() if stage.name.endswith(end)]
    if stage.name.startswith("step_"):
        return [*command, "--steps-only", "--batch", str(stage.batch)]
    return [*command, "--ops-only"] + (["--roofs-from", measured] if measured.exists() else [])


def read_ops(place, stage, output):
    figures = load_figures(place, stage)
    ops = figures["results"][0]["ops"]
    above = sum(float(op["ms_above_roof"]) for op in ops)
    return Reading(f"{len(ops)} ops, {sum(float(op['total_ms']) for op in ops):.2f} ms a step, "
                   f"{above:.2f} ms of them above the roofline", figures, len(ops) > 0)


def profiled_ops(place, stage, seconds):
    return [*ncu(place), *bench(place, stage, seconds), "--seconds", "0.01"]


def percent(share):
    return "n/a" if share is None else f"{100 * share:.1f} %"


def read_step(place, stage, output):
    figures = load_figures(place, stage)
    result = figures["results"][0]
    return Reading(f"{result['step_ms']:.2f} ms a step, {result['tokens_per_s']:.0f} tokens/s, "
                   f"MFU {percent(result.get('mfu'))}", figures)


def peer(place, stage, seconds):
    """Runs PyTorch's step, and ours before and after it. Only ours gets the CUDA libraries that were found."""
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
    """Random training tokens, as a shard in llm.c's format."""
    ids = array("H", random.Random(1).getrandbits(16 * tokens).to_bytes(2 * tokens, "little"))
    header = array("i", [20240520, 1, tokens] + [0] * 253)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_000000.bin").write_bytes(header.tobytes()
                                              + array("H", (token % vocab_size for token in ids)).tobytes())


def trainer(place, stage, seconds):
    """Runs the trainer with an unchanged configuration of the repository, on synthetic tokens, without evaluation.
    Traces the last two steps."""
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
    """Reads a trace of --profile: calls, milliseconds and roofline share per step of each op, slowest first."""
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
    """Reads metrics.jsonl; skips the first steps, which choose algorithms and warm up the GPU."""
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
    if chosen:
        ms, least_ms = (sum(one["calls"] * one[kind]["ms"] for one in chosen) for kind in ("chosen", "fastest"))
        detail += f", the fastest ones {ms / least_ms:.3f} times as fast"
    without = [one for one in products if not one["chosen"]]
    if without:
        detail += f", no algorithm for {len(without)}"
    # If the library has no fused epilogue, training computes it after the plain GEMM.
    good = bool(products) and mismatches == 0 and all(one["epilogue"] != "plain" for one in without)
    return Reading(detail, figures, good)


def read_kernels(place, stage, output):
    """The checks of the kernels for this GPU's compute capability."""
    lines = output.splitlines()
    unlike = [line for line in lines if not line.endswith(" passed")]
    return Reading("; ".join(unlike or lines) or "this GPU has none", {"kernels": lines}, not unlike)


def measure(workloads):
    """The most valuable stages come first, in case the machine is available only for a few minutes. All except
    PyTorch's steps end within 480 s."""
    first, rest = workloads[:1], workloads[1:]

    def stages(kind, share, program, *how, keys=first, end=""):
        return [Stage(f"{kind}_{key}{end}", share, (program,), *how, workload=key) for key in keys]

    def steps(share, keys, end=""):
        return stages("step", share, "bench_cuda", bench, read_step, keys=keys, end=end)

    def other_batches(share, keys):
        return [Stage(f"step_{key}_b{batch}", share, ("bench_cuda",), bench, read_step, workload=key, batch=batch)
                for key in keys for batch in WORKLOADS[key].batches]

    def ops_and_products(keys):
        return [key for key in keys if WORKLOADS[key].has_ops]

    large = ops_and_products(rest)
    return [*(probe_stage(group, 5) for group in FIRST_PROBES),
            Stage("roofs", 15, ("bench_cuda",), roofs, read_roofs),
            Stage("ops", 40, ("test_cuda",), lambda place, stage, _: tests(place, stage, "[ops]"), read_tests),
            Stage("kernels", 10, ("train_gpt",), lambda place, *_: [place.program("train_gpt"), "check-kernels"],
                  read_kernels),
            Stage("arch", 8, ("test_cuda",), lambda place, stage, _: tests(place, stage, "[arch]"), read_tests),
            *stages("ops", 25, "bench_cuda", bench, read_ops),
            *steps(20, first),
            *stages("matmul", 25, "bench_matmul_cuda", matmul, read_matmul),
            *steps(30, rest),
            *stages("ncu", 38, "bench_cuda", profiled_ops, read_ncu),
            *stages("trainer", 31, "train_gpt", trainer, read_trainer,
                    keys=[key for key in first if WORKLOADS[key].config]),
            *stages("ops", 20, "bench_cuda", bench, read_ops, keys=large),
            *other_batches(12, first),
            *steps(15, first, "_tuned"),
            *steps(12, first, "_portable"),
            *steps(12, ops_and_products(workloads), "_fp8"),
            *steps(12, ops_and_products(workloads)[-1:], "_offload"),
            *steps(12, ops_and_products(workloads)[-1:], "_offload_all"),
            *stages("ops", 12, "bench_cuda", bench, read_ops, end="_portable"),
            *steps(12, first, "_queued"),
            *stages("matmul", 18, "bench_matmul_cuda", matmul, read_matmul, keys=large),
            *other_batches(17, rest),
            *peers("measure", 48, workloads)]


def peers(part, share, workloads):
    return [Stage(f"peer_{key}", share, (), peer, read_peer, workload=key, is_peer=True) for key in workloads
            if WORKLOADS[key].peer == part]


# ---- prove ----------------------------------------------------------------------------------------------------------

# The groups of test/ptx_probe, as printed by ptx_probe_simt --list.
PROBE_GROUPS = {
    "sm_80": ["fragments", "copies", "barriers", "conversions"],
    "sm_90a": ["stmatrix", "mbarrier", "bulk", "cluster", "registers", "wgmma_sizes", "wgmma_layouts",
               "wgmma_registers", "tensor_copies", "tensor_multicast", "tensor_swizzle"],
}
# Run first, as kernels with wgmma would depend on them.
FIRST_PROBES = [group for group in PROBE_GROUPS["sm_90a"] if group.startswith(("wgmma", "tensor"))]


def probe_stage(group, share):
    architecture = next(name for name, groups in PROBE_GROUPS.items() if group in groups)
    return Stage(f"probe_{group}", share, ("ptx_probe_cuda", "ptx_probe_simt"), probe(architecture, group), read_probe)


def probe(architecture, group):
    def command(place, stage, seconds):
        if architecture == "sm_90a" and not place.capability.startswith("9."):
            raise NotRun(f"needs sm_90a; this GPU's compute capability is {place.capability}")
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
    lines = re.findall(r"^([a-z]\w* \w+: .*)$", output, re.M)
    reading.figures["lines"] = lines[:50]
    return reading


def comm(place, stage, seconds):
    if place.libraries.optional_missing:
        raise NotRun(place.libraries.optional_missing[0])
    return tests(place, stage, "[comm]")


def prove(place, workloads):
    probes = [probe_stage(group, 12) for groups in PROBE_GROUPS.values() for group in groups
              if group not in FIRST_PROBES]
    trainers = ("train_gpt", "train_gpt_cpu")
    return [*probes,
            Stage("reference", 90, ("test_cuda",), lambda place, stage, _: tests(place, stage, "[model]"), read_tests),
            Stage("curves", 135, trainers, gpu_trainer("test_loss_curves_follow_the_cpu"), read_gpu_trainer,
                  trainer_variables(place)),
            Stage("resume", 90, trainers, gpu_trainer("test_two_runs_and_a_resumed_one_give_the_same_bits"),
                  read_gpu_trainer, trainer_variables(place)),
            # NCCL needs a network interface, and a rented machine may have only the loopback interface.
            Stage("comm", 40, ("test_cuda",), comm, read_tests, {"NCCL_SOCKET_IFNAME": "lo"}),
            *peers("prove", 65, workloads)]


def stages_of(part, place, workloads):
    """The stages of a part, in the order in which they run."""
    return {"measure": lambda: measure(workloads), "prove": lambda: prove(place, workloads),
            "sanitize": sanitize}[part]()

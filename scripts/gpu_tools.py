"""The stages of gpu_check.py that run a program under NVIDIA's tools: compute-sanitizer and Nsight Compute."""
import contextlib
import csv
import os
import re
import shutil

import cuda_libraries
from gpu_stage import NotRun, Reading, Stage, read_tests


def tool_program(name):
    """The path of a tool, on PATH or in a CUDA toolkit."""
    for root in ["", *cuda_libraries.toolkit_roots()]:
        for folder in ("bin", name) if root else ("",):
            found = shutil.which(os.path.join(root, folder, name))
            if found:
                return found
    raise NotRun(f"{name} is neither on PATH nor in a CUDA toolkit")


# ---- ncu ------------------------------------------------------------------------------------------------------------

# Kernels by function name, each profiled at its second launch.
PROFILED = ["attention_forward", "attention_backward_query", "attention_backward_key", "norm_backward", "cross_entropy",
            "activation_forward"]
SECTIONS = ["SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "SchedulerStats", "LaunchStats"]
# Columns of the table -> their metrics, which depend on the GPU; the largest one counts.
METRICS = {
    "us": r"gpu__time_duration\.sum",
    "tensor": r"sm__(inst_executed_)?pipe_tensor.*\.pct_of_peak_sustained_(active|elapsed)",
    "issue": r"sm(sp)?__(issue_active|inst_issued)\.avg\.pct_of_peak_sustained_active",
    "dram": r"(gpu__dram|dram_)_throughput.*\.pct_of_peak_sustained_elapsed",
    "conflicts": r"l1tex__data_bank_conflicts_pipe_lsu.*\.sum",
}


def ncu(place):
    """The command prefix that profiles a program with Nsight Compute, at the clocks of training."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    return [tool_program("ncu"), "--clock-control", "none", *sections,
            "--kernel-id", f"::regex:^({'|'.join(PROFILED)})_kernel$:2",
            "--csv", "--page", "raw", "--print-units", "base", "--log-file", place.work / "ncu.csv"]


def number(text):
    with contextlib.suppress(ValueError):
        return float(text.replace(",", ""))


def read_ncu(place, stage, output):
    """Parses raw CSV with the names of metrics, their units, and a row per kernel."""
    said = (place.work / "ncu.csv").read_text(errors="replace")
    if "ERR_NVGPUCTRPERM" in said + output:
        raise NotRun("only root may read the performance counters (ERR_NVGPUCTRPERM)")
    rows = list(csv.DictReader(line for line in said.splitlines() if line.startswith('"')))
    kernels = []
    for row in rows[1:]:
        metrics = {name: number(value or "") for name, value in row.items() if name and "__" in name}
        kernel = {"name": re.search(r"(\w+)_kernel\b", row["Kernel Name"])[1], "metrics": metrics}
        for key, pattern in METRICS.items():
            found = [value for name, value in metrics.items() if re.fullmatch(pattern, name) and value is not None]
            kernel[key] = max(found) if found else None
        if kernel["us"] is not None:
            kernel["us"] /= 1000
        kernels.append(kernel)
    missing = [name for name in PROFILED if name not in [kernel["name"] for kernel in kernels]]
    detail = f"{len(kernels)} kernels" + (f", not {', '.join(missing)}" if missing else "")
    return Reading(detail, {"kernels": kernels}, not missing)


# ---- sanitize -------------------------------------------------------------------------------------------------------

# The names of op tests, by group, in one precision. Without the library's GEMMs, which are not our kernels and take
# minutes under the tools.
OP_GROUPS = {
    "attention": ["attention*"],
    "norm": ["norm_backward*", "residual_norm*"],
    "loss": ["cross_entropy*", "vocabulary_sums*", "loss_sum*"],
    "update": ["squared_sums*", "grad_norm_finish*", "elementwise_update*", "momentum_direction*", "apply_direction*",
               "frobenius_normalize*", "row_normalize*", "scaled_add*", "trust_*", "adam_direction*",
               "orthonormalize_rows*", "factor*"],
    "embedding": ["embedding*"],
    "activation": ["activation*", "gated_activation*"],
    "rope": ["qk_norm_rope*"],
    "dropout": ["dropout*"],
    "fp8": ["quantize*", "norms*", "a GEMM gives*", "GEMMs check operands of 8 bits"],
    "fill": ["normal_fill*", "add*", "sum_terms*", "fill*", "cast*"],
}
NOT_SANITIZED = ["matmul*"]
OTHER_PRECISIONS = ["*float", "*fp16", "*fp16 *"]
SANITIZERS = {"memcheck": (220, ["--leak-check", "no"]), "racecheck": (320, [])}
ERROR_FOUND = 9


def test_spec(group):
    """The Catch2 test specification of a group: its patterns without the other precisions."""
    without = "".join(f'~"{pattern}"' for pattern in OTHER_PRECISIONS)
    return ",".join(f'[ops]"{pattern}"{without}' for pattern in OP_GROUPS[group])


def sanitizer(tool, more, group):
    def command(place, stage, seconds):
        return [tool_program("compute-sanitizer"), "--tool", tool, "--error-exitcode", str(ERROR_FOUND), *more,
                place.program("test_cuda"), test_spec(group)]
    return command


def read_sanitizer(place, stage, output):
    """Reads the tool's summary, its distinct findings, and whether the tests passed."""
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

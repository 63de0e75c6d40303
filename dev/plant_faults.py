#!/usr/bin/env python3
"""Mutation testing: plants each fault of kernel_faults.py, attention_faults.py, chunk_faults.py, model_faults.py,
optimizer_faults.py, rank_faults.py, grid_faults.py, pipeline_faults.py, tokenizer_faults.py, host_faults.py,
gpu_faults.py, arch_faults.py and sm90_faults_forward.py in a copy of the tree and checks that a test fails.

    dev/plant_faults.py [--only TEXT] [--skip N] [--out FILE.md]

For each fault it runs the tests of the file ("witnesses") in turn until one fails. Kernels: the tests of the op's
family in the modes of build/test_simt (the default order, three seeds, the strict proxy, ThreadSanitizer,
AddressSanitizer). CPU kernels, the textbook, model parts and tokenizers: build/test_cpu. Code that involves several
ranks: the trainer on CPU ranks and on simulated GPUs. Host code and faults that only a GPU would show: the tests named
with the fault. A test counts only if it passes without the fault. Exit code 0 if every fault is caught. Takes a minute
or two per fault.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arch_faults
import attention_faults
import chunk_faults
import fp8_faults
import gpu_faults
import grid_faults
import host_faults
import kernel_faults
import model_faults
import offload_faults
import optimizer_faults
import pipeline_faults
import rank_faults
import segment_faults
import sm90_faults_backward
import sm90_faults_forward
import tokenizer_faults

FAULTS = (kernel_faults.FAULTS + attention_faults.FAULTS + chunk_faults.FAULTS + segment_faults.FAULTS +
          model_faults.FAULTS + optimizer_faults.FAULTS + rank_faults.FAULTS + grid_faults.FAULTS +
          pipeline_faults.FAULTS + tokenizer_faults.FAULTS + host_faults.FAULTS + gpu_faults.FAULTS +
          arch_faults.FAULTS + fp8_faults.FAULTS + offload_faults.FAULTS + sm90_faults_forward.FAULTS +
          sm90_faults_backward.FAULTS)
ROOT = Path(__file__).resolve().parents[1]
MODES = [("default order", "test_simt", []), ("seed 1", "test_simt", ["--seed", "1"]),
         ("seed 2", "test_simt", ["--seed", "2"]), ("seed 3", "test_simt", ["--seed", "3"]),
         ("strict proxy", "test_simt", ["--strict-proxy"]), ("ThreadSanitizer", "test_simt_tsan", []),
         ("AddressSanitizer", "test_simt_asan", [])]
# The tests that exercise a file; reduce.cuh and vector.cuh are used by everything except GEMMs.
FAMILIES = [("attention_backward_sm90", "attention_backward_sm90*"),
            ("attention_forward_sm90", "attention_forward_sm90*"),
            ("attention_sm90", "attention_forward_sm90*,attention_backward_sm90*"), ("attention", "*attention*"),
            ("norm", "*norm*"), ("cross_entropy", "*cross_entropy*,vocabulary_sums*"),
            ("embedding", "*embedding*"), ("factored_update", "factor*"), ("optimizer", "*update*,*direction*,trust_*"),
            ("eigenbasis", "adam_direction*,orthonormalize*"),
            ("grad_norm", "squared_sums*,*norm_finish*,frobenius*,row_normalize*"), ("matmul", "*matmul*,[matmul]"),
            ("fill", "*fill*,*cast*,add*,scaled_add*"), ("dropout", "dropout*"),
            ("activation", "*activation*,*matmul*"), ("qk_norm_rope", "*qk_norm_rope*"), ("comm_nccl", "[comm]"),
            ("tree_sum.cu", "[comm]")]
PROGRAM = [sys.executable, "test/program", "--failfast"]
CPU_RANKS = [("CPU ranks", ["train_gpt_cpu"], [*PROGRAM, *(f"test_ranks.Ranks.{name}" for name in (
    "test_losses_match_one_rank", "test_the_same_bits_for_any_number_of_ranks_and_micro_steps",
    "test_memory_and_traffic_follow_the_zero_stage", "test_a_checkpoint_of_3_ranks_loads_on_2_or_4_and_back",
    "test_16_bits_loss_scale_and_recomputation"))])]
SIMULATED_RANKS = [("simulated ranks", ["train_gpt_simt", "train_gpt_cpu"], [*PROGRAM, "test_simulated_ranks"])]
OBJECTS = ("commands", "training", "kernels", "model", "runtime", "data", "test")  # folders in build/
SECONDS = 300  # for one witness; a deadlock is reported much sooner


def named_witness(text):
    """The same for "test_cpu: NAMES", "test_simt: NAMES --OPTION N", "ptx_text", "exchange: NAMES", "program: NAMES",
    "simulated: NAMES", "faults: NAMES"."""
    kind, _, names = text.partition(": ")
    if kind in ("test_cpu", "test_simt", "test_simt_asan", "test_simt_tsan"):
        names, *options = names.split(" --")
        return text, [kind], [f"build/{kind}", names, *" ".join(f"--{option}" for option in options).split()]
    if kind == "ptx_text":
        return text, ["ptx_probe_text", "ptx_probe_simt"], [*PROGRAM, "test_ptx_text"]
    if kind == "exchange":
        return text, ["exchange_cpu", "exchange_simt"], [*PROGRAM, *names.split()]
    if kind == "simulated":
        return text, ["train_gpt_simt", "train_gpt_cpu"], [*PROGRAM, *names.split()]
    if kind == "program":
        return text, ["train_gpt_cpu"], [*PROGRAM, *names.split()]
    return text, ["train_gpt_cpu", "inject.so", "crash_states"], [sys.executable, "test/faults", *names.split()]


def witnesses_of(file, named=()):
    """(name, programs to build, how it runs the tests) of each."""
    if named:
        return [named_witness(text) for text in named]
    name = Path(file).name
    if file.startswith("test/reference"):
        return [("difference quotients", ["test_cpu"], ["build/test_cpu", "[reference]"])]
    is_of_cpu = file.startswith("kernels/cpu/") and name != "tree_sum.h" and not name.startswith("comm")
    if is_of_cpu or file in ("kernels/shared/attention_layout.h", "kernels/shared/update_rules.h"):
        return [("ops on the CPU", ["test_cpu"], ["build/test_cpu", "[ops],[vector_math]"])]
    if file in {fault[0] for fault in model_faults.FAULTS}:
        return [("models", ["test_cpu"], ["build/test_cpu", "[model],[config]"]),
                ("families in the program", ["train_gpt_cpu"], [*PROGRAM, "test_families"])] + CPU_RANKS
    if file in {fault[0] for fault in tokenizer_faults.FAULTS}:
        return [("tokenizers", ["test_cpu"], ["build/test_cpu", "tokenizer*,pretokenizer*,prepare*"])]
    if not file.startswith("kernels/cuda/"):
        comm = [("default order", ["test_simt"], ["build/test_simt", "[comm]"])]  # adds as the CPU does
        return CPU_RANKS + (SIMULATED_RANKS if file.startswith("model/") else comm if name == "tree_sum.h" else [])
    tests = next((tests for family, tests in FAMILIES if name.startswith(family)), "[ops]~*matmul*~*attention*")
    modes = [(mode, [program], [f"build/{program}", tests, *flags]) for mode, program, flags in MODES]
    return modes[:1] + SIMULATED_RANKS + modes[1:] if name.startswith("comm_") else modes


def build(tree, programs):
    return subprocess.run(["make", "-s", f"-j{os.cpu_count()}", *(f"build/{program}" for program in programs)],
                          cwd=tree, capture_output=True, text=True, check=False)


def run(tree, command):
    """None if all tests pass, else what was said first."""
    try:
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, errors="replace", timeout=SECONDS,
                                check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if "No test cases matched" in result.stdout:
        sys.exit(f"{' '.join(command)}: no test has such a name")
    if result.returncode == 0:
        return None
    said = result.stdout + result.stderr
    for pattern in (r"data race|ERROR: AddressSanitizer: [\w-]+|runtime error: [^\n]*",
                    r"[^\n:]*: block \(\d[^\n]{0,120}",
                    r"\w+\[\d+\] is [^\n]{0,60}",
                    r"kernel \S[^:]{0,60} failed: [^(]{0,160}",
                    r"AssertionError: [^\n]{0,100}",
                    r"FAIL(?:ED)?:[^\n]*\n[^\n]{0,100}"):
        if found := re.search(pattern, said):
            return " ".join(found[0].split())
    return f"exit code {result.returncode}"


def testify(tree, programs, command):
    built = build(tree, programs)
    return f"does not compile: {built.stderr[-400:]}" if built.returncode != 0 else run(tree, command)


def first_witness(tree, file, old, new, named, silent_without):
    """`silent_without`: the commands of witnesses that are known to say nothing without a fault."""
    path = tree / file
    source = path.read_text()
    for name, programs, command in witnesses_of(file, named):
        path.write_text(source.replace(old, new))
        said = testify(tree, programs, command)
        path.write_text(source)
        if not said:
            continue
        if said.startswith("does not compile"):
            return None, said
        if command not in silent_without:
            if false_alarm := testify(tree, programs, command):
                sys.exit(f"{name} ({file}) says without a fault: {false_alarm}")
            silent_without.append(command)
        return name, said
    return None, "nobody noticed"


def copy_of_tree(folder):
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "build").mkdir()
    for built in (ROOT / "build").glob("*"):  # what is built already need not be built again
        if built.name in OBJECTS or built.name.startswith("simt"):
            shutil.copytree(built, folder / "build" / built.name)
        elif built.suffix == ".o":
            shutil.copy2(built, folder / "build")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only faults whose file or description contains this")
    parser.add_argument("--skip", type=int, default=0, help="so many from the start of the list")
    parser.add_argument("--out", type=Path, help="Markdown table of the results")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if args.only in fault[0] or args.only in fault[1]][args.skip:]
    rows, escaped, silent_without = [], 0, []
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        copy_of_tree(tree)
        for file, what, old, new, *named in chosen:
            count = (tree / file).read_text().count(old)
            if count != 1:
                sys.exit(f"{file}: the code of \"{what}\" stands there {count} times, not once")
            start = time.time()
            mode, said = first_witness(tree, file, old, new, named, silent_without)
            escaped += mode is None
            rows.append(f"| {Path(file).name} | {what} | {mode or '**escaped**'} | {said.replace('|', '/')} |")
            print(f"{len(rows)}/{len(chosen)} {rows[-1]} {time.time() - start:.0f} s", flush=True)
    summary = f"{len(rows)} faults planted, {len(rows) - escaped} caught, {escaped} escaped"
    if args.out:
        table = ["| file | fault | first witness | what it said |", "|---|---|---|---|", *rows, "", summary, ""]
        args.out.write_text("\n".join(table))
    print(summary)
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())

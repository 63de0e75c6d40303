#!/usr/bin/env python3
"""Reads the output of nvcc and `ptxas -v` for one source file and checks its kernels against the code rules.

    nvcc ... -Xptxas -v ... 2>&1 | scripts/check_ptxas.py [--werror] TABLE.tsv

Warns if a kernel spills registers or has a stack frame (arrays in local memory), or if ptxas serializes wgmma or
ignores setmaxnreg (its notes C7500 to C7599). With --werror these are errors, and the exit code is 1. Writes one line
per kernel and architecture to the table: kernel, architecture, registers, stack bytes, spilled bytes, static shared
bytes. Everything else passes through to stderr.
"""
import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
LOSS = re.compile(r"\bC75\d\d\b")
NOISE = re.compile(r"^ptxas info|^\s*\d+ bytes stack frame|^\s*$")


def demangled(names):
    """Demangles names and removes the arguments: activation_forward_kernel<bf16>."""
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    readable = (re.sub(r"\(anonymous namespace\)::|^void |\(ops::\w+\)", "", line)  # also the casts of enumerators
                for line in result.stdout.splitlines())
    return dict(zip(names, (line.split("(")[0] for line in readable)))


def read(lines):
    """Returns a row per kernel, the findings, and the lines to pass through."""
    rows, losses, others, row = [], [], [], None
    for line in lines:
        line = line.rstrip("\n")
        if LOSS.search(line):
            losses.append(line.strip())
        elif entry := ENTRY.search(line):
            row = {"kernel": entry[1], "arch": entry[2], "registers": 0, "stack": 0, "spills": 0, "shared": 0}
            rows.append(row)
        elif row and (frame := FRAME.search(line)):
            if not row["registers"]:  # later frames of the same entry are functions that it calls
                row["stack"], row["spills"] = int(frame[1]), int(frame[2]) + int(frame[3])
        elif row and (used := USED.search(line)):
            shared = SHARED.search(line)
            row["registers"], row["shared"] = int(used[1]), int(shared[1]) if shared else 0
        elif not NOISE.match(line):
            others.append(line)
    return rows, losses, others


def main():
    errors = sys.argv[1] == "--werror"
    table = Path(sys.argv[-1])
    rows, findings, others = read(sys.stdin)
    names = demangled(sorted({row["kernel"] for row in rows})) if rows else {}
    for row in rows:
        row["kernel"] = names[row["kernel"]]
        where = f"{row['kernel']} for {row['arch']}"
        if row["spills"]:
            findings.append(f"{where} spills {row['spills']} bytes of registers")
        elif row["stack"]:
            findings.append(f"{where} has a stack frame of {row['stack']} bytes: its arrays are not in registers")
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("".join("\t".join(str(value) for value in row.values()) + "\n" for row in rows))
    kind = "error" if errors else "warning"
    for line in others + [f"ptxas {kind}: {finding}" for finding in findings]:
        print(line, file=sys.stderr)
    return 1 if findings and errors else 0


if __name__ == "__main__":
    sys.exit(main())

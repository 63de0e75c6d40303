#!/usr/bin/env python3
"""Generates kernels/cuda/hopper/ptx_wgmma.cuh: each width of wgmma needs an asm statement with its number of operands.

    python3 dev/generate_wgmma.py > kernels/cuda/hopper/ptx_wgmma.cuh
"""
import textwrap

WIDTHS = [8, 16, 32, 64, 96, 128, 192, 256]
COLUMNS = 118

HEAD = """\
// Made by dev/generate_wgmma.py: wgmma m64nNk16 in inline PTX, a part of kernels/cuda/hopper/ptx_hopper.cuh.
// clang-format off
#pragma once
"""


def listed(first, items, end):
    return "\n".join(textwrap.wrap(first + ", ".join(items) + end, COLUMNS, initial_indent=" " * 12,
                                   subsequent_indent=" " * 14, break_long_words=False))


def statement(width, kind, in_registers):
    count = width // 2
    at = count
    a = "{" + ", ".join(f"%{at + i}" for i in range(4)) + "}" if in_registers else f"%{at}"
    at += 4 if in_registers else 1
    majors = f"%{at + 2}" if in_registers else f"%{at + 2}, %{at + 3}"
    text = (f"{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
            "{" + ", ".join(f"%{i}" for i in range(count)) + f"}}, {a}, %{at}, p, 1, 1, {majors}; }}")
    lines = [f'            "{line} "' for line in textwrap.wrap(text, COLUMNS - 16)]
    outputs = listed(": ", [f'"+f"(d[{i}])' for i in range(count)], "")
    inputs = [f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']
    inputs += ['"l"(b)', '"r"(scale_d)'] + ([] if in_registers else ['"n"(kTransposeA)']) + ['"n"(kTransposeB)']
    return "\n".join(["        asm volatile(", *lines, outputs, listed(": ", inputs, ");")])


def main():
    print(HEAD)
    for in_registers in (False, True):
        a = "const uint32_t* a" if in_registers else "uint64_t a"
        majors = ["kTransposeB"] if in_registers else ["kTransposeA", "kTransposeB"]
        for kind in ("bf16", "f16"):
            parameters = ", ".join(["int kN", *(f"int {major}" for major in majors)])
            print(f"template <{parameters}>\nPTX void wgmma_{kind}(float* d, {a}, uint64_t b, int scale_d) {{")
            for width in WIDTHS:
                print(f"    if constexpr (kN == {width})")
                print(statement(width, kind, in_registers))
            print("}\n")
        parameters = ", ".join(["int kN, class T", *(f"int {major} = 0" for major in majors)])
        arguments = ", ".join(["kN", *majors])
        widths = " || ".join(f"kN == {width}" for width in WIDTHS)
        print(f"template <{parameters}>\nPTX void wgmma(float* d, {a}, uint64_t b, int scale_d = 1) {{")
        print(f'    static_assert({widths},\n                  "dev/generate_wgmma.py has these widths");')
        print('    static_assert(dtype_of<T> != Dtype::fp32, "tensor cores take bf16 or fp16");')
        print("    if constexpr (dtype_of<T> == Dtype::bf16)")
        print(f"        wgmma_bf16<{arguments}>(d, a, b, scale_d);")
        print(f"    else\n        wgmma_f16<{arguments}>(d, a, b, scale_d);\n}}\n")


main()

#!/usr/bin/env python3
"""Makes the inline PTX of a header executable without a GPU.

    test/ptx_probe/translate_ptx.py IN.cuh OUT.h

Each instruction of an asm statement becomes a call of the function of the same name in test/ptx_probe/ptx_isa.h or
ptx_isa_hopper.h, which implements the PTX ISA. Operands keep the order of the text. An instruction without such a
function, or an operand whose type does not match its constraint, fails to compile. Outputs ("=") are first filled with
garbage.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A size in the name of an instruction is a template argument.
SIZE = re.compile(r"(?<=m64n)\d+(?=k16)|(?<=\.x)\d(?=\.)|(?<=tensor\.)\d(?=d\.)")
# These access only registers. Others need a memory clobber, or the compiler may move them across accesses.
REGISTERS_ONLY = ("cvt.", "ex2.", "mma.", "setp.", "selp.", "mov.", "mapa.", "elect.", "setmaxnreg.")
# The compiler may also merge two of these with the same operands.
REPEATABLE = ("cvt.", "ex2.")


def split(text, separator):
    """Splits text at the separators outside of brackets and strings."""
    parts, depth, quoted = [""], 0, False
    for i, c in enumerate(text):
        quoted ^= c == '"' and text[i - 1:i] != "\\"
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def asm_statements(source):
    """Yields (begin, end, is volatile, sections) of each asm statement."""
    for match in re.finditer(r'\basm( volatile)?\(((?:"[^"]*"|[^"])*?)\);', source):
        yield match.start(), match.end(), bool(match[1]), split(match[2], ":") + [""] * 3


def instructions(text):
    """Yields (name, operands) of each instruction in the string literals."""
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).strip()
    code = code[1:-1] if code.startswith("{") else code
    for line in filter(None, split(code, ";")):
        name, _, operands = line.partition(" ")
        yield name, [operand for operand in split(operands, ",") if operand]


def operand_in_cpp(operand):
    if operand[0] == "{":
        return f"isa::all({', '.join(map(operand_in_cpp, split(operand[1:-1], ',')))})"
    if operand[0] == "[":
        return f"isa::at({', '.join(map(operand_in_cpp, split(operand[1:-1], ',')))})"
    operand = operand.replace("_|", "isa::Sink(), ")
    operand = re.sub(r"^_$", "isa::Sink()", operand)
    operand = re.sub(r"%%([\w.]+)", lambda name: f"isa::{name[1].replace('.', '_')}()", operand)
    return re.sub(r"%(\d+)", r"o\1", operand)


def instruction_in_cpp(name, operands):
    if name == ".reg":
        return "".join(f"bool {each.split()[-1]} = false; " for each in operands)
    sizes = SIZE.findall(name)
    function = re.sub(r"\W+", "_", SIZE.sub("N", name))
    return f"isa::{function}{f'<{sizes[0]}>' if sizes else ''}({', '.join(map(operand_in_cpp, operands))}); "


def statement_in_cpp(sections):
    text, outputs, inputs = sections[:3]
    lines = {"in": "", "out": ""}
    operands = [operand for section in (outputs, inputs) for operand in split(section, ",") if operand]
    for i, operand in enumerate(operands):
        mode, letter, expression = re.fullmatch(r'"([=+]?)(\w)"\s*\((.*)\)', operand, re.S).groups()
        kind = {"=": "written", "+": "updated", "": "read"}[mode]
        declared = "constexpr auto" if letter == "n" else "auto&" if mode else "const auto"
        lines["out" if mode else "in"] += f"{declared} o{i} = isa::{kind}<'{letter}'>({expression}); "
    calls = "".join(instruction_in_cpp(*instruction) for instruction in instructions(text))
    return "{ " + lines["in"] + lines["out"] + calls + "}"


def device_part(path):
    """Returns the device code of a header, with the parts that it includes."""
    text = (ROOT / path).read_text("utf-8")
    text = text.split("#ifdef __CUDACC__\n")[-1].split("#else\n")[0].replace("#pragma once\n", "")
    return re.sub(r'#include "(kernels/cuda/hopper/[^"]*)"', lambda part: device_part(part[1]), text)


def translated(source):
    result, done = "", 0
    for begin, end, _, sections in asm_statements(source):
        result += source[done:begin] + statement_in_cpp(sections)
        done = end
    return result + source[done:]


def main():
    path, out = sys.argv[1], Path(sys.argv[2])
    is_hopper = "hopper" in path
    text = translated(device_part(path)).replace("namespace ptx {", "namespace ptx_text {")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"// Made by {Path(__file__).name} from {path}.\n"
                   "#pragma once\n#undef ptx\n"
                   f'#include "test/ptx_probe/ptx_isa{"_hopper" if is_hopper else ""}.h"\n'
                   f"{text}\n"
                   "// The probes name the wrappers ptx::; here they get these.\n"
                   "#define ptx ptx_text\n", "utf-8")


if __name__ == "__main__":
    main()

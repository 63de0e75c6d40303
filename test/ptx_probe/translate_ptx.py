#!/usr/bin/env python3
"""Makes the inline PTX of a header executable without a GPU.

    test/ptx_probe/translate_ptx.py IN.cuh OUT.h

Each instruction of an asm statement becomes a call of the function of its name in test/ptx_probe/ptx_isa.h or
ptx_isa_hopper.h, which has its semantics according to the PTX ISA. The operands keep the order of the text. An
instruction without such a function does not compile, nor does an operand of another type than its constraint's. Outputs
("=") are filled with garbage first.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A size in the name of an instruction is a template argument.
SIZE = re.compile(r"(?<=m64n)\d+(?=k16)|(?<=\.x)\d(?=\.)|(?<=tensor\.)\d(?=d\.)")
# These read and write registers only: the compiler may move the others across memory accesses unless told not to.
REGISTERS_ONLY = ("cvt.", "ex2.", "mma.", "setp.", "selp.", "mov.", "mapa.", "elect.", "setmaxnreg.")
# And two of these with the same operands may be made one.
REPEATABLE = ("cvt.", "ex2.")


def split(text, separator):
    """At the separators outside of brackets and strings."""
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
    """(begin, end, is volatile, sections) of each."""
    for match in re.finditer(r'\basm( volatile)?\(((?:"[^"]*"|[^"])*?)\);', source):
        yield match.start(), match.end(), bool(match[1]), split(match[2], ":") + [""] * 3


def instructions(text):
    """(name, operands) of each in the string literals."""
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
    """The lines of a header for nvcc, with the parts that it includes."""
    text = (ROOT / path).read_text("utf-8")
    text = text.split("#ifdef __CUDACC__\n")[-1].split("#else\n")[0].replace("#pragma once\n", "")
    return re.sub(r'#include "(test/ptx_probe/[^"]*)"', lambda part: device_part(part[1]), text)


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

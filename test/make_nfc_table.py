#!/usr/bin/env python3
"""Writes data/nfc_table.h: Unicode's canonical decompositions and combining classes, from Python's unicodedata.

    python3 test/make_nfc_table.py
"""
import pathlib
import sys
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADER = """// Made by test/make_nfc_table.py from Unicode {version}. See data/nfc.cpp.
#pragma once

#include <cstdint>

// A character, its canonical decomposition in one step (the second character is 0 if there is only one), and whether
// composing makes it again.
struct Decomposition {{
    uint32_t character, first, second;
    bool composes;
}};

// Combining classes: `count` characters from `first` on have class `value`; all others have 0.
struct CombiningRun {{
    uint32_t first, count;
    uint8_t value;
}};

// clang-format off
inline constexpr Decomposition kDecompositions[] = {{
"""


def lines(items):
    line = ""
    for item in items:
        if len(line) + len(item) + 1 > 120:
            yield line
            line = ""
        line += item + ","
    yield line


def decompositions():
    for code in range(sys.maxunicode + 1):
        mapping = unicodedata.decomposition(chr(code))
        if mapping and not mapping.startswith("<"):
            first, second = (*(int(part, 16) for part in mapping.split()), 0)[:2]
            composes = second != 0 and unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(code)
            yield f"{{{code:#x},{first:#x},{second:#x},{int(composes)}}}"


def combining_runs():
    runs = []
    for code in range(sys.maxunicode + 1):
        value = unicodedata.combining(chr(code))
        if value and runs and runs[-1][0] + runs[-1][1] == code and runs[-1][2] == value:
            runs[-1][1] += 1
        elif value:
            runs.append([code, 1, value])
    return [f"{{{first:#x},{count},{value}}}" for first, count, value in runs]


def main():
    table = HEADER.format(version=unicodedata.unidata_version) + "\n".join(lines(decompositions()))
    table += "\n};\ninline constexpr CombiningRun kCombiningRuns[] = {\n" + "\n".join(lines(combining_runs()))
    (ROOT / "data/nfc_table.h").write_text(table + "\n};\n// clang-format on\n")


if __name__ == "__main__":
    main()

"""A stage of gpu_check.py: what it runs, its share of the part's time, and how its result is read.

A stage's program writes its figures to Place.figures(stage) after each measurement, so that they can be read even if
the program fails.
"""
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import cuda_libraries

MAX_FIGURES_BYTES = 1_000_000


class NotRun(Exception):
    """The stage cannot run on this machine, with the reason. Not a failure."""


@dataclass
class Place:
    """The folders, libraries and GPU that the stages use."""
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
        """The environment of our programs; PyTorch brings its own CUDA libraries."""
        if stage and stage.is_peer:
            return dict(os.environ)
        variables = stage.variables if stage else {}
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries.ld_library_path, "TMPDIR": str(self.work), **variables}


@dataclass
class Reading:
    """The result of a stage: a line for the table, its figures, and whether they are correct."""
    detail: str
    figures: dict = field(default_factory=dict)
    good: bool = True


@dataclass
class Stage:
    name: str
    share: float  # seconds of the default limit; other limits are divided proportionally
    programs: tuple  # of Place.programs
    command: Callable  # (place, stage, seconds) -> [program, argument, ...]; may raise NotRun
    read: Callable  # (place, stage, output) -> Reading; an exception means that the stage failed
    variables: dict = field(default_factory=dict)
    is_peer: bool = False  # the verdict does not count, and the stage may use all the time that earlier stages left
    workload: str = ""
    batch: int = 0  # sequences; 0: the workload's


def finite(value):
    """Replaces infinities and NaN, which Python reads and writes but JSON does not allow."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_figures(place, stage):
    """The figures of the stage's program. Raises an exception if the file is invalid."""
    path = place.figures(stage)
    if path.stat().st_size > MAX_FIGURES_BYTES:
        raise ValueError(f"the figures have {path.stat().st_size} bytes, more than {MAX_FIGURES_BYTES}")
    figures = finite(json.loads(path.read_text()))
    if not isinstance(figures, dict):
        raise ValueError("the figures are not a JSON object")
    return figures


# ---- the output of Catch2 -------------------------------------------------------------------------------------------

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

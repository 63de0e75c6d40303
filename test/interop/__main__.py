"""Tests that compare train_gpt with real programs and libraries from PyPI: make interop

    python3 test/interop [NAME ...]        (python3 test/interop test_transformers: only that file)

Not part of `make test`, as they download packages. Each file test_*.py has a list REQUIREMENTS of argument lists for
pip install, such as [["transformers==4.*", "torch"], ["transformers==5.*", "torch"]]. Its tests run once per element,
in a separate virtual environment. Environments are kept in build/interop/ and rebuilt when their list changes. The
installed versions are written to build/interop/versions.txt, to be recorded with the result.

Exit codes: 0 all tests passed; 1 a test failed or an environment could not be created; 64 no such file.
"""
import ast
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build/interop"


def requirements_of(file):
    """Returns REQUIREMENTS without running the file, whose imports may not be installed here."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["REQUIREMENTS"]:
            return ast.literal_eval(node.value)
    sys.exit(f"{file} has no list REQUIREMENTS")


def environment(requirements):
    """Returns the Python of a virtual environment with these requirements, created if needed; None if pip failed."""
    folder = PLACE / hashlib.sha256(repr(requirements).encode()).hexdigest()[:12]
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists():
        print(f"== {folder.relative_to(ROOT)}: pip install {' '.join(requirements)}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements]).returncode != 0:
            return None
        complete.touch()
    return python


def main(names):
    files = [HERE / f"{name.removesuffix('.py')}.py" for name in names] or sorted(HERE.glob("test_*.py"))
    for file in files:
        if not file.exists():
            print(f"there is no {file}", file=sys.stderr)
            return 64
    PLACE.mkdir(parents=True, exist_ok=True)
    results, versions = [], []
    for file in files:
        for requirements in requirements_of(file):
            title = f"{file.stem} with {' '.join(requirements)}"
            python = environment(requirements)
            print(f"== {title}", flush=True)
            passed = python is not None and subprocess.run(
                [python, "-m", "unittest", "-v", file.stem], cwd=HERE,
                env={**os.environ, "PYTHONPATH": f"{HERE}:{ROOT / 'test/program'}",
                     "OMP_WAIT_POLICY": "passive"}).returncode == 0
            results.append((title, passed))
            if python:
                installed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True).stdout
                versions.append(f"{title}\n{installed}")
    (PLACE / "versions.txt").write_text("\n".join(versions))
    print("".join(f"{'passed' if passed else 'FAILED'}: {title}\n" for title, passed in results), end="")
    failed = sum(not passed for _, passed in results)
    print(f"interop: {len(results) - failed} passed, {failed} failed; versions in {PLACE / 'versions.txt'}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

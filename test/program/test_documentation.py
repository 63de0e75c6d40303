"""README.md, CONTRIBUTING.md and docs/*.md: their commands run, and what they name exists.

The fence of a block says what is checked:

  ```sh               runs with `bash -euo pipefail`, as a whole. The blocks of a page run in order in one directory,
                      which has configs/, docs/, test/recorded/, my_text.txt, nanoGPT's files in data/, the shards of
                      configs/quickstart.json, and build/train_gpt_cpu; build/ is in PATH.
  ```console          Each command after "$ " runs in that directory. The lines below it are whole, adjacent lines of
                      its output; "..." stands for any number of lines. Numbers, dates, digests, absolute paths, the
                      revision and the width of spaces may differ.
  ```sh needs=REASON  does not run here; REASON is one of pages.REASONS. Also ```console needs=REASON.
  ```json, ```python  parses; the keys of a JSON block are keys of the configuration.
  ```text             is not checked.

Commands that do not run, and commands, options, keys and files in `code spans`, must exist: see pages.py.
"""
import array
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

from pages import Page
from trainer import ENVIRONMENT, ROOT, TRAINER, generated_text

NAMES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md")))]
SECONDS = 600  # for a block, on busy cores


@functools.lru_cache(maxsize=None)
def user_files():
    """A directory with the files that the pages assume."""
    folder = tempfile.TemporaryDirectory()
    directory = Path(folder.name)
    text = generated_text(700)
    (directory / "my_text.txt").write_text(text)
    # nanoGPT's prepare.py numbers characters in the order of their codes.
    characters = sorted(set(text))
    ids = array.array("H", map(characters.index, text))
    for name in ("shakespeare_char", "openwebtext"):
        (directory / "data" / name).mkdir(parents=True)
        (directory / "data" / name / "train.bin").write_bytes(ids[:len(ids) * 9 // 10])
        (directory / "data" / name / "val.bin").write_bytes(ids[len(ids) * 9 // 10:])
    (directory / "data/shakespeare_char/input.txt").write_text(text)
    shutil.copytree(ROOT / "configs", directory / "configs")
    shutil.copytree(ROOT / "docs", directory / "docs")
    vocabulary = json.loads((ROOT / "configs/quickstart.json").read_text())["model"]["vocab_size"]
    subprocess.run([TRAINER, "prepare", "--vocab-size", str(vocabulary), "--minutes", "0", "my_text.txt", "--out",
                    "build/quickstart/data"], cwd=directory, check=True, capture_output=True, env=ENVIRONMENT)
    return folder  # lives as long as the cache


def normalized(line):
    """A line without what may differ."""
    line = re.sub(r"^(train_gpt [\d.]+) \(.*\)$", r"\1 (REVISION)", line.strip())
    line = re.sub(r"(?<!\S)/\S+", "PATH", line)
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{12,}\b|-?\d+([.,]\d+)*(e[+-]?\d+)?", "#", line)) + "\n"


def run(script, quoted, folder):
    """Runs a script; None if it succeeds and prints the quoted lines, else what went wrong."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "PATH": f"{folder}/build:{os.environ['PATH']}"})
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes in the background
            process.wait()
        output.seek(0)
        said = output.read()
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(normalized(line)) for line in quoted)
    if code != 0:
        return f"exit code {code}\n{said[-3000:]}"
    if not re.search("^" + pattern, "".join(map(normalized, said.splitlines())), re.MULTILINE):
        return f"the output differs from the page:\n{said[-3000:]}"
    return None


def run_page(page):
    """Runs the commands of a page in a fresh directory: yields line, script, and what went wrong or None."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(user_files().name, folder, dirs_exist_ok=True)
        Path(folder, "test").mkdir()
        Path(folder, "test/recorded").symlink_to(ROOT / "test/recorded")
        Path(folder, "scripts").symlink_to(ROOT / "scripts")
        Path(folder, "build/train_gpt_cpu").symlink_to(TRAINER)
        for block in page.blocks:
            if block.fence == "sh":
                yield block.line, block.text, run(block.text, [], folder)
            elif block.fence == "console":
                for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                    command = re.match(r"(?:.*\\\n)*.*\n", part)[0]
                    yield block.line, command, run(command, part[len(command):].splitlines(), folder)


class Documentation(unittest.TestCase):
    def test_what_the_pages_name_exists(self):
        pages = [Page(name, (ROOT / name).read_text("utf-8")) for name in NAMES]
        self.assertGreater(sum(len(page.spans) for page in pages), 1000)
        problems = [problem for page in pages for problem in page.problems()]
        self.assertEqual(problems, [], "\n".join(problems))

    def test_commands_run(self):
        ran = 0
        for name in NAMES:
            for line, script, problem in run_page(Page(name, (ROOT / name).read_text("utf-8"))):
                with self.subTest(f"{name}:{line}"):
                    if problem and "--nproc" in script and not shutil.which("mpirun"):
                        self.skipTest("there is no mpirun")
                    self.assertIsNone(problem, f"{script}\n{problem}")
                    ran += 1
        self.assertGreater(ran, 20)


GOOD = """# A page with `train_gpt report RUN... [--out report.html]`, `--top-k`, `model.n_layer` and `configs/*.json`

```sh
build/train_gpt_cpu plan configs/gpt2_124M.json --gpus 8 > plan.txt
```

```console
$ grep -E '^(total|parameters)' plan.txt
total       1 bytes  2.5 MiB
parameters  7
$ grep -E '^ *(data |[0-9]+ +[0-9]+ )' plan.txt
...
8 1 1 1 2   1 2 3 4 5 6 7   8 9 %
...
```

```sh needs=gpu
make ARCH=native && make gpu-check PART=measure
scripts/gpu_check.py --list; build/test_simt '*norm*' --seed 7   # or --min-p
mpirun -np 8 build/train_gpt configs/gpt2_124M.json \\
    --set train.max_steps=5 --auto
```

```json
"data": {"train": "train.bin"}
```

```cpp
ptx::bulk_commit();
```
"""
PLANTED = [  # a text of GOOD, its replacement, words of the problem
    ("```json", "```", "an unknown fence: ''"),
    ("```json", "```jsno", "an unknown fence: 'jsno'"),
    ("needs=gpu", "needs=luck", "an unknown reason: 'sh needs=luck'"),
    ("needs=gpu", "if=gpu", "an unknown fence: 'sh if=gpu'"),
    ("```json\n", "```json needs=gpu\n", "an unknown reason: 'json needs=gpu'"),
    ('.bin"}\n```\n', '.bin"}\n', "an unknown fence: 'that is not closed'"),
    ('"train": ', '"trein": ', "there is no key data.trein"),
    ("ptx::bulk_commit();", "ptx::bulk_comit();", "no source has the line ptx::bulk_comit();"),
    ("--auto", "--automatic", "train_gpt has no option --automatic"),
    ("train.max_steps=", "train.steps=", "there is no key train.steps"),
    ("build/train_gpt configs", "build/train_gpt trian configs", "train_gpt has no command trian"),
    ("configs/gpt2_124M.json \\", "configs/gpt9.json \\", "there is no configs/gpt9.json"),
    ("make gpu-check", "make gpu-chek", "make has no gpu-chek"),
    ("ARCH=", "ARHC=", "make has no ARHC=native"),
    ("gpu_check.py --list", "gpu_check.py --lst", "scripts/gpu_check.py has no option --lst"),
    ("scripts/gpu_check.py", "scripts/gpu_chek.py", "there is no program scripts/gpu_chek.py"),
    ("build/test_simt", "build/test_smit", "there is no program build/test_smit"),
    ("[--out ", "[--html ", "train_gpt report has no option --html"),
    ("train_gpt report", "report", None),
    ("train_gpt report RUN... [--out ", "report [--html ", "train_gpt report has no option --html"),
    ("`--top-k`", "`--top-q`", "`--top-q`: no program has --top-q"),
    ("--min-p", "--mini-p", "no program has --mini-p"),
    ("model.n_layer", "model.layers", "there is no key model.layers"),
    ("configs/*.json", "configs/*.yaml", "there is no configs/*.yaml"),
    ("mpirun -np", "mprun -np", "there is no program mprun"),
]
PLANTED_OUTPUT = [
    ("plan configs", "report --html configs", "exit code 64"),
    ("8 > plan.txt", "8 | false", "exit code 1"),
    ("bytes  2.5 MiB", "bytes  2.5 KiB", "the output differs"),
    ("parameters  7\n", "parameters  7\nand another\n", "the output differs"),
    ("MiB\nparameters  7", "MiB\n...\nparameter  7", "the output differs"),
    ("8 9 %\n", "8 9 %\nZeRO\n", "the output differs"),
]


class Planted(unittest.TestCase):
    def test_a_page_without_problems(self):
        page = Page("good.md", GOOD)
        self.assertEqual(page.problems(), [])
        self.assertEqual([problem for _, _, problem in run_page(page)], [None] * 3)

    def test_each_problem_is_found(self):
        for old, new, problem in PLANTED:
            with self.subTest(f"{old} -> {new}"):
                self.assertIn(old, GOOD)
                found = Page("bad.md", GOOD.replace(old, new, 1)).problems()
                self.assertEqual(len(found), 1 if problem else 0, found)
                self.assertIn(problem or "", "".join(found))

    def test_each_wrong_run_is_found(self):
        for old, new, problem in PLANTED_OUTPUT:
            with self.subTest(f"{old} -> {new}"):
                self.assertIn(old, GOOD)
                found = [found for _, _, found in run_page(Page("bad.md", GOOD.replace(old, new, 1))) if found]
                self.assertIn(problem, found[0])


if __name__ == "__main__":
    unittest.main()

"""The blocks and code spans of the documentation's pages, and checks that what they name exists.

Nothing here runs a documented command, see test_documentation.py. The trainer's commands and options are checked by
--help, keys by --help-config, scripts and their options by their source, targets of make by the Makefile, and any other
program by FOREIGN.
"""
import functools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from trainer import ENVIRONMENT, ROOT, TRAINER

LANGUAGES = ["sh", "console", "json", "python", "cpp", "text"]
REASONS = ["gpu", "cluster", "network", "root", "hours", "llm.c", "packages"]
FOREIGN = ["apt", "cd", "debootstrap", "kubectl", "lm_eval", "man", "mpirun", "nvidia-smi", "pip", "podman", "salloc",
           "sbatch", "scancel", "source", "srun", "tail", "tar", "tensorboard", "torchrun", "./train_gpt2cu"]
OTHER_OPTIONS = {  # in code spans without a program
    "--allow-run-as-root": "mpirun's", "--signal": "Slurm's", "--batch_size": "an example of an error"}
OPTION = re.compile(r"--[A-Za-z][\w-]*")
PROGRAM = re.compile(r"(.*/)?train_gpt(_cpu)?")
MAKEFILES = (ROOT / "Makefile").read_text() + (ROOT / "test.mk").read_text()


@functools.lru_cache(maxsize=None)
def help_of(*args):
    return subprocess.run([TRAINER, *args], capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout


@functools.lru_cache(maxsize=None)
def gpu_lines():
    return {line.strip() for path in (ROOT / "kernels/cuda").rglob("*.cu*") for line in path.read_text().splitlines()}


@functools.lru_cache(maxsize=None)
def trainer_options():
    """The options of each command; "" is training."""
    commands = re.findall(r"^  ([a-z-]+) ", help_of("--help").split("\nSubcommands:\n")[1], re.MULTILINE)
    texts = {"": help_of("--help"), **{command: help_of(command, "--help") for command in commands}}
    texts[""] += "  --complete"  # for completion scripts
    options = {command: {*re.findall(r"^ {2,4}(?:-\w,)?(--[\w-]+)", text, re.MULTILINE)}
               for command, text in texts.items()}
    return {**options, "train": options[""]}


@functools.lru_cache(maxsize=None)
def keys():
    return set(re.findall(r"^(\w+\.\w+)", help_of("--help-config"), re.MULTILINE))


@functools.lru_cache(maxsize=None)
def program_options(program):
    """What looks like an option in the sources of a program of the repository; None if there is no such program."""
    if program.startswith("build/"):
        if not re.search(rf"\b{re.escape(Path(program).name)}\b", MAKEFILES):
            return None
        sources = [*ROOT.glob("test/**/*.cpp"), *ROOT.glob("dev/*.cpp")]
    elif (ROOT / program).is_dir():
        sources = ROOT.glob(f"{program}/*.py")
    elif (ROOT / program).is_file():
        sources = [ROOT / program]
    else:
        return None
    return {option for source in sources for option in OPTION.findall(source.read_text("utf-8", "replace"))}


def check_trainer(args):
    """Yields what the trainer does not know of its arguments."""
    command = args[0] if args and args[0] in trainer_options() else ""
    if command == "" and args and not re.fullmatch(r"-.*|\.+|.*\.json|CONFIG", args[0]):
        yield f"train_gpt has no command {args[0]}"
        return
    for word in args:
        if word == "--":  # then comes what starts the ranks
            break
        option = OPTION.match(word)
        if option and option[0] not in trainer_options()[command]:
            yield f"{' '.join(['train_gpt', command]).strip()} has no option {option[0]}"
        if word.startswith("configs/") and not (ROOT / word).exists():
            yield f"there is no {word}"
        key = re.match(r"(\w+\.\w+)=", word)
        if key and key[1] not in keys() | {"section.key"}:
            yield f"there is no key {key[1]}"


def check_make(words):
    """Yields the targets and variables that the Makefiles do not have."""
    for word in words:
        name = re.escape(word.split("=")[0])
        source = re.sub(r"^build\w*/|\.o$", "", word)
        is_target = re.search(rf"^[^\n:=]*(?<![\w./-]){name}(?![\w./-])[^\n:=]*:", MAKEFILES, re.MULTILINE)
        is_built = "/" in word and ((ROOT / source).exists() or re.search(rf"\b{re.escape(source)}\b", MAKEFILES))
        is_variable = "=" in word and re.search(rf"\b{name}\b", MAKEFILES)
        if not (word.startswith("-") or is_target or is_built or is_variable):
            yield f"make has no {word}"


def check_command(words, options):
    """Yields the problems of a command; adds the options that its program has to options."""
    words = words[next((i for i, word in enumerate(words) if not re.match(r"\w+=|sudo$", word)), len(words)):]
    place = max((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), default=None)
    if place is not None:
        yield from check_trainer(words[place + 1:])
        yield from check_command(words[:place], options)
    elif words and words[0] == "make":
        yield from check_make(words[1:])
    elif words and words[0] in FOREIGN:
        options.update(option for word in words for option in OPTION.findall(word))
    elif words[:1] == ["python3"]:
        yield from check_command(words[1:], options)
    elif words:
        program, known = words[0], program_options(words[0])
        options.update(known or [])
        if known is None:
            yield f"there is no program {program}"
        else:
            yield from (f"{program} has no option {option}" for word in words for option in OPTION.findall(word)
                        if option not in known)


def commands_of(script):
    """The simple commands of a script as lists of words. Redirections stay in them; loops are not understood."""
    script = re.sub(r"\$\([^)]*\)", "N", script).replace("\\\n", " ")
    for line in script.splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        words.whitespace_split, command = True, []
        for word in [*words, ";"]:
            if re.fullmatch(r"[;&|]+", word):
                yield command
                command = []
            else:
                command.append(word)


def check_span(span, options):
    """Yields the problems of a code span that is a command, a key or a file; see check_command()."""
    text = re.sub(r"[\[\]|\\]", " ", span)
    try:
        words = shlex.split(text) or [""]
    except ValueError:  # an apostrophe or a quote alone
        words = text.split()
    first, has_options = words[0], any(word.startswith("--") for word in words[1:])
    key = re.fullmatch(r"(\w+)\.(?!(?:bin|json|safetensors)$)\w+", span)
    if key and any(known.startswith(f"{key[1]}.") for known in keys()) and span not in keys():
        yield f"there is no key {span}"
    elif first in trainer_options() and has_options:
        yield from check_trainer(words)
    elif any(map(PROGRAM.fullmatch, words)) or first in ("make", "python3") or (
            "/" in first and (ROOT / first).is_file()) or (
            has_options and not first.startswith("--") and not first.isupper()):
        yield from check_command(words, options)
    elif re.fullmatch(r"(commands|configs|dev|docs|kernels|model|runtime|scripts|test|training)/[\w./*-]+", span):
        if not [*ROOT.glob(span.rstrip("/"))]:
            yield f"there is no {span}"


class Block(NamedTuple):
    line: int
    fence: str
    text: str


class Page:
    def __init__(self, name, text):
        self.name, self.blocks, prose, block = name, [], [], None
        if name.startswith("docs/coming_from_"):
            text = re.sub(r"^\| [^|]* \|", "", text, flags=re.MULTILINE)  # a column of the other program
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                if block:
                    self.blocks.append(Block(block[0], block[1], "".join(block[2:])))
                block = None if block else [number, line.strip("` ")]
            else:
                (block if block else prose).append(line + "\n")
        if block:
            self.blocks.append(Block(block[0], "that is not closed", ""))
        self.spans = [" ".join(span.split()) for part in re.split(r"\n\s*\n", "".join(prose))
                      for span in re.findall(r"`([^`]+)`", part)]

    def check_block(self, block, options):
        """Yields the problems of a block's fence and, unless its commands run, of its contents."""
        fence = re.fullmatch(r"(\w+)(?: needs=(\S+))?", block.fence)
        if not fence or fence[1] not in LANGUAGES:
            yield f"an unknown fence: {block.fence!r}"
        elif fence[2] and (fence[1] not in ("sh", "console") or fence[2] not in REASONS):
            yield f"an unknown reason: {block.fence!r}"
        elif fence[2]:
            for command in commands_of(re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)):
                yield from check_command(command, options)
        elif fence[1] == "json":
            sections = json.loads(block.text if block.text.startswith("{") else f"{{{block.text}}}")
            named = {f"{section}.{key}" for section, values in sections.items() if section != "$schema"
                     for key in values}
            yield from (f"there is no key {key}" for key in sorted(named - keys()))
        elif fence[1] == "cpp":  # lines of the GPU's sources
            yield from (f"no source has the line {line}" for line in block.text.splitlines() if line not in gpu_lines())
        elif fence[1] == "python":
            compile(block.text, f"{self.name}:{block.line}", "exec")

    def problems(self):
        """What is wrong with the page, without running anything."""
        options = {option for of_command in trainer_options().values() for option in of_command}.union(OTHER_OPTIONS)
        found = [f"{self.name}:{block.line}: {problem}" for block in self.blocks
                 for problem in self.check_block(block, options)]
        found += [f"{self.name}: `{span}`: {problem}" for span in self.spans for problem in check_span(span, options)]
        alone = [span for span in self.spans if span.startswith("--")]
        alone += [comment for block in self.blocks
                  for comment in re.findall(r"^(?:.*\s)?# (.*)", block.text, re.MULTILINE)]
        return found + [f"{self.name}: `{text}`: no program has {option}" for text in alone
                        for option in OPTION.findall(text) if option not in options]

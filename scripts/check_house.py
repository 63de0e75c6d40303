#!/usr/bin/env python3
"""Checks the code rules of the project (`make check`); prints one line per finding.

Expects C++ formatted by clang-format: code in the first column is at namespace scope, and a block ends with a brace in
the column of the line that opened it. test/program/test_house.py plants a violation of each rule.
"""
import re
import sys
from pathlib import Path

MAX_COLUMNS, MAX_FILE_LINES, MAX_FUNCTION_LINES = 120, 500, 120
MAX_LINES = {"README.md": 150, "Makefile": 150}  # other files: MAX_FILE_LINES
CPP = {".h", ".cpp", ".cu", ".cuh"}
SOURCES = CPP | {".py", ".sh", ".js", ".css", ".html"}
BUNDLED = "commands/report/uplot"  # unmodified files of another project
MAY_USE_IF = {"kernels/numeric.h", "kernels/cuda/launch.cuh", "kernels/cuda/ptx.cuh",
              "kernels/cuda/hopper/ptx_hopper.cuh", "test/simt/include/cuda_runtime.h", "test/support/catch.h"}
# Launchers give ranks their number in environment variables, and OpenMP has one for how threads wait; neither affects
# results. Tests use them to control stand-ins, the simulated GPU and injected faults.
MAY_READ_ENVIRONMENT = {"runtime/cluster/rank_environment.cpp", "kernels/cpu/pool.cpp", "test/simt/nccl_stand_in.cpp",
                        "test/simt/runtime.cpp", "test/simt/cublas_lt.cpp", "test/simt/device_memory.cpp",
                        "test/simt/options.cpp", "test/program/file_faults.cpp", "test/program/refuse.cpp",
                        "test/faults/inject.cpp"}

# Allowed includes: folder -> folders and files. None: anything. Subfolders follow the folder above them.
BASICS = ["kernels/base", *(f"kernels/{name}.h" for name in ("device", "comm", "numeric", "tensor", "trace"))]
# Other folders may include all of runtime/io and the public headers of the other folders of runtime/.
RUNTIME_FOLDERS = ["config", "checkpoint", "cluster", "logging", "io", "performance"]
RUNTIME = ["runtime/io", *(f"runtime/{folder}/{folder}.h" for folder in RUNTIME_FOLDERS),
           *(f"runtime/config/{name}.h" for name in ("schedule", "loss_scale", "divergence"))]
DATA = [f"data/{room}" for room in ("tokenizer", "text", "shards", "prepare", "evaluation")]
SEAM = ["kernels", "kernels/base"]
BACKEND = [*SEAM, "kernels/shared"]
ARROWS = {
    "": ["commands", "training", "training/models", "model", *RUNTIME, *DATA, *SEAM],
    "commands": ["commands", "training", "training/models", "model", *RUNTIME, *DATA, *BASICS],
    "training": ["training", "training/models", "model", *RUNTIME, *DATA, *BASICS],
    "training/models": ["training/models", "model", *RUNTIME, *DATA, *BASICS],
    "model": ["model", *SEAM],
    **{f"runtime/{folder}": [f"runtime/{folder}", *RUNTIME, *BASICS] for folder in RUNTIME_FOLDERS},
    "runtime/performance": ["runtime/performance", *RUNTIME, *BASICS, "model/schedule.h"],
    "runtime/config": ["runtime/config", *RUNTIME, *BASICS, "model/shape.h", "model/optimizers.h"],
    "data": [*DATA, "runtime/io", *BASICS],
    "data/tokenizer": ["data/tokenizer", "runtime/io", *BASICS],
    "data/text": ["data/text", "data/tokenizer", "runtime/io", *BASICS],
    "data/shards": ["data/shards", "data/tokenizer", "runtime/io", *BASICS],
    "data/evaluation": ["data/evaluation", "data/text", "data/shards", "data/tokenizer", "runtime/io", *BASICS],
    "kernels": SEAM,
    "kernels/base": ["kernels/base", "kernels/numeric.h"],
    "kernels/shared": BACKEND,
    "kernels/ranks": [*BACKEND, "kernels/ranks"],
    "kernels/cpu": [*BACKEND, "kernels/ranks", "kernels/cpu"],
    "kernels/cuda": [*BACKEND, "kernels/cuda", *(f"kernels/cuda/{room}" for room in ("matmul", "attention", "hopper"))],
    "test": None,
    "dev": None,
}
# The names that a header declares at namespace scope: enumerators, types, constants and functions.
DECLARATIONS = [re.compile(pattern, re.M) for pattern in (
    r"^enum \w+ \{([^}]*)\}",
    r"^(?:template <.*>\s*)?(?:struct|class|enum class|enum|union) (\w+)(?: final)?(?: : [^;{]*)?\s*[{;]",
    r"^(?:template <.*>\s*)?using (\w+) =",
    r"^(?:(?:inline|static|extern) )*(?:constexpr|const) [^()=;]*?\b(k[A-Z]\w*)",
    r"^(?!return|else|using|#)(?:template <.*>\s*)?(?:\[\[.*\]\] )?[A-Za-z_][\w:<>,*& ]*[ *&](\w+)\(")]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include "(.*?)"(.*IWYU pragma: export)?', re.M)
CUDA = {"__device__", "__global__", "threadIdx"}  # the compiler's names, which launch.cuh makes available
BACKEND_HEADERS = re.compile(r"(cuda|cublas|nccl|nv|mpi|dnnl|omp)")

LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
                     r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.S)
SCOPE = re.compile(r'\s*(template\s*<.*>\s*)?(inline\s+)?(namespace|struct|class|union|enum|extern "")')
VARIABLE = re.compile(r"^(?!using|typedef|template|struct|class|union|enum|namespace|public|private|protected|friend)"
                      r'[A-Za-z_][^;{}()="]*[;={]', re.M)
NEVER_CHANGES = re.compile(r"\bconstexpr\b|\bconst\b(?!.*\*)|\bsig_atomic_t\b|\boperator\b", re.S)
FORBIDDEN = [(re.compile(r"<<<"), "a kernel is started by launch() only"),
             (re.compile(r"\bgetenv\b"), "no environment variable changes a run"),
             (re.compile(r"\b(TO" r"DO|FIX" r"ME)\b"), "open an issue instead")]


def blank(literal):
    """Removes comments and the contents of strings; keeps the line numbers."""
    return ("" if literal[0][0] == "/" else '""') + "\n" * literal[0].count("\n")


def may_include(name):
    """Returns the folder in ARROWS that the file belongs to, and the folders and files that it may include."""
    folder = str(Path(name).parent).replace(".", "")
    while folder not in ARROWS:
        folder = folder.rpartition("/")[0]
    return folder, ARROWS[folder]


def include_findings(name, text):
    folder, allowed = may_include(name)
    for number, line in enumerate(text.splitlines(), 1):
        quoted, system = re.match(r'\s*#\s*include "(.*)"', line), re.match(r"\s*#\s*include <(.*)>", line)
        if allowed is None:
            return
        if quoted and quoted[1] not in allowed and str(Path(quoted[1]).parent) not in allowed:
            yield number, f"{folder or 'the root'} may not include {quoted[1]}"
        if system and folder.count("/") == 0 and BACKEND_HEADERS.match(system[1]):
            yield number, f"only the implementations in kernels/ may include {system[1]}"


def cpp_findings(name, text):
    yield from include_findings(name, text)
    code = LITERAL.sub(blank, text)
    opened, starts = None, True  # the outermost open function or loop; whether the next line starts a statement
    for number, line in enumerate(code.splitlines(), 1):
        text = line.strip()
        column = len(line) - len(line.lstrip())
        if opened and text[:1] == "}" and column <= opened[0]:
            if number - opened[1] >= MAX_FUNCTION_LINES:
                yield opened[1], f"a function of {number - opened[1] + 1} lines; at most {MAX_FUNCTION_LINES}"
            opened = None
        if starts and text:
            statement = column, number
        if not opened and text.endswith("{") and not text.endswith("= {") and not SCOPE.match(line):
            opened = statement
        starts = not text or text[0] == "#" or text[-1] in ";{}:"
        if re.match(r"\s*#\s*(el)?if", line) and name not in MAY_USE_IF:
            yield number, "#if outside " + ", ".join(sorted(MAY_USE_IF))
    for match in VARIABLE.finditer(code):
        if not NEVER_CHANGES.search(match[0]):
            yield code.count("\n", 0, match.start()) + 1, f"a variable of the whole program: {match[0]}"


def findings(name, text):
    lines = text.splitlines()
    most = MAX_LINES.get(name, MAX_FILE_LINES)
    if len(lines) > most:
        yield len(lines), f"a file of {len(lines)} lines; at most {most}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"a line of {len(line)} columns; at most {MAX_COLUMNS}"
        for pattern, sentence in FORBIDDEN:
            excepted = "getenv" in pattern.pattern and name in MAY_READ_ENVIRONMENT
            if pattern.search(line) and Path(name).suffix in CPP and not excepted:
                yield number, f"{pattern.search(line)[0]}: {sentence}"
    if Path(name).suffix in CPP:
        yield from cpp_findings(name, text)


def op_findings(texts):
    """Each op has an implementation in both backends, a reference (textbook) and a test."""
    def is_in(files, pattern):
        return any(re.search(pattern, text) for name, text in texts.items() if name.startswith(files))
    matches = [(seam, match) for seam in ("kernels/ops.h", "kernels/update_ops.h")
               for match in re.finditer(r"^(?:template <.*> )?void (\w+)\(", texts[seam], re.M)]
    for seam, match in matches:
        op, number = match[1], texts[seam].count("\n", 0, match.start()) + 1
        for backend in ("kernels/cpu", "kernels/cuda"):
            if not is_in(f"{backend}/", rf"\bvoid (ops::)?{op}\("):
                yield seam, number, f"{op} is not implemented in {backend}"
        if not is_in("test/reference/", rf"\bvoid (ref::)?{op}\("):
            yield seam, number, f"{op} has no textbook in test/reference"
        if not is_in("test/kernels/test_ops", rf"\b{op}\b"):
            yield seam, number, f"{op} has no test in test/kernels/test_ops*"


def storage_template_findings(name, text):
    """In model/, a storage type is a value (kernels/tensor.h), except in the arena, which allocates any type."""
    for number, line in enumerate(LITERAL.sub(blank, text).splitlines(), 1):
        if name != "model/arena.h" and re.search(r"\btemplate\b|\bstd::visit\b|(?<!::)\b(bf16|fp16)\b", line):
            yield number, "model/ has no templates over the storage type; take a View"


def cycle_findings(texts):
    """Include cycles: reports the include that closes the cycle."""
    done, path = set(), []

    def visit(name):
        path.append(name)
        for number, line in enumerate(texts[name].splitlines(), 1):
            included = re.match(r'\s*#\s*include "(.*)"', line)
            if included and included[1] in path:
                yield name, number, "includes itself: " + " -> ".join([*path[path.index(included[1]):], included[1]])
            elif included and included[1] in texts and included[1] not in done:
                yield from visit(included[1])
        done.add(path.pop())

    for name in texts:
        if name not in done:
            yield from visit(name)


def use_findings(texts):
    """A file of the product includes each header that declares a name it uses, and no other headers.

    A source file also has the includes of its own header. "// IWYU pragma: export" after an include passes that header
    on to those who include the file. Headers that a file may not include come through a public header."""
    code = {name: re.sub(r"^[ \t]*#.*$", "", LITERAL.sub(blank, text), flags=re.M) for name, text in texts.items()
            if Path(name).suffix in CPP}
    declared = {name: {word for pattern in DECLARATIONS for found in pattern.findall(text)
                       for word in re.findall(r"\w+", found)} for name, text in code.items()}
    declared["kernels/cuda/launch.cuh"] |= CUDA
    includes = {name: [(header, export) for header, export in INCLUDE.findall(texts[name]) if header in code]
                for name in code}

    def included(name, is_direct):
        found, waiting = {name}, [name]
        while waiting:
            for header, export in includes[waiting.pop()]:
                if header not in found and (export or not is_direct):
                    found.add(header)
                    waiting.append(header)
        return found

    def exported(name):
        return included(name, True)

    def names(headers):
        return set().union(*(declared[header] for header in headers))

    def line_of(pattern, text):
        return text.count("\n", 0, re.search(pattern, text).start()) + 1

    for name, text in code.items():
        allowed, own = may_include(name)[1], str(Path(name).with_suffix(".h"))
        if allowed is None:
            continue
        files = {name} | ({own} & {header for header, _ in includes[name]})
        direct = files.union(*(exported(header) for file in files for header, _ in includes[file]))
        words = set(re.findall(r"(?<![.\w])(?<!->)\w+", text))
        for header in sorted(included(name, False) - direct):
            used = words & declared[header] - names(direct)  # `direct` has the names of the file itself
            if used and (header in allowed or str(Path(header).parent) in allowed):
                yield name, line_of(rf"\b{min(used)}\b", text), f"uses {min(used)} of {header} and does not include it"
        for header, export in includes[name]:
            if header != own and not export and not words & names(exported(header)):
                yield name, line_of(f'include "{header}"', texts[name]), f"includes {header} but uses no name from it"


def program_findings(texts):
    """Each program that the Makefiles link is in PROGRAMS, which the tests build."""
    makefiles = {name: texts[name] for name in ("Makefile", "test.mk")}
    lists = re.findall(r"^(?:CPU|GPU)_PROGRAMS\s*:=((?:.*\\\n)*.*)", "".join(makefiles.values()), re.M)
    listed = set(re.findall(r"\w+", " ".join(lists)))
    for name, text in makefiles.items():
        for match in re.finditer(r"^\$\(BUILD\)/(\w+):", text, re.M):
            if match[1] not in listed and match[1] != "features":
                yield name, text.count("\n", 0, match.start()) + 1, \
                    f"{match[1]} is in neither CPU_PROGRAMS nor GPU_PROGRAMS, so no test builds it"


def code_lines(name, text):
    """Lines that are neither blank nor comment."""
    if Path(name).suffix in CPP:
        text = LITERAL.sub(lambda literal: literal[0] if literal[0][0] != "/" else "", text)
    return sum(bool(line.strip()) for line in text.splitlines())


def budget_findings(texts, root):
    """The product's lines per folder, at most the sum of the folder's rows in dev/results/lines.md."""
    page, budget = "dev/results/lines.md", {}  # folder: (lines, number of its last row)
    for number, line in enumerate((root / page).read_text("utf-8").splitlines(), 1):
        if row := re.match(r"\| `([^`]*)` \| ([\d,]+) \|", line):
            budget[row[1]] = budget.get(row[1], (0, 0))[0] + int(row[2].replace(",", "")), number
    for folder, (most, number) in budget.items():
        is_page = folder == "commands/report"
        lines = sum(code_lines(name, text) for name, text in texts.items()
                    if (name == folder or name.startswith(folder + "/")) and (Path(name).suffix in CPP) != is_page)
        if lines > most:
            yield page, number, f"{folder} has {lines} lines; at most {most}"


def doc_findings(root):
    """README.md is short and links to every page of docs/; no page has a dead link."""
    def anchors(text):
        titles = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
        return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]

    link = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
    readme, linked = root / "README.md", set()
    for page in [*sorted(root.glob("*.md")), *sorted(root.glob("docs/*.md"))]:
        name, lines = str(page.relative_to(root)), page.read_text("utf-8").splitlines()
        if page == readme and len(lines) > MAX_LINES[name]:
            yield name, len(lines), f"a file of {len(lines)} lines; at most {MAX_LINES[name]}"
        for number, line in enumerate(lines, 1):
            for target, anchor in link.findall(re.sub(r"`[^`]*`", "", line)):
                file = (page.parent / target).resolve() if target else page
                if page == readme:
                    linked.add(file)
                if not file.exists() or anchor and anchor not in anchors(file.read_text("utf-8")):
                    yield name, number, f"a dead link: {target}{'#' * bool(anchor)}{anchor}"
    for page in sorted(root.glob("docs/*.md")):
        if page.resolve() not in linked:
            yield str(page.relative_to(root)), 1, "README.md has no link to this page"


def main(root):
    tops = [top for top in root.iterdir() if not re.match(r"build|runs|\.", top.name)]
    paths = [path for top in tops for path in [top, *top.rglob("*")]
             if path.suffix in SOURCES and path.parent != root / BUNDLED or path.name in ("Makefile", "test.mk")]
    texts = {str(path.relative_to(root)): path.read_text("utf-8") for path in paths}
    found = [(name, *finding) for name, text in sorted(texts.items()) for finding in findings(name, text)]
    found += op_findings(texts)
    found += program_findings(texts)
    found += cycle_findings(texts)
    found += use_findings(texts)
    found += [(name, *finding) for name, text in texts.items() if name.startswith("model/")
              for finding in storage_template_findings(name, text)]
    found += budget_findings(texts, root)
    found += doc_findings(root.resolve())
    for name, number, sentence in found:
        print(f"{name}:{number}: {sentence}")
    print(f"check: {len(texts)} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))

"""scripts/check_house.py finds a planted violation of each rule, and none in the unchanged tree."""
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["commands", "configs", "data", "dev", "docs", "kernels", "model", "runtime", "scripts", "test", "training"]

LONG_FUNCTION = "void long_one() {\n" + "    step();\n" * 119 + "}\n"
WRAPPED_FUNCTION = "void wrapped(int a,\n             int b) {\n    for (;;) {\n    }\n" + "    step();\n" * 116 + "}\n"
VIOLATIONS = [  # rule, file, text appended to it, part of the finding
    ("model -> runtime", "model/gpt.h", '#include "runtime/io/io.h"', "model may not include runtime/io/io.h"),
    ("runtime -> model", "runtime/io/io.h", '#include "model/gpt.h"', "runtime/io may not include model/gpt.h"),
    ("runtime -> ops", "runtime/io/io.h", '#include "kernels/ops.h"', "runtime/io may not include kernels/ops.h"),
    ("past a public header", "runtime/logging/logging.h", '#include "runtime/checkpoint/manifest.h"',
     "runtime/logging may not include runtime/checkpoint/manifest.h"),
    ("data -> runtime's rest", "data/shards/shards.h", '#include "runtime/config/config.h"',
     "data/shards may not include runtime/config/config.h"),
    ("kernels -> above", "kernels/ops.h", '#include "model/gpt.h"', "kernels may not include model/gpt.h"),
    ("backend -> above", "kernels/cpu/parallel.h", '#include "data/shards/shards.h"',
     "may not include data/shards/shards.h"),
    ("nothing -> test", "train_gpt.cu", '#include "test/support/catch.h"',
     "the root may not include test/support/catch.h"),
    ("not from the root", "model/gpt.h", '#include "gpt.h"', "model may not include gpt.h"),
    ("backend's library above", "model/gpt.h", "#include <omp.h>", "only the implementations in kernels/"),
    ("#if", "model/gpt.h", "#ifdef USE_CUDA", "#if outside"),
    ("#if in a block", "model/gpt.h", "  # if 1", "#if outside"),
    ("launch", "model/gpt.h", "kernel<<<1, 2>>>();", "<<<"),
    ("environment", "model/gpt.h", 'const char* home = getenv("HOME");', "getenv"),
    ("variable", "model/gpt.h", "int counter = 0;", "a variable of the whole program: int counter"),
    ("variable in braces", "model/gpt.h", "static std::vector<int> cache{1, 2};", "a variable of the whole program"),
    ("variable without value", "model/gpt.h", "thread_local std::string last;", "a variable of the whole program"),
    ("table of pointers", "model/gpt.h", "const char* names[] = {\n    0,\n};", "a variable of the whole program"),
    ("notes", "kernels/ops.h", "// TO" + "DO: faster", "open an issue instead"),
    ("columns", "model/gpt.h", "// " + "x" * 118, "a line of 121 columns"),
    ("columns of a script", "scripts/setup.sh", "# " + "x" * 119, "a line of 121 columns"),
    ("columns of a page", "commands/report/report.css", "/*" + "x" * 117 + "*/", "a line of 121 columns"),
    ("lines of a page", "commands/report/page.js", "\n" * 500, "at most 500"),
    ("function", "model/gpt.h", LONG_FUNCTION, "a function of 121 lines"),
    ("function with a long head", "model/gpt.h", WRAPPED_FUNCTION, "a function of 121 lines"),
    ("method", "model/gpt.h", "struct Long {\n    " + LONG_FUNCTION.replace("\n}", "\n    }") + "};",
     "a function of 121 lines"),
    ("op without anything", "kernels/ops.h", "void new_op(const NewOp& op);",
     "new_op is not implemented in kernels/cpu"),
    ("op on one backend", "kernels/ops.h", "void check_cublas(const NewOp& op);",
     "check_cublas is not implemented in kernels/cpu"),
    ("op on the other backend", "kernels/ops.h", "void parallel_for(const NewOp& op);",
     "parallel_for is not implemented in kernels/cuda"),
    ("op without textbook", "kernels/ops.h", "void new_op(const NewOp& op);", "new_op has no textbook"),
    ("op without test", "kernels/ops.h", "void new_op(const NewOp& op);", "new_op has no test"),
    ("template over the storage type", "model/gpt.h", "template <class T> void forward(const T* x);", "take a View"),
    ("storage type by name", "model/gpt.h", "void forward(const bf16* x);", "take a View"),
    ("visitor", "model/gpt.h", "void f() { std::visit(g, h); }", "take a View"),
    ("include cycle", "runtime/io/files.h", '#include "runtime/io/files.h"', "includes itself: runtime/io/files.h"),
    ("longer cycle", "model/options.h", '#include "model/gpt.h"', "includes itself: model/"),
    ("missing include", "model/sample.cpp", "void f(Arena* arena);", "uses Arena of model/arena.h"),
    ("unused include", "model/sample.cpp", '#include "model/shape.h"',
     "includes model/shape.h but uses no name from it"),
    ("lines", "model/gpt.h", "\n" * 500, "at most 500"),
    ("budget of a folder", "dev/results/lines.md", "| `test/simt` | 10 | less than it has |", "test/simt has "),
    ("lines of the Makefile", "Makefile", "\n" * 150, "at most 150"),
    ("program that no test builds", "test.mk", "$(BUILD)/forgotten: $(call object,$(BENCH)) $(HOST) \\\n  $(CPU)\n"
     "\t$(CXX) -o $@ $^", "forgotten is in neither CPU_PROGRAMS nor GPU_PROGRAMS"),
    ("page that README does not link", "docs/new_page.md", "# New page", "README.md has no link to this page"),
    ("dead link", "docs/gpu.md", "[gone](gone.md)", "a dead link: gone.md"),
    ("dead link in README", "README.md", "![curve](docs/gone.svg)", "a dead link: docs/gone.svg"),
    ("dead anchor", "docs/gpu.md", "[gone](testing.md#gone)", "a dead link: testing.md#gone"),
    ("dead anchor in the page itself", "docs/gpu.md", "[gone](#gone)", "a dead link: #gone"),
    ("README", "README.md", "\n" * 150, "at most 150"),
]
INNOCENT = """
// int counter = 0; #if
constexpr int kLimit = 3;
inline const std::string kName = "<" "<";
const char* const kNames[] = {
    "a {", R"(int counter = 0; })", "// b",
};
static volatile std::sig_atomic_t stop_signal = 0;
Foo& Foo::operator=(Foo&& other) { return *this; }
bool operator==(const Foo& a, const Foo& b);
int f(int a = 1);
struct Foo {
private:
    int x = 1'000'000;
};
""" + LONG_FUNCTION.replace("    step();\n", "", 1)


class House(unittest.TestCase):
    def check(self, root):
        result = subprocess.run(["python3", ROOT / "scripts/check_house.py", root], capture_output=True, text=True)
        self.assertEqual(result.stderr, "")
        return result.returncode, result.stdout.splitlines()

    def check_with(self, additions):
        """Returns the findings in a copy of the tree with (file, text) appended, and each text's range of lines."""
        with tempfile.TemporaryDirectory() as copy:
            for folder in FOLDERS:
                shutil.copytree(ROOT / folder, Path(copy, folder))
            for name in ["train_gpt.cu", "Makefile", "test.mk", "LICENSE", *(page.name for page in ROOT.glob("*.md"))]:
                shutil.copy(ROOT / name, copy)
            planted = []
            for name, text in additions:
                path = Path(copy, name)
                before = path.read_text() if path.exists() else ""
                path.write_text(before + text + "\n")
                planted.append(range(before.count("\n") + 1, before.count("\n") + text.count("\n") + 2))
            return *self.check(copy), planted

    def test_each_rule_fires(self):
        code, lines, planted = self.check_with([(name, text) for _, name, text, _ in VIOLATIONS])
        self.assertEqual(code, 1)
        for (rule, name, _, words), numbers in zip(VIOLATIONS, planted):
            with self.subTest(rule):
                here = [line for line in lines if any(line.startswith(f"{name}:{number}: ") for number in numbers)]
                self.assertTrue(any(words in line for line in here), here)

    def test_allowed_code_has_no_findings(self):
        _, lines, planted = self.check_with([("model/gpt.h", INNOCENT)])
        found = [line for line in lines for number in planted[0] if line.startswith(f"model/gpt.h:{number}:")]
        self.assertEqual(found, [])

    def test_each_fault_of_the_mutation_tests_can_be_planted(self):
        """Each fault's code occurs exactly once in its file; otherwise the fault tests nothing."""
        sys.path.insert(0, str(ROOT / "dev"))
        from plant_faults import FAULTS
        self.assertGreater(len(FAULTS), 250)
        self.assertEqual([(name, fault) for name, fault, code, faulty, *_ in FAULTS
                          if (ROOT / name).read_text().count(code) != 1 or code == faulty], [])

    def test_the_tree_follows_the_rules(self):
        code, lines = self.check(ROOT)
        self.assertEqual(code, 0, "\n".join(lines))


if __name__ == "__main__":
    unittest.main()

"""The kit for a GPU machine: how it finds CUDA libraries, its contents, and what it refuses to pack."""
import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import cuda_libraries  # noqa: E402
import pack_gpu_kit  # noqa: E402

RUNTIME, LT, NCCL = "libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2"


def make_library(path, soname, *flags):
    path.parent.mkdir(parents=True, exist_ok=True)
    name = [f"-Wl,-soname,{soname}"] if soname else []
    subprocess.run(["g++", "-shared", "-nostdlib", *name, *flags, "-x", "c++", os.devnull, "-o", path], check=True)


class Libraries(unittest.TestCase):
    """cuda_libraries.find() on a simulated machine: PATH, LD_LIBRARY_PATH and /usr/local lie in self.dir."""

    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.made.cleanup)
        for name in (RUNTIME, LT, NCCL):
            make_library(Path(cls.made.name, name), name)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(os.path.realpath(temporary.name))
        self.bin = self.dir / "bin"
        self.bin.mkdir()
        self.write_command("ldconfig", "echo '1 libs found in cache'")
        # This interpreter's packages are not part of the simulated machine.
        for change in (mock.patch.dict(os.environ, {"PATH": str(self.bin)}, clear=True),
                       mock.patch.object(cuda_libraries, "LOCAL_TOOLKITS", str(self.dir / "local/cuda*")),
                       mock.patch.object(sys, "path", []), mock.patch.object(sys, "executable", "/nonexistent/python")):
            change.start()
            self.addCleanup(change.stop)

    def write_command(self, name, script):
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def place(self, folder, *names):
        (self.dir / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(Path(self.made.name, name), self.dir / folder)
        return str(self.dir / folder)

    def check_found(self, folder, *names):
        libraries = cuda_libraries.find()
        for name in names or (RUNTIME, LT, NCCL):
            self.assertEqual(libraries.paths.get(name), str(self.dir / folder / name), libraries)
        self.assertIn(str(self.dir / folder), libraries.ld_library_path.split(":"))
        return libraries

    def test_each_place_and_their_order(self):
        """Adds libraries from the last place to the first; each new place takes precedence."""
        site = self.dir / "venv/lib/python3/site-packages"
        self.write_command("python3", f"""echo '["{site}"]'""")
        self.place("venv/lib/python3/site-packages/nvidia/cu13/lib", RUNTIME, LT)
        self.place("venv/lib/python3/site-packages/nvidia/nccl/lib", NCCL)
        found = self.check_found("venv/lib/python3/site-packages/nvidia/cu13/lib", RUNTIME, LT)
        self.check_found("venv/lib/python3/site-packages/nvidia/nccl/lib", NCCL)
        self.assertEqual((found.missing, found.optional_missing), ([], []))
        with mock.patch.object(sys, "path", [self.place("own")]):
            self.place("own/nvidia/cublas/lib", LT)
            self.check_found("own/nvidia/cublas/lib", LT)

        system = self.place("usr/lib", RUNTIME, LT, NCCL)
        lines = "\n".join(f"\t{name} (libc6,x86-64) => {system}/{name}" for name in (RUNTIME, LT, NCCL))
        self.write_command("ldconfig", f"echo '9 libs found in cache\n{lines}'")
        self.check_found("usr/lib")

        self.place("local/cuda-13.1/targets/x86_64-linux/lib", RUNTIME, LT, NCCL)
        self.check_found("local/cuda-13.1/targets/x86_64-linux/lib")
        self.place("toolkit/lib64", RUNTIME, LT, NCCL)
        (self.dir / "toolkit/bin").mkdir()
        (self.dir / "toolkit/bin/nvcc").write_text("#!/bin/sh\n")
        (self.dir / "toolkit/bin/nvcc").chmod(0o755)
        (self.bin / "nvcc").symlink_to(self.dir / "toolkit/bin/nvcc")
        self.check_found("toolkit/lib64")
        self.place("home/lib64", RUNTIME, LT, NCCL)
        os.environ["CUDA_HOME"] = str(self.dir / "home")
        self.check_found("home/lib64")
        os.environ["LD_LIBRARY_PATH"] = f"{self.dir}/empty:" + self.place("chosen", RUNTIME, LT, NCCL)
        found = self.check_found("chosen")
        self.assertEqual(found.ld_library_path, f"{self.dir}/chosen:{self.dir}/empty")

    def test_a_missing_library_is_reported_with_places_and_package(self):
        os.environ["LD_LIBRARY_PATH"] = "/here:/there"
        self.place("local/cuda-13.0/lib64", RUNTIME)
        self.write_command("python3", "exit 1")
        libraries = self.check_found("local/cuda-13.0/lib64", RUNTIME)
        self.assertEqual(len(libraries.missing), 1)
        for words in (f"{LT} (cuBLASLt) was not found in", "LD_LIBRARY_PATH (/here:/there)",
                      f"CUDA toolkits ({self.dir}/local/cuda-13.0)", "library cache", f"{self.bin}/python3",
                      "pip install 'nvidia-cublas==13.*'"):
            self.assertIn(words, libraries.missing[0])
        self.assertEqual(len(libraries.optional_missing), 1)
        self.assertRegex(libraries.optional_missing[0], r"^libnccl.so.2 \(NCCL\) .* pip install nvidia-nccl-cu13$")

    def test_files_that_are_not_the_library_are_skipped(self):
        self.place("local/cuda-13.0/lib64", RUNTIME, LT, NCCL)
        wrong = self.dir / "wrong"
        machine = bytearray(Path(self.made.name, LT).read_bytes())
        machine[18] = 183  # AArch64
        stub = self.place("toolkit/lib64/stubs", LT)
        for why, content in [("is not an ELF file", b""), ("is not an ELF file", b"INPUT(libcublasLt.so)\n" * 9),
                             ("is not an x86-64 file", bytes(machine)), ("has no dynamic section", bytes(machine[:18]) +
                              b"\x3e" + bytes(machine[19:54]) + bytes(10)),
                             (f"is {RUNTIME}, not {LT}", Path(self.made.name, RUNTIME).read_bytes()),
                             ("is a stub for the linker", None)]:
            with self.subTest(why):
                shutil.rmtree(wrong, ignore_errors=True)
                wrong.mkdir()
                if content is not None:
                    (wrong / LT).write_bytes(content)
                os.environ["LD_LIBRARY_PATH"] = str(wrong if content is not None else stub)
                self.check_found("local/cuda-13.0/lib64", LT)
                with mock.patch.object(cuda_libraries, "LOCAL_TOOLKITS", "/nonexistent"):
                    self.assertIn(f"{LT} {why}", cuda_libraries.find((LT,), ()).missing[0])

    def program_with_own_library(self):
        """Builds a program that needs the CUDA runtime only through a library in lib/ next to it, as in the kit."""
        own = self.dir / "kit/lib/libown.so"
        with mock.patch.dict(os.environ, PATH=os.defpath):
            make_library(own, own.name, "-Wl,--no-as-needed", f"{self.made.name}/{RUNTIME}")
            make_library(self.dir / "kit/program", None, "-Wl,--no-as-needed", own)
        return self.dir / "kit/program"

    def test_the_command_exits_with_69_if_nothing_can_run(self):
        program = self.dir / "program"
        with mock.patch.dict(os.environ, PATH=os.defpath):
            make_library(program, None, "-Wl,--no-as-needed", self.place("lib", RUNTIME) + "/" + RUNTIME)
        self.assertEqual(cuda_libraries.needed_by(program), (RUNTIME,))
        self.assertEqual(cuda_libraries.needed_by(self.program_with_own_library()), (RUNTIME,))
        for path, code, words in ((self.dir / "lib", 0, f"{RUNTIME}: {self.dir}/lib/{RUNTIME}"),
                                  (self.dir, 69, f"{RUNTIME} (the CUDA runtime) was not found")):
            os.environ["LD_LIBRARY_PATH"] = str(path)
            with mock.patch.object(sys, "argv", ["", str(program)]), mock.patch("builtins.print") as said:
                self.assertEqual(cuda_libraries.main(), code)
            self.assertIn(words, str(said.call_args_list))


class Kit(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        (self.dir / "build").mkdir()

    def make_program(self, *flags):
        source = "#include <omp.h>\nint main() { return *new int(omp_get_max_threads()) < 1; }"
        subprocess.run(["g++", "-x", "c++", "-", "-fopenmp", "-g", "-o", self.dir / "build/program",
                        "-Wl,--disable-new-dtags", *flags], input=source, text=True, check=True)

    def pack(self, **options):
        with mock.patch("builtins.print"):
            pack_gpu_kit.pack(self.dir / "build", self.dir / "kit.tgz", ["program"], "abc123", **options)

    def test_the_archive_has_the_libraries_and_mirrors_the_repository(self):
        self.make_program("-Wl,-rpath,$ORIGIN/lib")
        self.pack()
        with tarfile.open(self.dir / "kit.tgz") as kit:
            kit.extractall(self.dir / "unpacked")
        kit = self.dir / "unpacked/gpu_kit"
        loaded = subprocess.run(["ldd", kit / "build/program"], capture_output=True, text=True, check=True).stdout
        for name in ("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1"):  # only a library needs the last one
            self.assertIn(f"{name} => {kit}/build/lib/{name} ", loaded)
        self.assertFalse((kit / "build/lib/libc.so.6").exists())
        subprocess.run([kit / "build/program"], check=True)
        self.assertEqual((kit / "REVISION").read_text(), "abc123\n")
        for name in pack_gpu_kit.files_of(ROOT):
            self.assertEqual((kit / name).read_bytes(), (ROOT / name).read_bytes())
        self.assertNotIn(b"debug_info", (kit / "build/program").read_bytes())

    def test_programs_that_would_not_run_elsewhere_are_refused(self):
        for flags, options, words in [
            ([], {}, "program has the rpath none"),
            (["-Wl,-rpath,/opt/cuda/lib64"], {}, "has the rpath ['/opt/cuda/lib64']"),
            (["-Wl,-rpath,$ORIGIN/lib:/opt/lib"], {}, "has the rpath ['$ORIGIN/lib:/opt/lib']"),
            (["-Wl,-rpath,$ORIGIN/lib"], {"max_bytes": 1000}, "more than 1,000"),
        ]:
            with self.subTest(words):
                self.make_program(*flags)
                with self.assertRaises(pack_gpu_kit.Refused) as refused:
                    self.pack(**options)
                self.assertIn(words, str(refused.exception))
                self.assertFalse((self.dir / "kit.tgz").exists())
        self.make_program("-Wl,-rpath,$ORIGIN/lib")
        with mock.patch.object(pack_gpu_kit, "NEWEST_GLIBC", (2, 1)), \
                self.assertRaisesRegex(pack_gpu_kit.Refused, "the kit promises 2.1"):
            self.pack()

    def test_a_missing_file_is_reported(self):
        with mock.patch.object(pack_gpu_kit, "FILES", ["LICENSE", "no/such/*"]), \
                self.assertRaisesRegex(FileNotFoundError, "no/such/.* is missing"):
            pack_gpu_kit.files_of(ROOT)

    def test_it_has_everything_that_its_scripts_import(self):
        """Covers the repository's modules and files that the kit's Python files import or name."""
        kit = set(map(str, pack_gpu_kit.files_of(ROOT)))
        folders = ("scripts", "dev", "test/program")
        for name in sorted(kit):
            if not name.endswith(".py"):
                continue
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                    [node.module] if isinstance(node, ast.ImportFrom) else []
                paths = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
                wanted = [f"{folder}/{module}.py" for folder in folders for module in modules] + paths
                for path in wanted:
                    if path.startswith(folders) and path.endswith(".py") and (ROOT / path).is_file():
                        self.assertIn(path, kit, f"{name} needs it")

    def test_it_has_everything_that_the_model_tests_read(self):
        kit = set(map(str, pack_gpu_kit.files_of(ROOT)))
        recorded = ROOT / "test/recorded/torch"
        references = {str(path.relative_to(ROOT)) for path in recorded.rglob("*") if path.is_file()}
        self.assertTrue(references)
        self.assertEqual(references - kit, set())


if __name__ == "__main__":
    unittest.main()

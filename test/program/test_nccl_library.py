"""The trainer loads NCCL only when ranks need it. One rank trains without the library; several report what is missing.
Uses simulated GPUs; the library is the stand-in, or an invalid one built here."""
import os
import shutil
import subprocess
import unittest
from pathlib import Path

from test_simulated_ranks import FOUR
from trainer import ENVIRONMENT, ROOT, TrainerTest

BUILD = ROOT / os.environ.get("BUILD", "build")
TRAINER = BUILD / "train_gpt_simt_dlopen"
STAND_IN = BUILD / "stand_in"
WITHOUT = {name: value for name, value in ENVIRONMENT.items() if name != "LD_LIBRARY_PATH"}
SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
VERSION = 'extern "C" int ncclGetVersion(int* version) { *version = %d; return 0; }'


class NcclLibrary(TrainerTest):
    def start(self, ranks, library=None, **changes):
        """Returns (exit code, output) of a run whose LD_LIBRARY_PATH is the folder `library`."""
        config = self.write_config(run_dir=f"run_{ranks}", **{**FOUR, **changes})
        path = {"LD_LIBRARY_PATH": str(library)} if library else {}
        result = subprocess.run([TRAINER, *(["--nproc", str(ranks)] if ranks > 1 else []), config], cwd=self.dir,
                                capture_output=True, text=True, timeout=170,
                                env={**WITHOUT, "OMP_NUM_THREADS": "1", **path})
        return result.returncode, result.stdout + result.stderr

    def library_of(self, source):
        """Returns a folder with a libnccl.so.2 compiled from this C++ text."""
        folder = self.dir / "wrong"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", folder / "libnccl.so.2"], input=source,
                       text=True, check=True)
        return folder

    def check_refused(self, folder, sentence):
        """Requires that two ranks exit with 71 and this message about rank 0, before creating a run directory."""
        code, said = self.start(2, folder)
        self.assertEqual(code, 71, said)
        self.assertRegex(said, r"rank 0 on \S+ cannot use NCCL: " + sentence)
        self.assertFalse((self.dir / "run_2").exists())

    def test_one_rank_trains_if_the_library_cannot_be_loaded(self):
        text = self.library_of("")
        (text / "libnccl.so.2").write_text("INPUT(libnccl.so.2)\n")
        code, said = self.start(1, text)
        self.assertEqual(code, 0, said)
        self.assertEqual(len(self.losses("run_1")), FOUR["train_max_steps"])
        self.check_refused(text, rf"{text}/libnccl.so.2: file too short; searched {text}, \S*/lib.* and "
                                 r"the system's library cache: install NCCL 2 \(.*pip install nvidia-nccl-cu13\)")

    def test_the_version_reports_a_missing_library(self):
        if any(Path(folder, "libnccl.so.2").exists() for folder in SYSTEM_FOLDERS):
            self.skipTest("NCCL is in one of the system's library folders")
        said = subprocess.run(["/lib64/ld-linux-x86-64.so.2", "--inhibit-cache", TRAINER, "--version"],
                              capture_output=True, text=True, check=True, env=WITHOUT).stdout
        self.assertIn("NCCL, not usable here: libnccl.so.2: cannot open shared object file: No such file or "
                      "directory; searched /lib/", said)

    def test_two_ranks_train_with_the_library(self):
        for ranks in (1, 2):
            code, said = self.start(ranks, STAND_IN, parallel_deterministic_reduce=True, parallel_zero_stage=2)
            self.assertEqual(code, 0, said)
        self.assertIn("ranks    2 by NCCL 2.28.9", said)
        self.assertEqual(self.records("run_2"), self.records("run_1"))

    def test_an_unusable_library(self):
        for name, source, sentence in [
            ("another major version", VERSION % 30100, r"\S+/wrong/libnccl.so.2 has version code 30100, but this "
             r"program, built with NCCL 2\.28\.9, needs 2\.14\.0 or a later 2\.x"),
            ("too old", VERSION % 21300, "has version code 21300"),
            ("before 2.9", VERSION % 2804, "has version code 2804"),
            ("another library", "int other;", r"\S+/wrong/libnccl.so.2 does not report a version"),
        ]:
            with self.subTest(name):
                self.check_refused(self.library_of(source), sentence if sentence[0] == "\\" else rf"\S+ {sentence}")

    def test_a_library_without_a_function(self):
        code, said = self.start(2, self.library_of(VERSION % 22809))
        self.assertEqual(code, 71, said)
        self.assertIn("rank 0: ncclGetUniqueId failed", said)


if __name__ == "__main__":
    unittest.main()

"""scripts/check_ptxas.py parses ptxas's report on each kernel: warnings for users, errors in the project's builds."""
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compiled(kernel, stack=0, stores=0, loads=0):
    """Returns the lines of ptxas -v about one kernel."""
    return (f"ptxas info    : Compiling entry function '{kernel}' for 'sm_90'\n"
            f"ptxas info    : Function properties for {kernel}\n"
            f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
            "ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem\n")


SERIALISED = ("ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
              "insufficient register resources for the wgmma pipeline in the function 'one'")
FINDINGS = [  # output of ptxas, part of the finding
    (compiled("_Z4goodv") + compiled("_Z3badv", stack=24, stores=16, loads=20),
     "bad for sm_90 spills 36 bytes of registers"),
    (compiled("_Z3badv", stack=32), "bad for sm_90 has a stack frame of 32 bytes"),
    (SERIALISED + "\n", "(C7512) Potential Performance Loss"),
    (SERIALISED.replace("C7512", "C7511") + "\n", "(C7511) Potential Performance Loss"),
]


class CheckPtxas(unittest.TestCase):
    def check(self, text, *flags):
        """Returns (exit code, stderr, table) for an output of ptxas."""
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder, "ptxas/table.tsv")
            result = subprocess.run([ROOT / "scripts/check_ptxas.py", *flags, table], input=text, capture_output=True,
                                    text=True)
            self.assertEqual(result.stdout, "")
            return result.returncode, result.stderr, table.read_text()

    def test_a_finding_is_a_warning_and_with_werror_an_error(self):
        for text, words in FINDINGS:
            with self.subTest(words):
                code, said, _ = self.check(text)
                self.assertEqual(code, 0)
                self.assertRegex(said, "^ptxas warning: ")
                self.assertIn(words, said)
                self.assertEqual(said.count("\n"), 1, said)
                code, said, _ = self.check(text, "--werror")
                self.assertEqual(code, 1)
                self.assertRegex(said, "^ptxas error: ")
                self.assertIn(words, said)

    def test_kernels_without_findings_print_nothing(self):
        text = compiled("_Z4goodv")
        self.assertEqual(self.check(text, "--werror"), (0, "", "good\tsm_90\t40\t0\t0\t1024\n"))

    def test_compiler_output_passes_through(self):
        self.assertEqual(self.check("norm.cu(3): warning: something\n", "--werror"),
                         (0, "norm.cu(3): warning: something\n", ""))


if __name__ == "__main__":
    unittest.main()

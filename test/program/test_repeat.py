"""dev/repeat_tests.py counts the one failure in four runs and keeps its output."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from trainer import ROOT

FLAKY = """
import os, sys
mine = next(n for n in range(9) if not os.path.exists(f"{sys.argv[1]}/{n}"))
open(f"{sys.argv[1]}/{mine}", "w").close()
print("the run with number", mine)
sys.exit(mine == 2)
"""


class Repeat(unittest.TestCase):
    def test_failures_are_counted_and_kept(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([ROOT / "dev/repeat_tests.py", "--times", "4", "--at-once", "1", "--loops", "1",
                                   "--out", Path(folder, "out"), sys.executable, "-c", FLAKY, folder],
                                  capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (1, ""))
            self.assertRegex(done.stdout, r"(?m)^run 3: exit code 1: .*run_3.txt$")
            self.assertRegex(done.stdout, r"(?m)^3 passed, 1 failed of 4; a run took [\d.]+ s \(median\)")
            self.assertEqual([path.name for path in Path(folder, "out").iterdir()], ["run_3.txt"])
            self.assertEqual(Path(folder, "out/run_3.txt").read_text(), "the run with number 2\n")

    def test_runs_that_were_not_started_are_not_a_success(self):
        for seconds, started in (("2", 1), ("0", 0)):
            with self.subTest(seconds=seconds):
                done = subprocess.run([ROOT / "dev/repeat_tests.py", "--times", "3", "--at-once", "1", "--loops", "0",
                                       "--seconds", seconds, "sleep", "2.5"], capture_output=True, text=True,
                                      check=False, timeout=60)
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                self.assertRegex(done.stdout, rf"^{started} passed, 0 failed of 3; ")


if __name__ == "__main__":
    unittest.main()

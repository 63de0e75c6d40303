"""dev/side_by_side.py detects builds that compute different bits, without false alarms."""
import subprocess
import sys

from trainer import ROOT, TRAINER, TrainerTest

SCRIPT = ROOT / "dev/side_by_side.py"


class SideBySide(TrainerTest):
    def compare(self, other):
        result = subprocess.run([sys.executable, SCRIPT, "bits", TRAINER, other, "--precisions", "bf16", "--levels",
                                 "block", "--stages"], capture_output=True, text=True, timeout=100)
        self.assertEqual(result.stderr, "")
        return result.returncode, result.stdout

    def test_the_same_program(self):
        self.assertEqual(self.compare(TRAINER), (0, "1 runs of 20 steps compared, 0 differ\n"))

    def test_a_program_with_different_rounding(self):
        """The other program uses a different epsilon in AdamW."""
        other = self.dir / "train_gpt_cpu"
        other.write_text(f'#!/bin/sh\nexec {TRAINER} "$@" --set optim.eps=1.0000001e-8\n')
        other.chmod(0o755)
        code, said = self.compare(other)
        self.assertEqual(code, 1)
        self.assertIn("bf16 recompute block ranks 1 ZeRO 0: same losses, norms, state: [", said)
        self.assertIn("1 runs of 20 steps compared, 1 differ\n", said)

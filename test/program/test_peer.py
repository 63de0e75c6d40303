"""dev/peer_torch.py with stand-ins for PyTorch and train_gpt's benchmark: it keeps results if one of them fails."""
import json
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from trainer import ROOT

VERSION = """echo '{"version": "2.9.0", "device_name": "a GPU"}'"""
EAGER = """echo '{"eager_ms": 40.0, "steps": 7}'"""
COMPILED = """echo '{"compiled_ms": 20.0, "steps": 9}'"""
BENCH = """
echo "ours $*" >> "$(dirname "$0")/calls"
while [ $# != 0 ]; do [ "$1" = --json ] && file=$2; shift; done
echo '{"results": [{"step_ms": 10.0, "batch": 1}]}' > "$file"
"""


class Peer(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        self.tool("bench", BENCH)
        self.torch(VERSION, EAGER, COMPILED)

    def tool(self, name, text):
        (self.dir / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.dir / name).chmod(0o755)

    def torch(self, *lines):
        """Writes the stand-in for PyTorch's process."""
        self.tool("python", "\n".join(['echo "torch $2" >> "$(dirname "$0")/calls"', *lines]))

    def command(self, *args):
        return [ROOT / "dev/peer_torch.py", "bf16", "--workload", "tiny", "--against", self.dir / "bench", "--python",
                self.dir / "python", "--json", self.dir / "peer.json", *map(str, args)]

    def run_peer(self, *args, expect=0):
        """Returns the row and the output."""
        result = subprocess.run(self.command(*args), capture_output=True, text=True, timeout=120)
        said = result.stdout + result.stderr
        self.assertNotIn("Traceback", said)
        self.assertEqual(result.returncode, expect, said)
        return self.report()["rows"][0], said

    def report(self):
        return json.loads((self.dir / "peer.json").read_text())

    def calls(self):
        return [line.split()[0] for line in (self.dir / "calls").read_text().splitlines()]

    def test_ours_before_and_after(self):
        row, said = self.run_peer()
        self.assertEqual(self.calls(), ["ours", "torch", "ours"])
        self.assertEqual((self.report()["torch"], self.report()["device"]), ("2.9.0", "a GPU"))
        self.assertEqual(row, {"workload": "tiny", "precision": "bf16", "batch": 1, "seq_len": 16,
                               "ours_ms": [10.0, 10.0], "ratio": 2.0,
                               "torch": {"eager_ms": 40.0, "compiled_ms": 20.0, "step_ms": 20.0, "compiled": True,
                                         "steps": 9}})
        self.assertIn("PyTorch eager 40.0, compiled 20.0 ms a step: 2.000 times as long", said)
        job = json.loads((self.dir / "calls").read_text().splitlines()[1].split(" ", 1)[1])
        self.assertEqual((job["batch"], job["seq_len"], job["precision"]), (1, 16, "bf16"))  # train_gpt's batch

    def test_a_slow_compiler_keeps_the_eager_result(self):
        self.torch(VERSION, EAGER, 'sleep 1000 & echo $! > "$(dirname "$0")/pid"; wait')
        row, _ = self.run_peer("--seconds", 12)
        self.assertEqual((row["torch"]["step_ms"], row["torch"]["compiled"], row["ratio"]), (40.0, False, 4.0))
        self.assertIn("ended after", row["torch"]["error"])
        self.assertEqual(len(row["ours_ms"]), 2)
        self.assert_is_gone()

    def test_a_failing_compiler_keeps_the_eager_result(self):
        self.torch(VERSION, EAGER, """echo '{"compiled_error": "no compiler"}'""")
        row, _ = self.run_peer()
        self.assertEqual((row["torch"]["step_ms"], row["torch"]["compiled"]), (40.0, False))
        self.assertEqual(row["torch"]["compiled_error"], "no compiler")

    def test_a_crash_is_reported(self):
        self.torch(VERSION, EAGER, "echo out of luck", "exit 7")
        row, said = self.run_peer()
        self.assertEqual(row["torch"]["step_ms"], 40.0)
        self.assertEqual(row["torch"]["error"], "exit code 7: out of luck")
        self.assertIn("out of luck", said)

    def test_no_pytorch(self):
        self.torch("echo \"ModuleNotFoundError: No module named 'torch'\"", "exit 1")
        row, _ = self.run_peer(expect=1)
        self.assertIn("No module named 'torch'", row["torch"]["error"])
        self.assertEqual(row["ours_ms"], [10.0, 10.0])
        (self.dir / "python").unlink()
        row, _ = self.run_peer(expect=1)
        self.assertIn("No such file", row["torch"]["error"])

    def test_no_bench_of_ours(self):
        (self.dir / "bench").unlink()
        row, _ = self.run_peer()
        self.assertEqual((row["ours_ms"], row["torch"]["step_ms"]), ([], 20.0))
        self.assertIn("No such file", row["ours_error"])
        self.assertNotIn("ratio", row)

    def test_a_bench_that_fails_or_hangs(self):
        for text, reason in (("echo no GPU; exit 71", "no GPU"), ("echo '{}' > $8", "results"),
                             ("exec sleep 1000", "ended after")):
            with self.subTest(text):
                self.tool("bench", text)
                row, _ = self.run_peer("--seconds", 24)  # a third for bench, so PyTorch has time on busy cores
                self.assertEqual((row["ours_ms"], row["torch"]["step_ms"]), ([], 20.0))
                self.assertIn(reason, row["ours_error"])

    def test_a_kill_keeps_measurements_and_leaves_no_process(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self.subTest(number):
                (self.dir / "peer.json").unlink(missing_ok=True)
                (self.dir / "pid").unlink(missing_ok=True)
                self.torch(VERSION, EAGER, 'echo $$ > "$(dirname "$0")/pid"; exec sleep 1000')
                process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL)
                self.addCleanup(process.wait)
                self.addCleanup(process.kill)
                self.wait_until(lambda: (self.dir / "pid").exists() and "eager_ms" in self.report()["rows"][0]["torch"])
                process.send_signal(number)
                process.wait(timeout=60)
                self.assertEqual(self.report()["rows"][0]["torch"]["eager_ms"], 40.0)
                self.assert_is_gone()

    def wait_until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline, "the condition did not become true")
            time.sleep(0.05)

    def assert_is_gone(self):
        pid = int((self.dir / "pid").read_text())

        def is_gone():
            try:
                os.kill(pid, 0)
                return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except (ProcessLookupError, FileNotFoundError):
                return True
        self.wait_until(is_gone)


if __name__ == "__main__":
    unittest.main()

"""Memory and threads: failing allocations and thread creation, and resource usage for large inputs."""
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, ROOT, TRAINER, TrainerTest

OS, OK = 71, 0
# A process's peak includes its parent's memory at the start, and this process has more than the trainer.
MEASURE = """import os, sys
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
print(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))"""


def printable_bytes():
    """Returns the bytes in GPT-2's order."""
    prints = [*range(33, 127), *range(0xa1, 0xad), *range(0xae, 256)]
    return prints + [byte for byte in range(256) if byte not in prints]


def long_llmc_tokens(least_bytes):
    """Returns tokens of up to 255 bytes; each is an earlier token and a letter."""
    letters, chains = random.Random(1), []
    for first in range(128, 256):
        for second in range(97, 123):
            token = bytes([first, second])
            while len(token) <= 255 and least_bytes > 0:
                chains.append(token)
                least_bytes -= len(token) + 1
                token += bytes([letters.randrange(97, 123)])
    return [bytes([byte]) for byte in printable_bytes()] + sorted(chains, key=len) + [b"<|endoftext|>"]


class RefusedCalls(TrainerTest):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.library = Path(cls.folder.name, "refuse.so")
        subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", cls.library,
                        ROOT / "test/program/refuse.cpp", "-ldl"], check=True)

    def train_refused(self, refuse, *arguments):
        """Returns the exit code and stderr of a short run with refused calls."""
        config = self.write_config(train_max_steps=2, checkpoint_every_steps=1, log_tensorboard=True)
        result = subprocess.run([TRAINER, config, "--fresh", *arguments], cwd=self.dir, capture_output=True, text=True,
                                errors="replace", timeout=120, env={**ENVIRONMENT, "OMP_NUM_THREADS": "3",
                                "LD_PRELOAD": str(self.library), "REFUSE": refuse, "COUNT_CALLS": "1"})
        return result.returncode, result.stderr

    def check_end(self, code, said, refuse):
        """The run exits with a message and the code for refused resources, or succeeds without the resource."""
        with self.subTest(refuse):
            if "Fatal glibc error" in said:  # glibc itself ran out of memory
                return
            self.assertIn(code, (OK, OS), said)
            if code == OS:
                self.assertRegex(said, r"(?m)^train_gpt\w*: [^\n]{10,}$")

    def test_failing_allocations_end_the_run_with_a_message(self):
        code, said = self.train_refused("allocation:0")
        self.assertEqual(code, OK, said)
        calls = int(re.search(r"(\d+) calls", said)[1])
        self.assertGreater(calls, 10_000)
        points = random.Random(7).sample(range(1_000, calls), 30)  # after the libraries' calls before main()
        for number, point in enumerate(points):
            refuse = f"allocation:{point}{'+' if number % 2 else ''}"
            self.check_end(*self.train_refused(refuse), refuse)

    def test_a_thread_that_cannot_start_ends_the_run_with_a_message(self):
        code, said = self.train_refused("thread:0")
        self.assertEqual(code, OK, said)
        calls = int(re.search(r"(\d+) calls", said)[1])
        self.assertGreaterEqual(calls, 4)  # progress, prefetching, two in the pool
        refused = 0
        for call in range(1, calls + 1):
            for refuse in (f"thread:{call}", f"thread:{call}+"):
                code, said = self.train_refused(refuse)
                self.check_end(code, said, refuse)
                refused += code == OS
        self.assertGreater(refused, calls)


class LargeInputs(TrainerTest):
    def resources_of(self, *arguments):
        """Runs a command that must succeed; returns its peak resident bytes and CPU seconds."""
        result = subprocess.run([sys.executable, "-S", "-E", "-c", MEASURE, TRAINER, *map(str, arguments)],
                                cwd=self.dir, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, OK, result.stderr)
        peak, seconds = result.stderr.split()[-2:]
        return int(peak), float(seconds)

    def test_memory_for_a_tokenizer_file_is_proportional_to_its_size(self):
        vocabulary = json.loads((ROOT / "data/gpt2/vocab.json").read_text("utf-8"))
        merges = (ROOT / "data/gpt2/merges.txt").read_text("utf-8").splitlines()[1:]
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", "0", "text.txt", "--out", "empty")
        file = json.loads((self.dir / "empty/tokenizer.json").read_text())
        file["added_tokens"][0]["id"] = vocabulary["<|endoftext|>"]
        file["model"] |= {"vocab": vocabulary, "merges": merges}
        path = self.dir / "tokenizer.json"
        path.write_text(json.dumps(file, ensure_ascii=False), "utf-8")
        beside, _ = self.resources_of("inspect", "empty/tokenizer.json")
        peak, _ = self.resources_of("inspect", path)
        self.assertLess((peak - beside) / path.stat().st_size, 13)

    def test_long_llmc_tokens_load_in_linear_time(self):
        tokens = long_llmc_tokens(2_000_000)
        header = struct.pack("<4i", 20240328, 2, len(tokens), len(tokens) - 1).ljust(1024, b"\0")
        path = self.dir / "gpt2_tokenizer.bin"
        path.write_bytes(header + b"".join(bytes([len(token)]) + token for token in tokens))
        _, seconds = self.resources_of("inspect", path)
        self.assertLess(seconds, 1.5)

    def test_the_plan_of_a_huge_model_takes_little_memory(self):
        config = self.write_config(model_n_layer=2000, model_n_head=512, model_n_embd=65_536,
                                   train_total_batch_tokens=480)
        peak, _ = self.resources_of("plan", config, "--gpus", "8")
        self.assertLess(peak, 200 << 20)
        said = self.run_trainer("plan", config)
        self.assertIn("optimizer state", said)


if __name__ == "__main__":
    unittest.main()

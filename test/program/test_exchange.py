"""exchange() of kernels/comm.h with 1 to 4 ranks: on CPUs with MPI, and on simulated GPUs with a stand-in for NCCL. The
program exchange.cpp compares every byte. Wrong messages and lost ranks are reported in time."""
import shutil
import subprocess
import tempfile
import time
import unittest

from test_ranks import MPI_ENVIRONMENT
from trainer import ROOT

LIMIT = 40  # seconds until a fault is reported on a busy machine


class Exchange(unittest.TestCase):
    """With simulated GPUs."""
    program = ROOT / "build/exchange_simt"
    internal = (71, 76)  # exit codes of ranks that the library finds to disagree, and of the others

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = folder.name

    def exchange(self, ranks, *arguments, codes=(0,)):
        """Requires an end in time with one of these codes; returns the output."""
        started = time.monotonic()
        result = subprocess.run([self.program, "--nproc", str(ranks), *map(str, arguments)], cwd=self.dir, text=True,
                                capture_output=True, timeout=170, env={**MPI_ENVIRONMENT, "OMP_NUM_THREADS": "1"})
        said = result.stdout + result.stderr
        self.assertIn(result.returncode, codes, said)
        if codes != (0,):
            self.assertLess(time.monotonic() - started, LIMIT, said)
        return said

    def test_every_pattern(self):
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks):
                self.exchange(ranks, "patterns")

    def test_large_messages(self):
        self.exchange(2, "parts")

    def sentence_of_sizes(self, sent, wanted):
        return rf"rank 1 waits for {wanted} elements of type 1 from rank 0, which sends {sent} of type 1"

    def test_messages_of_unequal_sizes_are_reported(self):
        part = 64 << 20
        for sent, wanted in ((4000, 3000), (3000, 4000), (8000000, 4000000), (4000000, 8000000), (2 * part, part),
                             (part, 2 * part), (part, part + 1)):
            with self.subTest(sent=sent, wanted=wanted):
                said = self.exchange(2, "sizes", sent, wanted, codes=self.internal)
                self.assertRegex(said, self.sentence_of_sizes(sent, wanted))

    def test_a_missing_message_is_reported(self):
        said = self.exchange(3, "missing", codes=self.internal)
        self.assertRegex(said, r"rank 1 has messages from or to rank 0, which has gone on to ncclAllReduce")

    def test_a_surplus_message_is_reported(self):
        said = self.exchange(3, "surplus", codes=self.internal)
        self.assertRegex(said, r"rank 0 has messages from or to rank 1, which has gone on to ncclAllReduce")

    def test_a_rank_that_dies_is_reported(self):
        self.assertRegex(self.exchange(3, "dies", codes=(76, 128 + 9)), r"rank 1 on \S+ \(pid \d+\) died")

    def test_a_rank_that_hangs_is_reported(self):
        said = self.exchange(3, "stops", codes=(80,))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) hangs: .*; others have reached collective \d+ \(exchange\)")


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class MpiExchange(Exchange):
    """With CPUs."""
    program = ROOT / "build/exchange_cpu"
    internal = (70, 76)

    def sentence_of_sizes(self, sent, wanted):
        return rf"rank 1 expects {wanted} bytes from rank 0, which sends {sent if sent < wanted else 'more'}\b"

    def test_a_missing_message_is_reported(self):
        said = self.exchange(3, "missing", codes=(80,))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) hangs: .* last collective \d+ \(exchange\)")

    def test_a_surplus_message_is_reported(self):
        """MPI has sent it and does not report it, but the next exchange must not receive it."""
        self.exchange(3, "surplus")

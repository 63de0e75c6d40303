"""exchange(), split() and reduce_scatter_sum() of kernels/comm.h: on CPUs with MPI, and on simulated GPUs with a
stand-in for NCCL. The program exchange.cpp compares every byte. Wrong messages and lost ranks are reported in time."""
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

    def exchange(self, ranks, *arguments, codes=(0,), environment=()):
        """Requires an end in time with one of these codes; returns the output."""
        started = time.monotonic()
        result = subprocess.run([self.program, "--nproc", str(ranks), *map(str, arguments)], cwd=self.dir, text=True,
                                capture_output=True, timeout=170,
                                env={**MPI_ENVIRONMENT, "OMP_NUM_THREADS": "1", **dict(environment)})
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

    def test_groups(self):
        for ranks in (1, 2, 3, 4, 6):
            with self.subTest(ranks=ranks):
                self.exchange(ranks, "groups", *["tree"] * (ranks in (3, 4)))

    def test_sums(self):
        for ranks in (1, 2, 3, 4):
            for order in ([], ["tree"]):
                with self.subTest(ranks=ranks, order=order):
                    self.exchange(ranks, "sums", *order)

    def test_a_failure_ends_the_groups(self):
        said = self.exchange(2, "fails", codes=(71, 76), environment={"STAND_IN_NCCL": "fail 5 0"})
        self.assertIn("rank 0: ncclAllReduce failed in all_reduce_sum (collective 2)", said)

    def test_a_failed_split_is_reported(self):
        """Groups connect with ids if the library has no ncclCommSplit."""
        for version, action, call, reason in (
                ("21700", "fail", 3, "ncclGetUniqueId"), ("21700", "late", 4, "ncclCommInitRankConfig"),
                ("21800", "fail", 3, "ncclCommSplit"), ("21800", "late", 3, "ncclCommSplit")):
            with self.subTest(call=reason, action=action):
                said = self.exchange(2, "groups", codes=(70, 71, 76), environment={
                    "STAND_IN_NCCL": f"{action} {call} 0", "STAND_IN_NCCL_VERSION": version})
                self.assertIn(f"rank 0: {reason} failed", said)

    def test_a_rank_that_dies_in_a_group_is_reported(self):
        said = self.exchange(4, "dies", "group", codes=(76, 128 + 9))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) died")

    def test_a_rank_that_hangs_in_a_group_is_reported(self):
        said = self.exchange(4, "stops", "group", codes=(80,))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) hangs")

    def test_a_rank_that_dies_is_reported(self):
        self.assertRegex(self.exchange(3, "dies", codes=(76, 128 + 9)), r"rank 1 on \S+ \(pid \d+\) died")

    def test_a_rank_that_hangs_is_reported(self):
        said = self.exchange(3, "stops", codes=(80,))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) hangs: .*; others have reached collective \d+ \(exchange\)")

    def test_a_stage_that_hangs_is_reported(self):
        said = self.exchange(3, "stages", codes=(80,))
        self.assertRegex(said, r"rank 1 \(data 0, pipeline 1\) on \S+ \(pid \d+\) hangs: .*; others wait for a "
                               r"collective, and it does not")


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class MpiExchange(Exchange):
    """With CPUs."""
    program = ROOT / "build/exchange_cpu"
    internal = (70, 76)

    def sentence_of_sizes(self, sent, wanted):
        return rf"rank 1 expects {wanted} bytes from rank 0, which sends {sent if sent < wanted else 'more'}\b"

    test_a_failure_ends_the_groups = test_a_failed_split_is_reported = None  # of NCCL

    def test_groups_in_any_order(self):
        self.exchange(4, "crossed")

    def test_a_missing_message_is_reported(self):
        said = self.exchange(3, "missing", codes=(80,))
        self.assertRegex(said, r"rank 1 on \S+ \(pid \d+\) hangs: .* last collective \d+ \(exchange\)")

    def test_a_surplus_message_is_reported(self):
        """MPI has sent it and does not report it, but the next exchange must not receive it."""
        self.exchange(3, "surplus")

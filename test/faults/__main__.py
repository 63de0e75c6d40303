"""Campaigns: faults are injected into runs of the trainer; python3 test/faults [--long] [--seed N] [NAME...]

Without --long a sample of each campaign in a few minutes; with it every case, for hours, and a campaign that is not
possible here counts as failed. A NAME is like test_kills.Kills.test_a_start. Sums up in Catch2's words, which
scripts/test.sh reads.
"""
import argparse
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

from campaign import OPTIONS, have_private_mounts

parser = argparse.ArgumentParser(prog="python3 test/faults")
parser.add_argument("--long", action="store_true", help="every case instead of a sample")
parser.add_argument("--seed", type=int, default=1, help="of the samples and of random faults")
parser.add_argument("names", nargs="*", metavar="NAME", help="file, class or test")
arguments = parser.parse_args()
OPTIONS.update(long=arguments.long, seed=arguments.seed)
print(f"seed {arguments.seed}", flush=True)
have_private_mounts()
memory = Path("/dev/shm")  # where fsync takes no time
if memory.is_dir() and shutil.disk_usage(memory).free > 2**30:
    tempfile.tempdir = str(memory)

loader = unittest.TestLoader()
tests = loader.loadTestsFromNames(arguments.names) if arguments.names else loader.discover(Path(__file__).parent)
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(tests)
for test, reason in result.skipped:
    print(f"skipped: {test}: {reason}")
failed = len({getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors})  # not subtests
failed += len(result.skipped) if arguments.long else 0
passed = result.testsRun - failed - (0 if arguments.long else len(result.skipped))
print(f"test cases: {result.testsRun} | {passed} passed | {failed} failed")
sys.exit(failed != 0)

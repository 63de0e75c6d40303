"""Fault-injection campaigns on training runs: python3 test/faults [--long] [--seed N] [NAME...]

By default, runs a sample of each campaign in a few minutes. --long runs every case, which takes hours, and counts a
campaign that cannot run on this machine as failed. A NAME is, for example, test_kills.Kills.test_a_start. The last line
is a summary in Catch2's format, which scripts/test.sh parses.
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
parser.add_argument("--seed", type=int, default=1, help="seed for the samples and random faults")
parser.add_argument("names", nargs="*", metavar="NAME", help="file, class or test to run")
arguments = parser.parse_args()
OPTIONS.update(long=arguments.long, seed=arguments.seed)
print(f"seed {arguments.seed}", flush=True)
have_private_mounts()
memory = Path("/dev/shm")  # fsync takes no time there
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

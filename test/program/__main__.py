"""Runs every test of this folder: python3 test/program

With arguments, runs only the named tests: python3 test/program test_house.House.test_each_rule_fires
An argument with wildcards names files: python3 test/program 'test_[r-z]*'
--failfast stops after the first failure. The last lines are the slowest tests, with their processor time, and a summary
in Catch2's format, which scripts/test.sh parses.
"""
import os
import sys
import time
import unittest
from pathlib import Path


def clocks():
    """Returns the seconds since the start: of the clock, and of the processor for this process and its children."""
    return time.monotonic(), sum(os.times()[:4])


class TimedResult(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds = {}

    def startTest(self, test):
        self.started = clocks()
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        self.seconds[test.id()] = [now - before for now, before in zip(clocks(), self.started)]


loader = unittest.TestLoader()
names = [argument for argument in sys.argv[1:] if argument != "--failfast"]
tests = unittest.TestSuite(loader.discover(Path(__file__).parent, f"{name}.py") if "*" in name else
                           loader.loadTestsFromName(name) for name in names or ["test_*"])
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, failfast="--failfast" in sys.argv,
                                 resultclass=TimedResult).run(tests)
for test, reason in result.skipped:
    print(f"skipped: {test}: {reason}")
for test, (seconds, processor) in sorted(result.seconds.items(), key=lambda item: -item[1][1])[:20]:
    print(f"{seconds:.0f} s, {processor:.0f} s of processor time: {test}")
failed = len({getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors})  # not subtests
passed = result.testsRun - failed - len(result.skipped)
print(f"test cases: {result.testsRun} | {passed} passed | {failed} failed")
sys.exit(failed != 0)

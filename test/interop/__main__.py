"""Runs the tests of this folder against the real counterparts from PyPI (make interop): python3 test/interop [NAMES]"""
import sys
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "program"))  # trainer.py and the readers

loader = unittest.TestLoader()
names = sys.argv[1:]
tests = loader.loadTestsFromNames(names) if names else loader.discover(Path(__file__).parent)
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(tests)
sys.exit(not result.wasSuccessful())

"""The instruction probes: every wrapper has one, every group runs, and results are compared word by word."""
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from trainer import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_stages  # noqa: E402

SIMULATED = ROOT / "build/ptx_probe_simt"

WITHOUT_PROBE = {
    # The two halves of wgmma, which is probed with both types.
    "wgmma_bf16", "wgmma_f16",
}


def wrappers_without_probe(headers, probes):
    wrappers = re.findall(r"(?:\bPTX|__device__ __forceinline__) \w+ (\w+)\(", headers)
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", probes)
    unused = [kernel for kernel in kernels if len(re.findall(rf"\b{kernel}\b", probes)) < 2]
    without = [name for name in dict.fromkeys(wrappers) if not re.search(rf"\bptx::{name}\b", probes)]
    return [name for name in without if name not in WITHOUT_PROBE] + unused


class Completeness(unittest.TestCase):
    def setUp(self):
        self.headers = "".join(path.read_text() for path in (ROOT / "kernels/cuda").glob("ptx*.cuh"))
        self.probes = "".join(path.read_text() for path in (ROOT / "test/ptx_probe").glob("*.cu"))

    def test_every_wrapper_has_a_probe(self):
        self.assertIn("mma_m16n8k16", self.headers)
        self.assertEqual(wrappers_without_probe(self.headers, self.probes), [])

    def test_an_unused_wrapper_or_kernel_is_found(self):
        self.assertEqual(wrappers_without_probe(self.headers + "template <int k> PTX uint32_t fresh(int x) {}\n",
                                                self.probes + "__global__ void idle_kernel(ProbeArgs op) {}\n"),
                         ["fresh", "idle_kernel"])

    def test_every_group_is_a_stage(self):
        listed = subprocess.run([SIMULATED, "--list"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(listed, "".join(f"{group} {architecture}\n"
                                         for architecture, groups in gpu_stages.PROBE_GROUPS.items()
                                         for group in groups))

    def test_the_groups_together_are_all_probes(self):
        groups = [group for groups in gpu_stages.PROBE_GROUPS.values() for group in groups]
        whole = subprocess.run([SIMULATED], capture_output=True, text=True, check=True).stdout
        parts = [subprocess.run([SIMULATED, group], capture_output=True, text=True, check=True).stdout
                 for group in groups]
        self.assertEqual("".join(parts), whole)
        wrappers = [line.split()[0] for line in whole.splitlines()]
        self.assertEqual(len(wrappers), len(set(wrappers)))
        self.assertGreaterEqual(len(wrappers), 56)

    def test_an_unknown_group(self):
        result = subprocess.run([SIMULATED, "nothing"], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 64)
        self.assertIn("nothing is not a group of probes", result.stderr)


class Comparison(unittest.TestCase):
    """gpu_probe.py with a stand-in for the GPU's program, against the simulator."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)

    def compare(self, script, expect, group="fragments"):
        """Returns the output and figures of gpu_probe.py, with a shell script as the GPU's program."""
        actual = self.dir / "ptx_probe_cuda"
        actual.write_text(f"#!/usr/bin/env bash\nsimulated={SIMULATED}\n{script}\n")
        actual.chmod(0o755)
        result = subprocess.run([sys.executable, ROOT / "scripts/gpu_probe.py", "--expected", SIMULATED, "--actual",
                                 actual, "--json", self.dir / "probe.json", group], capture_output=True, text=True,
                                timeout=120, check=False)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout, json.loads((self.dir / "probe.json").read_text())

    def reading(self):
        place = gpu_stages.Place(ROOT, ROOT / "build", self.dir, None, "9.0")
        return gpu_stages.read_probe(place, gpu_stages.Stage("probe", 1, (), None, None), "")

    def test_equal_words(self):
        said, figures = self.compare('exec "$simulated" "$@"', 0)
        self.assertEqual([probe["name"] for probe in figures["probes"]], figures["expected"])
        self.assertEqual(len(figures["probes"]), 5)
        self.assertRegex(said, r"ldmatrix_x4<true>: 128 words, crc [0-9a-f]{8}, equal\n")
        self.assertLess(len(said), 2000)
        self.assertTrue(self.reading().good)

    def test_other_words(self):
        said, figures = self.compare('"$simulated" "$@" | sed "/^ldmatrix_x4<false>/s/.$/x/"', 1)
        self.assertEqual([probe["name"] for probe in figures["probes"] if probe["differences"]], ["ldmatrix_x4<false>"])
        self.assertRegex(said, r"word 127: expected [0-9a-f]{8}, got [0-9a-f]{7}x\n")
        self.assertFalse(self.reading().good)
        self.assertIn("unlike the twin: ldmatrix_x4<false>", self.reading().detail)

    def test_the_words_printed_are_limited(self):
        said, figures = self.compare('"$simulated" "$@" | sed -E "s/[0-9a-f]{8}/zzzzzzzz/g"', 1, "conversions")
        self.assertGreater(sum(probe["differences"] for probe in figures["probes"]), 50000)
        self.assertEqual(said.count("expected"), 200)

    def test_a_probe_that_is_missing(self):
        said, figures = self.compare('"$simulated" "$@" | head -n 4', 1)
        self.assertIn("not run: ldmatrix_x4<true>\n", said)
        self.assertFalse(self.reading().good)
        self.assertIn("not finished: ldmatrix_x4<true>", self.reading().detail)

    def test_a_crash_keeps_the_probes_before_it(self):
        _, figures = self.compare('"$simulated" "$@" | head -n 3; kill -SEGV $$', -11)
        self.assertEqual(len(figures["probes"]), 3)

    def test_an_error_of_the_program(self):
        said, figures = self.compare('"$simulated" "$@" | head -n 3; echo "no such device" >&2; exit 71', 71)
        self.assertEqual(len(figures["probes"]), 3)


if __name__ == "__main__":
    unittest.main()

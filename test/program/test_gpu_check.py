"""scripts/gpu_check.sh on a machine that is played by stand-ins, and the probe's completeness."""
import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

from test_scripts import Folder
from trainer import ROOT

TOOLS = ["bash", "cat", "cp", "cut", "date", "diff", "dirname", "env", "grep", "head", "mkdir", "nproc", "rm", "sed",
         "sleep", "sort", "tail", "tee", "timeout", "tr", "wc"]
ALL = ["build", "ops", "probe", "memcheck", "racecheck", "reference", "trainer", "bench", "peer"]

NVIDIA_SMI = """#!/bin/bash
case $* in
    *compute_cap*power*|*name*) echo "NVIDIA H200, 580.95, 143771 MiB, 9.0, 700.00 W" ;;
    *compute_cap*) echo 9.0 ;;
    *) exec sleep 100 ;;
esac
"""
MAKE = """#!/bin/bash
echo "make $*" >> "$HOME/calls"
mkdir -p build
for word in "$@"; do
    [[ $word != build/* ]] || cp "$HOME/programs/${word#build/}" build/ || code=2
done
exit ${code:-0}
"""
PYTHON = """#!/bin/bash
echo "python3 $* with ${TRAINER:-}" >> "$HOME/calls"
case $1 in
    -c) exit 0 ;;
    dev/peer_torch.py) echo '{"rows": [1]}' > "${@: -1}"; echo "ours 1.0 ms a step, PyTorch 1.2" ;;
    test/program) echo "test cases: 2 | 2 passed | 0 failed" ;;
esac
"""
PASSING = '#!/bin/bash\necho "test_cuda $*" >> "$HOME/calls"\necho "All tests passed (22 assertions in 6 test cases)"\n'
PROBE = '#!/bin/bash\nprintf "one 0 00000001\\none 1 00000002\\ntwo 0 00000003\\n"\n'
BENCH = """#!/bin/bash
echo "GPT-2 124M, bf16: 9.9 ms a step"
[ "$1" = --json ] && echo '{"results": []}' > "$2"
"""


class GpuCheck(Folder):
    def setUp(self):
        super().setUp()
        for tool in TOOLS:
            (self.home / "bin" / tool).symlink_to(shutil.which(tool))
        self.tool("nvidia-smi", NVIDIA_SMI)
        self.tool("nvcc", '#!/bin/bash\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
        self.tool("g++", '#!/bin/bash\necho "g++ 12.2.0"\n')
        self.tool("make", MAKE)
        self.tool("python3", PYTHON)
        self.tool("compute-sanitizer", '#!/bin/bash\necho "sanitizer $*" >> "$HOME/calls"\n')
        for name in ("train_gpt", "train_gpt_cpu"):
            self.tool(name, "#!/bin/bash\n", "programs")
        for name in ("ptx_probe_cuda", "ptx_probe_simt"):
            self.tool(name, PROBE, "programs")
        self.tool("test_cuda", PASSING, "programs")
        self.tool("bench_cuda", BENCH, "programs")

    def check(self, *args, expect=0):
        """Runs gpu_check.sh: what it said, and its stages' verdicts and details."""
        said = self.run_script("gpu_check.sh", *args, expect=expect)
        self.json = json.loads((self.repository / "build/gpu_check/check.json").read_text())
        self.assertEqual(self.json["passed"], expect == 0)
        self.details = {stage["name"]: stage["detail"] for stage in self.json["stages"]}
        return said, {stage["name"]: stage["verdict"] for stage in self.json["stages"]}

    def calls(self):
        return (self.home / "calls").read_text()

    def test_everything_passes(self):
        said, verdicts = self.check("--deps", "folder of deps")
        self.assertEqual(verdicts, dict.fromkeys(ALL, "passed"))
        self.assertRegex(said.splitlines()[-1], r"^gpu-check: passed in \d+ s$")
        table = (self.repository / "build/gpu_check/check.txt").read_text()
        self.assertTrue(said.endswith(table))
        self.assertIn("on NVIDIA H200, 580.95", table)
        self.assertEqual(self.json["gpu"], "NVIDIA H200, 580.95, 143771 MiB, 9.0, 700.00 W")
        self.assertEqual((self.json["toolkit"], self.json["bench"], self.json["peer"]),
                         ("13.0.88", {"results": []}, {"rows": [1]}))
        self.assertEqual(self.details["ops"], "All tests passed (22 assertions in 6 test cases)")
        self.assertEqual(self.details["probe"], "3 words, each as the twins give it")
        self.assertIn("ARCH=native DEPS=folder of deps build/train_gpt build/train_gpt_cpu", self.calls())
        for words in ("test_cuda [ops],[comm]\n", "test_cuda [model]\n", "--tool memcheck", "--tool racecheck",
                      "test/program gpu_trainer with build/train_gpt\n", "--against build/bench_cuda"):
            self.assertIn(words, self.calls())

    def test_a_stage_that_fails(self):
        self.tool("test_cuda", '#!/bin/bash\necho broken\necho "test cases: 9 | 8 passed | 1 \\"failed\\""\n'
                  '[ "$1" != "[ops],[comm]" ]\n', "programs")
        said, verdicts = self.check(expect=1)
        self.assertEqual(verdicts, dict.fromkeys(ALL, "passed") | {"ops": "failed"})
        self.assertEqual(self.details["ops"], "test cases: 9 | 8 passed | 1 failed")
        self.assertIn("the end of build/gpu_check/ops.log:\nbroken\n", said)
        self.assertRegex(said.splitlines()[-1], r"^gpu-check: NOT passed, \d+ s$")

    def test_a_build_that_fails_leaves_nothing_old_to_test(self):
        self.check()
        (self.home / "programs/test_cuda").unlink()
        _, verdicts = self.check(expect=1)
        self.assertEqual([name for name, verdict in verdicts.items() if verdict != "passed"],
                         ["build", "ops", "reference"])  # the sanitizer's stand-in starts nothing

    def test_a_stage_that_hangs(self):
        self.tool("test_cuda", '#!/bin/bash\n[ "$1" != "[model]" ] || { sleep 1000 & echo $! > "$HOME/pid"; wait; }\n',
                  "programs")
        start = time.monotonic()
        _, verdicts = self.check("--limit", "30", expect=1)
        self.assertLess(time.monotonic() - start, 30)
        self.assertEqual(verdicts, dict.fromkeys(ALL, "passed") | {"reference": "timed out"})
        self.assert_is_gone((self.home / "pid").read_text())

    def assert_is_gone(self, process):
        for _ in range(50):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                return
            if open(f"/proc/{int(process)}/stat").read().split(")")[1].split()[0] == "Z":
                return
            time.sleep(0.1)
        self.fail("the hanging program is still there")

    def test_no_time_left(self):
        self.tool("make", MAKE.replace("exit", "sleep 100; exit"))
        self.tool("test_cuda", "#!/bin/bash\nsleep 100\n", "programs")
        _, verdicts = self.check("--limit", "4", expect=1)
        self.assertEqual((verdicts["build"], verdicts["trainer"], verdicts["bench"]),
                         ("timed out", "no time", "no time"))

    def test_the_last_stage_gets_what_is_left(self):
        self.tool("make", MAKE.replace("exit", "sleep 100; exit"))
        self.tool("python3", PYTHON.replace("dev/peer_torch.py)", "dev/peer_torch.py) sleep 100;"))
        _, verdicts = self.check("--limit", "10", "build", "peer", expect=1)
        self.assertEqual(verdicts, dict.fromkeys(["build", "peer"], "timed out"))
        self.assertLessEqual(self.json["stages"][1]["seconds"], 5)

    def test_an_instruction_that_gives_something_else(self):
        self.tool("ptx_probe_cuda", PROBE.replace("00000003", "00000004"), "programs")
        said, verdicts = self.check("build", "probe", expect=1)
        self.assertEqual(verdicts, {"build": "passed", "probe": "failed"})
        self.assertEqual(self.details["probe"], "unlike its twin: two")
        self.assertIn("< two 0 00000003\n", said)

    def test_no_gpu(self):
        self.tool("nvidia-smi", '#!/bin/bash\necho "No devices were found"\nexit 6\n')
        self.assertIn("gpu-check: nvidia-smi finds no GPU: No devices were found",
                      self.run_script("gpu_check.sh", expect=69))
        (self.home / "bin/nvidia-smi").unlink()
        self.assertIn("this machine has no GPU driver", self.run_script("gpu_check.sh", expect=69))
        self.assertFalse((self.home / "calls").exists())

    def test_no_compiler(self):
        (self.home / "bin/g++").unlink()
        self.assertIn("g++ is not there", self.run_script("gpu_check.sh", expect=69))

    def test_no_torch_and_no_sanitizer(self):
        self.tool("python3", PYTHON.replace("-c) exit 0", "-c) exit 1"))
        (self.home / "bin/compute-sanitizer").unlink()
        said, verdicts = self.check()
        self.assertEqual(verdicts, dict.fromkeys(ALL, "passed") | dict.fromkeys(
            ["memcheck", "racecheck", "peer"], "not run"))
        self.assertIn("python3 has no torch with CUDA", said)

    def test_what_the_sanitizer_finds_fails(self):
        self.tool("compute-sanitizer", '#!/bin/bash\necho "ERROR SUMMARY: 1 error"\n[[ $* != *race* ]] || exit 9\n')
        _, verdicts = self.check(expect=1)
        self.assertEqual((verdicts["memcheck"], verdicts["racecheck"]), ("passed", "failed"))
        self.assertEqual(self.details["racecheck"], "ERROR SUMMARY: 1 error")

    def test_a_slower_peer_or_a_broken_one_is_no_failure_of_ours(self):
        self.tool("python3", PYTHON.replace("dev/peer_torch.py)", "dev/peer_torch.py) exit 3;"))
        _, verdicts = self.check()
        self.assertEqual(verdicts["peer"], "failed")

    def test_some_stages_elsewhere(self):
        said = self.run_script("gpu_check.sh", "--out", self.home / "results", "build", "bench")
        stages = json.loads((self.home / "results/check.json").read_text())["stages"]
        self.assertEqual([stage["name"] for stage in stages], ["build", "bench"])
        self.assertIn("GPT-2 124M, bf16: 9.9 ms a step\n", said)

    def test_wrong_arguments(self):
        for args in (["nonsense"], ["--limit", "soon"], ["--out"]):
            self.assertIn("usage", self.run_script("gpu_check.sh", *args, expect=64))

    def test_ctrl_c(self):
        self.tool("test_cuda", '#!/bin/bash\necho $$ > "$HOME/pid"\nexec sleep 1000\n', "programs")
        # A job in the background ignores SIGINT, and so would the script, whoever sends it.
        process = subprocess.Popen([self.repository / "scripts/gpu_check.sh"], stdout=subprocess.DEVNULL,
                                   env={"PATH": str(self.home / "bin"), "HOME": str(self.home)}, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        deadline = time.monotonic() + 30
        while not (self.home / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), 130)
        self.assert_is_gone((self.home / "pid").read_text())


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


class Probe(unittest.TestCase):
    def setUp(self):
        self.headers = "".join(path.read_text() for path in (ROOT / "kernels/cuda").glob("ptx*.cuh"))
        self.probes = "".join(path.read_text() for path in (ROOT / "test/ptx_probe").glob("*.cu"))

    def test_every_wrapper_has_a_probe(self):
        self.assertIn("mma_m16n8k16", self.headers)
        self.assertEqual(wrappers_without_probe(self.headers, self.probes), [])

    def test_a_wrapper_or_a_kernel_that_nobody_runs_is_found(self):
        self.assertEqual(wrappers_without_probe(self.headers + "template <int k> PTX uint32_t fresh(int x) {}\n",
                                                self.probes + "__global__ void idle_kernel(ProbeArgs op) {}\n"),
                         ["fresh", "idle_kernel"])


if __name__ == "__main__":
    unittest.main()

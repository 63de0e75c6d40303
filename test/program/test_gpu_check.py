"""scripts/gpu_check.py from an unpacked kit, with a stand-in for nvidia-smi: once with stand-ins for all programs, once
with the simulator's programs instead of the GPU's."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_stand_ins import (BENCH, LIBRARIES, MATMUL, NCU, NVIDIA_SMI, PASSING, PEER, SANITIZER,
                           TRAINER)
from test_gpu_runner import gone
from trainer import FROM_TERMINAL, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check  # noqa: E402
import gpu_runner  # noqa: E402
import gpu_stages  # noqa: E402

TOOLS = ["bash", "cat", "cp", "env", "head", "rm", "setsid", "sleep", "touch"]
PLACE = gpu_stages.Place(ROOT, ROOT / "build", ROOT, gpu_stages.cuda_libraries.Libraries(), "9.0")
FIRST_PROBES = ["probe_wgmma_sizes", "probe_wgmma_layouts", "probe_wgmma_registers", "probe_tensor_copies",
                "probe_tensor_multicast", "probe_tensor_swizzle"]
MEASURE = FIRST_PROBES + ["roofs", "ops", "kernels", "arch", "ops_tiny", "step_tiny", "matmul_tiny", "ncu_tiny",
                          "trainer_tiny", "step_tiny_b4", "step_tiny_tuned", "step_tiny_portable", "step_tiny_fp8",
                          "step_tiny_offload", "step_tiny_offload_all", "ops_tiny_portable", "step_tiny_queued",
                          "peer_tiny"]
PROBES = [f"probe_{group}" for group in gpu_stages.PROBE_GROUPS["sm_80"]] + [
    "probe_stmatrix", "probe_mbarrier", "probe_bulk", "probe_cluster", "probe_registers"]
PROVE = PROBES + ["reference", "curves", "resume", "comm"]
SANITIZE = [f"{tool}_{group}" for tool in ("memcheck", "racecheck") for group in gpu_stages.OP_GROUPS]


class Kit(unittest.TestCase):
    """An unpacked kit in a temporary folder, and a PATH with only the tools that the script may need."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.libraries = folder.name
        for name, source in LIBRARIES.items():
            subprocess.run(["g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c++", "-", "-o",
                            Path(folder.name, name)], input=f'extern "C" {{ {source} }}', text=True, check=True)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.home = Path(temporary.name)
        self.kit = self.home / "gpu_kit"
        for pattern in ("scripts/gpu_*.py", "scripts/cuda_libraries.py", "test/program/__main__.py",
                        "test/program/gpu_trainer.py", "test/program/trainer.py", "configs/*.json"):
            for path in ROOT.glob(pattern):
                target = self.kit / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        (self.kit / "test/recorded").mkdir()
        (self.kit / "test/recorded/torch").symlink_to(ROOT / "test/recorded/torch")
        finder = self.kit / "scripts/cuda_libraries.py"
        self.assertIn('"/usr/local/cuda*"', finder.read_text())
        finder.write_text(finder.read_text().replace("/usr/local/cuda*", str(self.home / "cuda*")))
        for name in TOOLS:
            self.tool(name, None)
        (self.home / "bin/python3").symlink_to(sys.executable)
        self.tool("nvidia-smi", NVIDIA_SMI)
        self.tool("compute-sanitizer", SANITIZER)
        self.tool("ncu", NCU)
        self.tool("dev/peer_torch.py", PEER, self.kit)
        self.tool("torch.py", "", self.home / "packages")

    def tool(self, name, text, folder=None):
        """Creates an executable; without text, links the machine's own."""
        path = (folder or self.home / "bin") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            return path.symlink_to(shutil.which(name))
        path.unlink(missing_ok=True)
        path.write_text(text)
        return path.chmod(0o755)

    def hide_torch(self):
        """Hides PyTorch even if this machine's python3 has it."""
        (self.home / "packages/sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')

    def program(self, name, text):
        self.tool(name, text, self.kit / "build")

    def environment(self):
        return {"PATH": str(self.home / "bin"), "HOME": str(self.home), "LD_LIBRARY_PATH": self.libraries,
                "PYTHONPATH": str(self.home / "packages"), "OMP_WAIT_POLICY": "passive"}

    def run_script(self, *args, expect=0, **environment):
        result = subprocess.run([self.kit / "scripts/gpu_check.py", *map(str, args)], capture_output=True, text=True,
                                env={**self.environment(), **environment}, timeout=3600, cwd=self.home, check=False)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def results(self, part, folder=None):
        """Checks the files of a part; returns its rows by name and its verdicts."""
        folder = (folder or self.kit / "build/gpu_check") / part
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["check.json", "check.txt", "logs.tgz"])
        self.assertLess((folder / "logs.tgz").stat().st_size, 12_000_000)
        self.table = (folder / "check.txt").read_text()
        self.assertLessEqual(len(self.table), 8000)
        with tarfile.open(folder / "logs.tgz") as tar:
            self.logs = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}
        self.json = json.loads((folder / "check.json").read_text())
        rows = {row["name"]: row for row in self.json["stages"]}
        return rows, {name: row["verdict"] for name, row in rows.items()}


class StandIns(Kit):
    """Tests the script alone: every program is a stand-in without function."""

    def setUp(self):
        super().setUp()
        self.tool("mkdir", None)
        self.program("test_cuda", PASSING)
        self.program("bench_cuda", BENCH)
        self.program("bench_matmul_cuda", MATMUL)
        for name in ("train_gpt", "train_gpt_cpu"):
            self.program(name, TRAINER)
        for name in ("ptx_probe_cuda", "ptx_probe_simt"):
            self.program(name, '#!/usr/bin/env bash\necho "$1 2 0000000100000002"\n')
        self.tool("test/program/__main__.py", 'import os, sys\nprint(sys.argv, os.environ["TRAINER"], os.environ["'
                  'CPU_TRAINER"])\nprint("test cases: 1 | 1 passed | 0 failed")\n', self.kit)

    def test_everything_passes(self):
        said = self.run_script("--workloads", "tiny")
        for part, stages in (("prove", PROVE), ("sanitize", SANITIZE), ("measure", MEASURE)):
            rows, verdicts = self.results(part)
            self.assertEqual(verdicts, dict.fromkeys(stages, "passed"))
            self.assertEqual(list(rows), stages)
            self.assertIn(self.table, said)
        self.assertTrue(self.json["passed"])
        self.assertEqual(self.json["gpu"]["name"], "NVIDIA H200")
        self.assertEqual((self.json["libraries"]["cuda"], self.json["libraries"]["cublas_lt"]), ("13.1", "13.1.0"))
        self.assertEqual(self.json["revision"], "0.1.0 (0123456789ab, 2026-11-22)")
        trained = rows["trainer_tiny"]["figures"]
        self.assertEqual((trained["tokens_per_s"], trained["power_w"], trained["throttle"]),
                         (25600, 650, ["sw_power_cap"]))
        self.assertEqual(trained["ops"], [{"name": "elementwise_update", "calls": 0.5, "ms": 2.0, "roof_ms": 0.0},
                                          {"name": "activation_forward", "calls": 1.0, "ms": 1.0, "roof_ms": 0.5}])
        kernel = rows["ncu_tiny"]["figures"]["kernels"][2]
        self.assertEqual([kernel[key] for key in ("name", "us", "tensor", "issue", "dram", "conflicts")],
                         ["attention_backward_key", 1.234, 61.5, 40.5, 25.5, 77])
        self.assertRegex(self.table, r"(?m)^  attention_backward_key +1.2 +61.5 +40.5 +25.5 +77$")
        self.assertEqual(rows["matmul_tiny"]["detail"], "1 GEMMs, 0 repeats of the chosen algorithms with other bits, "
                         "an excluded one faster for 1, the fastest ones 1.250 times as fast")
        for line in ("copy 4000 GB/s, bf16 GEMM 800.2 TFLOP/s", "  tiny       PyTorch", "SM clock"):
            self.assertIn(line, self.table)
        self.assertRegex(self.logs["clocks.csv"], r"\n0,1980,3201,690.25,66,4\n")
        calls = (self.home / "calls").read_text()
        for spec in ("[ops]", "[model]", "[comm]", gpu_stages.test_spec("activation")):
            self.assertIn(f"test_cuda {spec}\n", calls)
        self.results("prove")
        self.assertIn("gpu_trainer.GpuTrainer.test_loss_curves_follow_the_cpu'] "
                      f"{self.kit}/build/train_gpt {self.kit}/build/train_gpt_cpu", self.logs["curves.log"])

    def test_the_order_of_the_gpu_workloads(self):
        listed = [line.split() for line in self.run_script("--list").splitlines()]
        self.assertEqual([name for part, name, *_ in listed if part == "measure"], FIRST_PROBES + [
            "roofs", "ops", "kernels", "arch", "ops_124M", "step_124M", "matmul_124M", "step_llama-1.1B", "step_1558M",
            "ncu_124M", "trainer_124M", "ops_1558M", "step_124M_b32", "step_124M_b128", "step_124M_tuned",
            "step_124M_portable", "step_124M_fp8", "step_1558M_fp8", "step_1558M_offload", "step_1558M_offload_all",
            "ops_124M_portable", "step_124M_queued", "matmul_1558M", "step_1558M_b32", "peer_124M"])
        self.assertEqual([name for part, name, *_ in listed if part == "prove"], PROVE + ["peer_1558M"])

    def test_the_first_eight_minutes(self):
        """No stage may run beyond its planned end. PyTorch gets the time after the plan and what other stages do
        not use."""
        plans = {part: gpu_stages.stages_of(part, PLACE, gpu_stages.GPU_WORKLOADS) for part in gpu_stages.PARTS}
        usable = gpu_check.DEFAULT_LIMIT_S - gpu_runner.MARGIN_S
        for part, stages in plans.items():
            self.assertGreaterEqual(sum(stage.share for stage in stages), usable, part)  # no share is increased
            self.assertLessEqual(sum(stage.share for stage in stages), gpu_check.DEFAULT_LIMIT_S, part)
            self.assertFalse(any(stage.is_peer for stage in stages[:-1]), part)
        self.assertLessEqual(sum(stage.share for stage in plans["measure"][:-1]), 480)
        share = {stage.name: stage.share for stage in plans["measure"]}
        self.assertLessEqual(share["ncu_124M"], 60)
        self.assertEqual(gpu_stages.WORKLOADS["124M"].steps, 15)

    def test_selected_stages_with_other_folders(self):
        shutil.move(self.kit / "build", self.home / "programs")
        self.run_script("--out", "results", "--programs", "programs", "--stages", "probe,comm,roofs")
        _, verdicts = self.results("prove", self.home / "results")
        self.assertEqual(list(verdicts), PROBES + ["comm"])
        _, verdicts = self.results("measure", self.home / "results")
        self.assertEqual(verdicts, dict.fromkeys(FIRST_PROBES + ["roofs"], "passed"))
        self.assertFalse((self.home / "results/sanitize").exists())

    def test_stages_without_their_tools_are_not_run(self):
        """No PyTorch, NVIDIA tools or NCCL, and a GPU without the instructions of sm_90a."""
        self.hide_torch()
        (self.home / "bin/compute-sanitizer").unlink()
        (self.home / "bin/ncu").unlink()
        only = self.home / "libraries"
        shutil.copytree(self.libraries, only)
        (only / "libnccl.so.2").unlink()
        with open(self.kit / "scripts/cuda_libraries.py", "a") as finder:  # nor this machine's libraries
            finder.write("\n\nlibrary_cache, package_folders = dict, list\n")
        self.tool("nvidia-smi", NVIDIA_SMI.replace("9.0", "12.0"))
        self.run_script("--workloads", "tiny", "--stages", "roofs,ncu,peer,probe,comm,memcheck",
                        LD_LIBRARY_PATH=str(only))
        rows, verdicts = self.results("prove")
        self.assertEqual(verdicts, {name: "passed" if name.split("_", 1)[1] in gpu_stages.PROBE_GROUPS["sm_80"]
                                    else "not run" for name in PROBES} | {"comm": "not run"})
        self.assertIn("libnccl.so.2 (NCCL) was not found", rows["comm"]["detail"])
        self.assertTrue(self.json["passed"])
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, {**dict.fromkeys(FIRST_PROBES + ["ncu_tiny", "peer_tiny"], "not run"),
                                    "roofs": "passed"})
        self.assertIn("compute capability is 12.0", rows["probe_wgmma_sizes"]["detail"])
        self.assertIn("ncu is neither on PATH nor in a CUDA toolkit", rows["ncu_tiny"]["detail"])
        self.assertEqual(set(self.results("sanitize")[1].values()), {"not run"})

    def test_a_driver_that_does_not_let_ncu_read_counters(self):
        self.tool("ncu", NCU.replace("echo '==PROF== Connected to process 1'\n",
                                     "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'\n")
                  .replace('exec "$@"', "exit 1"))
        self.run_script("measure", "--workloads", "tiny", "--stages", "ncu")
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, {"ncu_tiny": "not run"})
        self.assertIn("ERR_NVGPUCTRPERM", rows["ncu_tiny"]["detail"])

    def test_failures_in_program_output(self):
        self.program("test_cuda", '#!/usr/bin/env bash\ncase $1 in "[comm]") echo "No tests ran" ;;\n'
                     '*) echo "-------------------------------------------------------------------------------"\n'
                     'echo "norm_forward - bf16"; echo "  deeper"\n'
                     'echo "-------------------------------------------------------------------------------"\n'
                     'echo "test cases:  9 |  8 passed | 1 failed"; exit 1 ;; esac\n')
        self.tool("compute-sanitizer", SANITIZER.replace("0 hazards displayed (0", "2 hazards displayed (2").replace(
            "========= ERROR SUMMARY: 0 errors", "========= Invalid __global__ write of size 4 bytes\n"
            "========= ERROR SUMMARY: 1 error").replace('"$@"', 'echo "All tests passed (1 in 1)"'))
        self.program("bench_matmul_cuda", MATMUL.replace('"mismatches": 0', '"mismatches": 3'))
        self.program("ptx_probe_cuda", '#!/usr/bin/env bash\necho "$1 2 0000000100000003"\n')
        stages = "ops,matmul,probe_copies,comm,memcheck_activation,racecheck_activation"
        self.run_script("--workloads", "tiny", "--stages", stages, expect=1)
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, {"ops": "failed", "ops_tiny": "passed", "matmul_tiny": "failed",
                                    "ops_tiny_portable": "passed"})
        self.assertEqual(rows["ops"]["detail"], "9 test cases, 8 passed, 1 failed: norm_forward - bf16")
        rows, verdicts = self.results("prove")
        self.assertEqual(verdicts, {"probe_copies": "failed", "comm": "failed"})
        self.assertEqual(rows["probe_copies"]["detail"], "1 probes, 2 words, unlike the twin: copies")
        rows, verdicts = self.results("sanitize")
        self.assertEqual(verdicts, {"memcheck_activation": "failed", "racecheck_activation": "failed"})
        self.assertIn("1 findings: Invalid __global__ write of size 4 bytes", rows["memcheck_activation"]["detail"])
        self.assertIn("2 hazards", rows["racecheck_activation"]["detail"])

    def test_no_gpu(self):
        self.tool("nvidia-smi", '#!/usr/bin/env bash\necho "No devices were found"\nexit 6\n')
        self.assertTrue(self.run_script(expect=69).endswith(
            "gpu_check: no GPU (nvidia-smi found no GPU: No devices were found); no other problems\n"))
        (self.home / "bin/nvidia-smi").unlink()
        self.assertTrue(self.run_script(expect=69).endswith(
            "gpu_check: no GPU (nvidia-smi is not installed); no other problems\n"))
        self.assertFalse((self.kit / "build/gpu_check").exists())

    def test_no_gpu_and_other_problems(self):
        (self.home / "bin/nvidia-smi").unlink()
        self.hide_torch()
        (self.kit / "build/test_cuda").unlink()
        self.program("bench_cuda", '#!/usr/bin/env bash\necho "libx.so: cannot open shared object" >&2; exit 127\n')
        (self.kit / "dev/peer_torch.py").unlink()
        said = self.run_script(expect=69)
        for text in (f"test_cuda is not in {self.kit}/build", f"dev/peer_torch.py is not in {self.kit}",
                     "bench_cuda does not start: libx.so: cannot open shared object",
                     "no GPU (nvidia-smi is not installed); 3 other problems"):
            self.assertIn(text, said)
        self.assertIn("optional: this python3 has no PyTorch", said)

    def test_no_cuda_libraries(self):
        finder = self.kit / "scripts/cuda_libraries.py"
        finder.write_text('def find():\n    return Libraries(missing=["libcublasLt.so.13 was not found"])\n\n\n'
                          + "class Libraries:\n    def __init__(self, missing=()):\n        self.missing = missing\n"
                          + "        self.optional_missing, self.paths, self.ld_library_path = [], {}, ''\n")
        self.assertEqual(self.run_script(expect=69), "gpu_check: libcublasLt.so.13 was not found\n")
        (self.home / "bin/nvidia-smi").unlink()
        self.assertIn("problem: libcublasLt.so.13 was not found\n", self.run_script(expect=69))

    def test_wrong_arguments(self):
        for args, words in ((["nonsense"], "'nonsense' is not a part: measure, prove, sanitize"),
                            (["--limit", "soon"], "--limit"), (["--limit", "0"], "--limit"), (["--out"], "--out"),
                            (["--nothing"], "--nothing"), (["--workloads", "13B"], "'13B' is not a workload"),
                            (["measure", "--stages", "comm"], "'comm' is not a stage of measure"),
                            (["--stages", ""], "'' is not a stage")):
            said = self.run_script(*args, expect=64)
            self.assertIn(words, said)
            self.assertIn("usage", said)

    def interrupt(self, number):
        self.program("test_cuda", '#!/usr/bin/env bash\nsetsid sleep 1000 &\necho $! $$ > "$HOME/pids.new"\n'
                     'mv "$HOME/pids.new" "$HOME/pids" || cp "$HOME/pids.new" "$HOME/pids"\nsleep 1000\n')
        process = subprocess.Popen([self.kit / "scripts/gpu_check.py", "--workloads", "tiny"], text=True,
                                   env=self.environment(), stdout=subprocess.PIPE, **FROM_TERMINAL)
        deadline = time.monotonic() + 120
        while not (self.home / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=120)[0]
        self.assertEqual(process.returncode, 128 + number)
        for pid in (self.home / "pids").read_text().split():
            self.assertTrue(gone(int(pid)))
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, {**dict.fromkeys(FIRST_PROBES + ["roofs"], "passed"), "ops": "interrupted"})
        self.assertTrue(said.endswith(self.table))
        self.assertFalse((self.kit / "build/gpu_check/prove").exists())
        self.assertIn("NOT passed: 7 passed, 1 interrupted", self.table)

    def test_ctrl_c(self):
        self.interrupt(signal.SIGINT)

    def test_sigterm(self):
        self.interrupt(signal.SIGTERM)

    def test_make(self):
        """make gpu-check builds for this GPU and forwards its variables."""
        said = subprocess.run(["make", "-n", "gpu-check", "PART=measure prove", "OUT=a b", "LIMIT=300", "STAGES=ops",
                               "BUILD=" + str(self.home / "build")], cwd=ROOT, capture_output=True, text=True,
                              check=False).stdout
        built = re.search(r"make -k .*ARCH=native (.*)", said)[1].split()
        self.assertEqual({Path(program).name for program in built},
                         {name for part in gpu_stages.PARTS for stage in gpu_stages.stages_of(part, PLACE, ["124M"])
                          for name in stage.programs})
        self.assertIn(f"scripts/gpu_check.py measure prove --programs {self.home}/build --out \"a b\" --limit 300",
                      said.replace("\\\n", " "))
        self.assertRegex(said, r"--stages ops\n")


class DryRun(Kit):
    """The simulator's programs instead of the GPU's, with a tiny workload. Slow parts are left out: most op tests, and
    loss curves, for which the CPU trainer stands in."""

    @classmethod
    def setUpClass(cls):
        """Uses the CUDA libraries of this machine if it has all of them; a machine without a compiler needs them."""
        found = gpu_stages.cuda_libraries.find()
        if found.missing or found.optional_missing:
            super().setUpClass()
        else:
            cls.libraries = found.ld_library_path

    def setUp(self):
        super().setUp()
        build = ROOT / "build"
        self.program("test_cuda", f'''#!/usr/bin/env bash
            case $1 in
                "[ops]") exec {build}/test_simt "[ops]fill*,[ops]add*" ;;
                "[model]") exec {build}/test_cpu "the model agrees with PyTorch: five steps of each optimizer" ;;
                "[arch]") exec {build}/test_simt "[arch]every*" ;;
                "[comm]") exec {build}/test_simt "one rank's collectives*" ;;
                *activation* | *fill*) exec {build}/test_simt "$@" ;;
                *) exec {build}/test_simt "[ops]fill" ;;
            esac''')
        self.program("train_gpt", f'''#!/usr/bin/env bash
            case $1 in
                */trainer_tiny/* | check-kernels) exec {build}/train_gpt_simt "$@" ;;
                *) exec {build}/train_gpt_cpu "$@" ;;
            esac''')
        for name, target in (("train_gpt_cpu", "train_gpt_cpu"), ("ptx_probe_cuda", "ptx_probe_simt"),
                             ("ptx_probe_simt", "ptx_probe_simt")):
            (self.kit / "build" / name).symlink_to(build / target)
        # A simulated GEMM is slow, so use little time per figure and few repeats.
        for name, less in (("bench", "--seconds 0.02"), ("bench_matmul", "--repeats 2")):
            self.program(f"{name}_cuda", f'#!/usr/bin/env bash\n[[ $* = *{less[:9]}* ]] || set -- "$@" {less}\n'
                         f'exec {build}/{name}_simt "$@"\n')

    def test_everything_passes(self):
        def run(part):  # the limit allows for busy cores
            self.run_script(part, "--workloads", "tiny", "--limit", "3000")
        with ThreadPoolExecutor() as pool:  # at the same time, since only verdicts count here
            list(pool.map(run, gpu_stages.PARTS))
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, dict.fromkeys(MEASURE, "passed"))
        self.assertEqual(rows["trainer_tiny"]["figures"]["steps"], 4)
        self.assertGreater(rows["trainer_tiny"]["figures"]["tokens_per_s"], 0)
        calls = {op["name"]: op["calls"] for op in rows["trainer_tiny"]["figures"]["ops"]}
        self.assertEqual((calls["attention_forward"], calls["matmul_forward qkv.weight"], calls["elementwise_update"]),
                         (2, 2, 1))
        self.assertEqual(rows["step_tiny_b4"]["figures"]["results"][0]["batch"], 4)
        for line in (r"roofs: device-to-device copy \d+ GB/s, bf16 GEMM [\d.]+ TFLOP/s",
                     r"  tiny +bench +2 +\d+ +[\d.]+", r"  tiny +bench +4 +\d+ +[\d.]+",
                     r"  tiny +no graphs +2 +\d+ +[\d.]+",
                     r"  tiny +train_gpt +2 +32 +[\d.]+ .* 4 steps", r"  fc forward: with the library's GELU",
                     r"  tiny +PyTorch +2 +32 +2.00", r"tiny: ops by", r"tiny: GEMMs"):
            self.assertRegex(self.table, rf"(?m)^{line}")
        rows, verdicts = self.results("prove")
        self.assertEqual(verdicts, dict.fromkeys(PROVE, "passed"))
        self.assertEqual(rows["probe_fragments"]["detail"], "5 probes, 1088 words, equal")
        self.assertEqual(len(rows["curves"]["figures"]["lines"]), 12)
        self.assertEqual(self.results("sanitize")[1], dict.fromkeys(SANITIZE, "passed"))

    def test_one_hangs_one_crashes_one_is_missing(self):
        simulated = ROOT / "build/ptx_probe_simt"
        self.program("ptx_probe_cuda", f'''#!/usr/bin/env bash
            case $1 in
                wgmma_layouts) {simulated} "$1" | head -n 3; sleep 1000 & wait ;;
                cluster) kill -SEGV $$ ;;
                *) exec {simulated} "$@" ;;
            esac''')
        (self.kit / "build/bench_matmul_cuda").unlink()
        start = time.monotonic()
        self.run_script("measure", "prove", "--workloads", "tiny", "--stages", "roofs,matmul,probe,comm",
                        "--limit", "400", expect=1)
        self.assertLess(time.monotonic() - start, 300)
        self.assertEqual(self.results("prove")[1], {**dict.fromkeys(PROBES + ["comm"], "passed"),
                                                    "probe_cluster": "crashed (SIGSEGV)"})
        rows, verdicts = self.results("measure")
        self.assertEqual(verdicts, {**dict.fromkeys(FIRST_PROBES + ["roofs"], "passed"),
                                    "probe_wgmma_layouts": "timed out", "matmul_tiny": "missing"})
        self.assertEqual(len(rows["probe_wgmma_layouts"]["figures"]["probes"]), 3)
        self.assertIn("3 probes, ", rows["probe_wgmma_layouts"]["detail"])
        self.assertIn("not finished: ", rows["probe_wgmma_layouts"]["detail"])
        self.assertLess(rows["probe_wgmma_layouts"]["seconds"], 60)


class OpGroups(unittest.TestCase):
    def test_the_sanitizer_sees_every_op_test_once(self):
        """All cases of one precision except GEMMs, which the library computes."""
        def cases(*spec):
            said = subprocess.run([ROOT / "build/test_simt", *spec, "--list-test-names-only"], capture_output=True,
                                  text=True, check=False).stdout
            return [line.strip() for line in said.splitlines() if line.strip()]
        wanted = [name for name in cases("[ops]") if not re.match(r"matmul", name)
                  and not re.search(r" - (float|fp16)$|: fp16 ", name)]
        seen = [name for group in gpu_stages.OP_GROUPS for name in cases(gpu_stages.test_spec(group))]
        self.assertGreater(len(seen), 20)
        self.assertEqual(sorted(seen), sorted(wanted))


if __name__ == "__main__":
    unittest.main()

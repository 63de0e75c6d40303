"""The benchmarks on the simulated GPU: their reports, when they are written, and that they time every op of a step.

The simulated clock advances by a microsecond per queued operation, so that times count launches and do not depend on
this machine's speed.
"""
import json
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, ROOT

WORK_MS = 1e-3  # per kernel, copy or GEMM
# Copies per step: the loss scale, the update's scalars, tokens and targets; the loss; then the norm, and losses.
COPIES = 7


class BenchTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)

    def run_bench(self, *args, program="bench_simt", expect=0, **environment):
        """Returns the program's output and the JSON report that it wrote."""
        command = [ROOT / "build" / program, *args, "--json", self.dir / "bench.json"]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300,
                                env={**ENVIRONMENT, **environment})
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        path = self.dir / "bench.json"
        return result.stdout + result.stderr, json.loads(path.read_text()) if path.exists() else None


class Bench(BenchTest):
    def test_roofs_then_ops_against_them(self):
        _, roofs = self.run_bench("--roofs", "--seconds", "0.05")
        self.assertEqual(set(roofs), {"device", "matmul_path", "roofs"})
        self.assertEqual(set(roofs["roofs"]), {"copy_gb_per_s", "bf16_tflops"})
        copy, product = roofs["roofs"]["copy_gb_per_s"] * 1e9, roofs["roofs"]["bf16_tflops"] * 1e12
        (self.dir / "bench.json").rename(self.dir / "roofs.json")

        said, ops = self.run_bench("bf16", "--workload", "tiny", "--ops-only", "--roofs-from", self.dir / "roofs.json",
                                   "--seconds", "0.01")
        self.assertEqual(ops["roofs"], roofs["roofs"])
        self.assertNotIn("measuring the roofs again", said)
        result, = ops["results"]
        self.assertEqual((result["workload"], result["precision"], result["head_rows"]), ("tiny", "bf16", 32))
        self.assertNotIn("step_ms", result)
        self.assertAlmostEqual(sum(op["share"] for op in result["ops"]), 1)
        for op in result["ops"] + result["variants"]:
            roof_ms = 1000 * max(op["flops"] / product, op["bytes"] / copy)
            self.assertAlmostEqual(op["roof_share"], roof_ms / op["ms"])
            self.assertAlmostEqual(op["ms_above_roof"], op["calls"] * (op["ms"] - roof_ms))
            self.assertAlmostEqual(op["total_ms"], op["calls"] * op["ms"])
            self.assertLessEqual(op["ms_min"], op["ms"])
            self.assertLessEqual(op["ms"], op["ms_max"])
        names = {op["name"] for op in result["ops"]}
        self.assertTrue({variant["of"] for variant in result["variants"]} <= names)

    def test_work_is_counted_from_the_shapes(self):
        _, report = self.run_bench("bf16", "--workload", "tiny", "--ops-only", "--seconds", "0.01")
        ops = {op["name"]: op for op in report["results"][0]["ops"]}
        rows, width, length, half = 32, 64, 16, 2
        self.assertEqual(ops["fc backward weight"]["flops"], 2 * rows * width * 4 * width)
        self.assertEqual(ops["fc backward weight"]["bytes"], half * (rows * width + rows * 4 * width)
                         + 4 * width * 4 * width)
        # Two GEMMs of (length, width) and (width, length), half of it below the diagonal; five in the backward pass.
        self.assertEqual(ops["attention forward"]["flops"], 2 * 2 * rows * length * width / 2)
        self.assertEqual(ops["attention backward"]["flops"], 5 * 2 * rows * length * width / 2)
        self.assertEqual(ops["norm backward"]["bytes"], half * 4 * rows * width)

    def check_ops_are_a_step(self, *args, chunks):
        said, report = self.run_bench("bf16", "--workload", "tiny", "--seconds", "0.01", *args)
        result, = report["results"]
        total = sum(op["total_ms"] for op in result["ops"])
        self.assertAlmostEqual(result["step_ms"], total + COPIES * WORK_MS, places=6, msg=said)
        calls = {op["name"]: op["calls"] for op in result["ops"]}
        self.assertEqual((calls["head forward"], calls["cross entropy"]), (chunks, chunks))
        return result

    def test_the_ops_are_all_that_a_step_launches(self):
        result = self.check_ops_are_a_step(chunks=1)
        self.assertGreaterEqual(result["steps"], 3)
        self.assertNotIn("mfu", result)  # the peak of this GPU is unknown
        self.assertAlmostEqual(result["tokens_per_s"], 32 / result["step_ms"] * 1000)

    def test_the_ops_are_all_that_a_step_launches_with_logits_in_parts(self):
        self.check_ops_are_a_step("--head-rows", "8", chunks=4)

    def test_missing_roofs_are_measured(self):
        said, report = self.run_bench("bf16", "--workload", "tiny", "--ops-only", "--seconds", "0.01", "--roofs-from",
                                      self.dir / "absent.json")
        self.assertIn("measuring the roofs again", said)
        self.assertIn("copy_gb_per_s", report["roofs"])

    def test_measurements_before_a_kill_are_kept(self):
        path = self.dir / "bench.json"
        process = subprocess.Popen([ROOT / "build/bench_simt", "--workload", "tiny", "--steps-only", "--seconds", "1e6",
                                    "--json", path], stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 120
        while not path.exists():
            self.assertLess(time.monotonic(), deadline, "no step was written")
            time.sleep(0.05)
        process.kill()
        process.wait()
        result, = json.loads(path.read_text())["results"]
        self.assertGreater(result["step_ms"], 0)

    def test_wrong_arguments(self):
        said, _ = self.run_bench("--workload", "huge", expect=64)
        self.assertIn("unknown workload huge; choose from 124M", said)
        result = subprocess.run([ROOT / "build/bench_simt", "--roofs", "--ops-only"], capture_output=True)
        self.assertNotEqual(result.returncode, 0)


class Matmul(BenchTest):
    REPEATS = 6

    def run_matmul(self, *args, **environment):
        return self.run_bench("--workload", "tiny", *args, program="bench_matmul_simt", **environment)

    def test_every_gemm_and_its_algorithms(self):
        said, report = self.run_matmul("--repeats", self.REPEATS)
        products = {product["name"]: product for product in report["products"]}
        flops = [product["calls"] * product["m"] * product["n"] * product["k"] for product in report["products"]]
        self.assertEqual(flops, sorted(flops, reverse=True))
        kinds = ("forward", "backward input", "backward weight", "backward weight, adding")
        self.assertEqual(set(products), {f"{layer} {kind}" for kind in kinds
                                         for layer in ("qkv", "attn_proj", "fc", "fc_proj", "head")})
        self.assertEqual([products[name]["epilogue"] for name in
                          ("qkv forward", "fc forward", "fc_proj backward input", "fc backward input",
                           "fc backward weight", "head forward", "head backward weight")],
                         ["bias", "bias", "dgelu", "plain", "bias_gradient", "plain", "plain"])
        for name, product in products.items():
            self.assertEqual(product["accumulate"], name.endswith("adding"))
            self.assertEqual((product["in"], product["out"]), ("bf16", "fp32" if "weight" in name else "bf16"))
            self.assertEqual((product["candidates"], product["excluded_candidates"]), (4, 3), name)
            self.assertEqual((product["chosen"]["repeats"], product["chosen"]["mismatches"]), (self.REPEATS, 0), name)
            self.assertEqual(product["fastest"]["mismatches"], 0, name)
            for kind in ("chosen", "fastest"):
                self.assertNotIn("in place", product[kind]["algorithm"])
            self.assertIn("reduction in place", product["excluded"]["algorithm"])
            flops = 2 * product["m"] * product["n"] * product["k"]
            self.assertAlmostEqual(product["chosen"]["tflops"], flops / product["chosen"]["ms"] * 1e-9)
            if product["out"] == "fp32":  # this algorithm's bits alternate, below the precision of bf16
                self.assertEqual(product["excluded"]["mismatches"], self.REPEATS // 2, name)
            self.assertEqual("plain_ms" in product, product["epilogue"] == "bias_gradient")
            self.assertEqual("column_sums_ms" in product, product["epilogue"] == "bias_gradient")
            self.assertEqual([key in product for key in ("gelu_ms", "gelu_pass_ms")], [name == "fc forward"] * 2, name)
        self.assertIn("3 of 6 runs differ", said)

    def test_the_largest_gemms_come_first_until_time_runs_out(self):
        said, report = self.run_matmul("--repeats", 2, "--seconds", 0.3)
        products = report["products"]
        self.assertEqual(products[0]["name"], "fc forward")
        self.assertIn(f"no time left for {20 - len(products)} more GEMMs", said)
        said, _ = self.run_matmul("--repeats", 2, "--seconds", 0)
        self.assertIn("no time left for 20 more GEMMs", said)

    def test_a_first_proposal_that_is_slow(self):
        said, report = self.run_matmul("--repeats", 2, "--seconds", 0.3, STAND_IN_CUBLASLT="slow_first")
        product = report["products"][0]
        self.assertIn("id 1 ", product["chosen"]["algorithm"])
        self.assertIn("id 0 ", product["fastest"]["algorithm"])
        self.assertAlmostEqual(product["chosen"]["ms"], 1 + WORK_MS)
        self.assertAlmostEqual(product["fastest"]["ms"], WORK_MS)
        self.assertRegex(said, r"fastest +0.0010 ms")


if __name__ == "__main__":
    unittest.main()

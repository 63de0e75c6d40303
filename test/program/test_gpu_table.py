"""scripts/gpu_table.py: the table shows the main results and stays within its size limit for any figures."""
import random
import re
import sys
import unittest

from test_gpu_runner import HEAD
from trainer import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_table  # noqa: E402


def stage(name, figures=None, workload="", verdict="passed", detail="", clocks=None):
    return {"name": name, "verdict": verdict, "seconds": 12.3, "bound_s": 20, "detail": detail, "is_peer": False,
            "workload": workload, "clocks": clocks or {}, "figures": figures or {}}


def op(name, above):
    return {"name": name, "calls": 12, "ms": 0.5, "total_ms": 6.0, "share": 0.1, "flops": 1e9, "bytes": 1e6,
            "roof_share": 0.75, "ms_above_roof": above}


def product(name, ms, excluded=None, mismatches=0, **more):
    def algorithm(value, count):
        return {"algorithm": "a", "ms": value, "tflops": 700 / value, "repeats": 100, "mismatches": count}
    return {"workload": "124M", "name": name, "m": 2304, "n": 65536, "k": 768, "calls": 12, "candidates": 8,
            "chosen": algorithm(ms, mismatches), "fastest": algorithm(ms / 1.25, 0),
            "excluded": excluded and algorithm(excluded, 3), **more}


def bench(**more):
    return {"results": [{"workload": "124M", "batch": 64, "seq_len": 1024, **more}]}


def check(*stages, passed=True):
    return {**HEAD, "date": "2030-01-01T00:00:00Z", "passed": passed, "seconds": 77, "stages": list(stages),
            "libraries": {"cuda": "13.0", "cublas_lt": "13.1.0"}}


MEASURED = [
    stage("roofs", {"roofs": {"copy_gb_per_s": 4012.3, "bf16_tflops": 812.34}},
          clocks={"sm_mhz": [345, 1755, 1980], "watts": [690.2, 700.4], "celsius": 70, "slowdowns": ["power cap"]}),
    stage("ops_124M", bench(ops=[op("small", 0.25), op("large", 4.5), op("middle", 1.125)]), "124M"),
    stage("step_124M", bench(step_ms=60.25, tokens_per_s=1087734.4, mfu=0.4567), "124M"),
    stage("step_124M_b32", {"results": [{"batch": 32, "seq_len": 1024, "step_ms": 31.5, "tokens_per_s": 1040254}]},
          "124M"),
    stage("peer_124M", {"rows": [{"workload": "124M", "batch": 64, "seq_len": 1024, "ours_ms": [60, 60.5],
                                  "torch": {"step_ms": 80.0, "compiled": True, "attention": "FLASH"},
                                  "ratio": 1.3278}]}, "124M"),
    stage("trainer_124M", {"steps": 30, "step_ms": 490.5, "tokens_per_s": 1068885.8, "mfu": 0.4488, "batch": 64,
                           "seq_len": 1024}, "124M"),
    stage("matmul_124M", {"products": [product("qkv", 0.25, 0.2), product("head", 2.0, None, mismatches=2),
                                       product("fc", 0.5, gelu_ms=0.625, gelu_pass_ms=0.375)]}, "124M",
          "failed", "2 repeats"),
]


class Table(unittest.TestCase):
    def test_what_it_shows(self):
        text = gpu_table.table(check(*MEASURED, passed=False))
        for line in (
                r"gpu_check measure: NVIDIA H200, 143771 MiB, 700.00 W, driver 580.95, 16 CPUs",
                r"CUDA 13.0, cuBLASLt 13.1.0, revision abc, 2030-01-01T00:00:00Z",
                r"roofs: device-to-device copy 4012 GB/s, bf16 GEMM 812.3 TFLOP/s",
                r"  124M +bench +64 +1024 +60.25 +1087734 +45.7%",
                r"  124M +bench +32 +1024 +31.50 +1040254 +-$",
                # 65536 tokens in 80 ms; the MFU is train_gpt's times 60.25 / 80.
                r"  124M +PyTorch +64 +1024 +80.00 +819200 +34.4%  compiled, FLASH, 1.328 times our ms",
                r"  124M +train_gpt +64 +1024 +490.50 +1068886 +44.9%  30 steps",
                r"  qkv +2304x65536x768 +2800.0 +3500.0 +3500.0 +1.250 +0 +3  of 100",
                r"  head +2304x65536x768 +350.0 +437.5 +- +- +2 +-  of 100",
                r"  fc: with the library's GELU 0.6250 ms; with bias 0.5000 ms and our pass 0.3750 ms$",
                r"  roofs +passed +12 +345/1755/1980 +690/700 +70 +\[power cap\]",
                r"  matmul_124M +failed +12 +- +- +- +2 repeats",
                r"gpu_check measure: NOT passed: 6 passed, 1 failed; 77 s"):
            self.assertRegex(text, rf"(?m)^{line}")
        self.assertNotIn("left out", text)
        places = [text.index(f"  {name} ") for name in ("large", "middle", "small")]
        self.assertEqual(places, sorted(places))
        self.assertRegex(text, r"(?m)^  large +12 +6.000 +75.0% +4.500$")

    def test_a_peer_with_an_eager_result_only(self):
        peer = {"rows": [{"workload": "124M", "batch": 64, "seq_len": 1024, "torch": {"eager_ms": 100.0}}]}
        text = gpu_table.table(check(MEASURED[2], stage("peer_124M", peer, "124M", "timed out")))
        self.assertRegex(text, r"(?m)^  124M +PyTorch +64 +1024 +100.00 +655360 +27.5%  eager, -, - times our ms$")

    def test_the_limit(self):
        """The least important rows are left out: small ops and short GEMMs, never the figures of steps."""
        ops = [op(f"op_{i}", i) for i in range(300)]
        products = [product(f"gemm_{i}", i + 1.0) for i in range(299)] + [product("unstable", 0.1, None, 5)]
        text = gpu_table.table(check(*MEASURED[:1], stage("ops_124M", bench(ops=ops), "124M"), *MEASURED[2:6],
                                     stage("matmul_124M", {"products": products}, "124M", "failed", "x" * 300)))
        self.assertLessEqual(len(text), 8000)
        self.assertGreater(len(text), 7500)
        self.assertRegex(text, r"\(\d+ more rows left out\)")
        for words in ("op_299", "gpu_check measure: passed", "train_gpt", "PyTorch", "matmul_124M", "812.3 TFLOP/s"):
            self.assertIn(words, text)
        self.assertNotIn("op_0 ", text)
        shown = text.count("  op_") + text.count("  gemm_") + text.count("  unstable")
        left = sum(int(count) for count in re.findall(r"\((\d+) more rows left out\)", text))
        self.assertEqual(shown + left, 600)

    def test_many_stages_that_fail(self):
        stages = [stage(f"probe_{i}", verdict="passed" if i % 2 else "crashed (SIGSEGV)", detail="word " * 60)
                  for i in range(200)]
        text = gpu_table.table(check(*stages, passed=False))
        self.assertLessEqual(len(text), 8000)
        self.assertIn("100 crashed", text)
        rows = [line for line in text.splitlines() if line.startswith("  probe_")]
        self.assertTrue(rows and all("crashed" in row for row in rows))

    def test_invalid_figures(self):
        """An invalid figure of any kind does not affect the rows of other stages."""
        values = [None, "text", [], {}, -1, 1e400, True, [[]], {"a": 1}, "\u2028\x00" * 5]
        chooser = random.Random(1)

        def damage(value):
            if chooser.random() < 0.2:
                return chooser.choice(values)
            if isinstance(value, dict):
                return {key: damage(one) for key, one in value.items()}
            return [damage(one) for one in value] if isinstance(value, list) else value
        for _ in range(500):
            stages = [{**one, "figures": damage(one["figures"]), "clocks": damage(one["clocks"]) or {}}
                      for one in MEASURED]
            text = gpu_table.table(check(*stages))
            self.assertLessEqual(len(text), 8000)
            self.assertTrue(text.isascii() and text.replace("\n", "").isprintable())
            self.assertIn("gpu_check measure: passed: 6 passed, 1 failed; 77 s", text)


if __name__ == "__main__":
    unittest.main()

"""The whole trainer on the simulated GPU: the CUDA kernels compared with the CPU backend, step by step."""
import json
import math
import os
import re
import subprocess

from ordered_pairs import as_lines, ordered_pairs
from test_families import LLAMA, QWEN3, SPEEDRUN
from trainer import ENVIRONMENT, ROOT, TINY, TRAINER, TrainerTest

SIMULATED = ROOT / os.environ.get("OTHER_TRAINER", "build/train_gpt_simt")
UNIT_ROUNDOFF = {"fp32": 2.0 ** -24, "bf16": 2.0 ** -8, "fp16": 2.0 ** -11}
STEPS, LAYERS, ROWS = 10, 2, 120


def tolerance(precision, step):
    """Returns the allowed difference of the losses. Both backends round at the same places, but sums run in another
    order, so that any stored number may round differently. A rounding has an RMS error of 0.35 unit roundoffs. About 12
    per layer and 4 outside add as independent errors in each row's loss, and the rows' errors average out. The bound is
    eight standard deviations, as in tolerance.h. Each update adds the same difference of the weights again."""
    return step * 8 * 0.35 * UNIT_ROUNDOFF[precision] * math.sqrt(12 * LAYERS + 4) / math.sqrt(ROWS)


class Simulated(TrainerTest):
    def test_gemms_without_a_fixed_summation_order_are_reported(self):
        """If cuBLASLt does not report an algorithm's summation order, the run still trains."""
        config = self.write_config(train_max_steps=2, model_n_layer=1)
        for hidden, notes in (("", []), ("hides_reductions", ["step 1"])):
            said = subprocess.run([SIMULATED, config, "--fresh"], cwd=self.dir, check=True, timeout=100, text=True,
                                  stdout=subprocess.PIPE, env={**ENVIRONMENT, "STAND_IN_CUBLASLT": hidden}).stdout
            expected = r"(step \d+) \| GEMM by .*; the bits of \d+ GEMMs may differ from run to run"
            self.assertEqual(re.findall(expected, said), notes, said)

    def trained(self, *settings, library=""):
        """Trains a model none of whose tensors has a multiple of 128 elements. Returns the losses and the output."""
        config = self.write_config(train_max_steps=4, train_precision="bf16", model_n_embd=40, model_n_head=5,
                                   model_vocab_size=300)
        run = subprocess.run([SIMULATED, config, "--fresh", *settings], cwd=self.dir, check=True, timeout=100,
                             text=True, stdout=subprocess.PIPE, env={**ENVIRONMENT, "STAND_IN_CUBLASLT": library})
        return self.losses(), run.stdout

    def test_every_operand_of_a_gemm_is_aligned_to_256_bytes(self):
        """The library's first algorithm sums in another order; here it is proposed only for such operands."""
        states = []
        for library in ("", "prefers_256"):
            self.trained("--set=train.head_rows=60", library=library)
            states.append((self.step_dir(4) / "shard_0000.bin").read_bytes())
        self.assertEqual(*states)

    def test_the_gelu_of_the_library(self):
        """Rounds once where the program's GELU rounds twice, also if the backward pass recomputes the block."""
        usual, _ = self.trained()
        fused, said = self.trained("--set=device.gelu_epilogue=true")
        self.assertIn("gelu_new in the GEMM", said)
        self.assertNotEqual(fused, usual)
        for step, (loss, expected) in enumerate(zip(fused, usual, strict=True), 1):
            self.assertLessEqual(abs(loss - expected), tolerance("bf16", step))
        self.assertEqual(self.trained("--set=device.gelu_epilogue=true", "--set=train.recompute=block")[0], fused)

    def test_an_open_micro_batch_and_recompute_level(self):
        """A known GPU gets the fastest that fit; the CPU gets none and at most eight sequences."""
        config = self.write_config(train_max_steps=2, train_batch_size=0, train_recompute="auto",
                                   train_total_batch_tokens=20 * 24)
        for program, gpu, batch, line in ((SIMULATED, "NVIDIA H200", 24, True), (SIMULATED, "a new GPU", 8, False),
                                          (TRAINER, "", 8, False)):
            for flag in ("--fresh", "--resume"):
                said = subprocess.run([program, config, flag], cwd=self.dir, check=True, timeout=100, text=True,
                                      stdout=subprocess.PIPE, env={**ENVIRONMENT, "SIMULATED_GPU": gpu}).stdout
                expected = "plan     train.batch_size 24, train.recompute none: the fastest that fits 1 H200"
                self.assertEqual(expected in said, line, said)
            train = json.loads((self.dir / "run/config.json").read_text())["train"]
            self.assertEqual((train["batch_size"], train["recompute"]), (batch, "none"))

    def tune(self, *args, expect=0, program=SIMULATED, **environment):
        run = subprocess.run([program, *args[:-1], "tune", args[-1], "--out", "choices"], cwd=self.dir, timeout=100,
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment})
        self.assertEqual(run.returncode, expect, run.stdout)
        return run.stdout

    def test_tuned_gemms(self):
        """The library's first proposal is slow here, and another algorithm sums in another order."""
        usual, said = self.trained()
        self.assertIn("the library's first proposals", said)
        self.assertRegex(self.tune("config.json", STAND_IN_CUBLASLT="slow_first"),
                         r"^choices: (\d+) GEMMs, [1-9]\d* of them faster ")
        lines = (self.dir / "choices").read_text().splitlines()
        self.assertRegex(lines[0], "^train_gpt GEMM choices 1, cuBLASLt 130100, ")
        for gemm in ("m 120 n 60 k 40 bias =", "m 160 n 60 k 40 dgelu =", "m 40 n 384 k 60 plain =",
                     "m 40 n 384 k 60 plain +=", "m 40 n 120 k 60 bias_gradient +="):
            self.assertTrue(any(gemm in line for line in lines), (gemm, lines))
        runs = [self.trained("--set=device.gemm_choices=choices") for _ in range(2)]
        self.assertRegex(runs[0][1], rf"; {len(lines) - 1} chosen algorithms")
        self.assertEqual(runs[0][0], runs[1][0])
        self.assertNotEqual(runs[0][0], usual)
        for step, (loss, expected) in enumerate(zip(runs[0][0], usual, strict=True), 1):
            self.assertLessEqual(abs(loss - expected), tolerance("bf16", step))
        (self.dir / "choices").write_text("\n".join(["train_gpt GEMM choices 1, cuBLASLt 1, GPU"] + lines[1:]))
        said = subprocess.run([SIMULATED, "config.json", "--fresh", "--set=device.gemm_choices=choices"], cwd=self.dir,
                              capture_output=True, text=True, env=ENVIRONMENT, timeout=100)
        self.assertEqual(said.returncode, 78, said)
        self.assertIn("device.gemm_choices begins with", said.stderr)
        self.assertIn("CPU program", self.tune("config.json", program=TRAINER, expect=64))

    def test_ranks_tune_together(self):
        """Each stage of a pipeline has other GEMMs; the file has the GEMMs of all ranks, without repetitions."""
        config = self.write_config(train_max_steps=2, model_n_layer=2, parallel_pipeline=2,
                                   train_total_batch_tokens=240)
        self.tune("--nproc", "2", config)
        gemms = [line.split(": ")[0] for line in (self.dir / "choices").read_text().splitlines()]
        self.assertEqual(len(set(gemms)), len(gemms))
        run = subprocess.run([SIMULATED, "--nproc", "2", config, "--set=device.gemm_choices=choices"], cwd=self.dir,
                             capture_output=True, text=True, timeout=100, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("chosen algorithms", run.stdout)

    def test_mfu_uses_the_peak_of_a_known_gpu(self):
        """MFU by llm.c's convention: 6 N + 6 layers channels length FLOPs per token; peak: the dense 16-bit rate."""
        layers, length = 1, 10
        config = self.write_config(train_max_steps=1, train_precision="bf16", model_n_layer=layers,
                                   train_seq_len=length, train_batch_size=1, train_total_batch_tokens=length)
        model, channels = TINY["model"], TINY["model"]["n_embd"]
        rows = -(-model["vocab_size"] // 128) * 128
        for name, peak in (("NVIDIA H200", 989.4e12), ("some GPU of the future", None)):
            subprocess.run([SIMULATED, config, "--fresh"], cwd=self.dir, check=True, timeout=100,
                           stdout=subprocess.DEVNULL, env={**ENVIRONMENT, "SIMULATED_GPU": name})
            record, = self.records("run", "train", without=())
            parameters = (rows + model["n_positions"] + 2) * channels + layers * (12 * channels ** 2 + 13 * channels)
            flops = 6 * parameters + 6 * layers * channels * length
            if peak:
                self.assertAlmostEqual(record["mfu"] * peak / (record["tokens_per_s"] * flops), 1, places=12)
            else:
                self.assertIsNone(record["mfu"])

    def train_both(self, precision, steps=STEPS, magnified=1, least_gain=0.5, **changes):
        """magnified: how many times an update can magnify the error of a gradient."""
        config = self.write_config(train_max_steps=steps, train_precision=precision, **changes)
        self.run_trainer(config, "--fresh", "--set", "run.dir=cpu")
        subprocess.run([SIMULATED, config, "--fresh", "--set", "run.dir=cuda"], cwd=self.dir, check=True, timeout=600,
                       stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        cpu, cuda = self.losses("cpu"), self.losses("cuda")
        self.assertEqual(len(cuda), steps)
        for step, (expected, loss) in enumerate(zip(cpu, cuda), 1):
            allowed = tolerance(precision, step) * (magnified if step > 1 else 1)
            self.assertTrue(abs(loss - expected) <= allowed, f"{precision}, step {step}: {loss} instead of {expected}, "
                                                             f"off by {loss - expected:.2e}, allowed {allowed:.2e}")
        self.assertLess(cuda[-1], cuda[0] - least_gain)
        # Each kernel takes a microsecond of simulated time: squared sums, norm, update.
        spent = [record["optimizer_ms"] for record in self.records("cuda", "train", without=())]
        self.assertGreater(min(spent), 0.0029)

    def test_questions_and_a_text(self):
        """Compares with lm-evaluation-harness; short questions use sequences of half and a quarter of the length."""
        model = ROOT / "test/recorded/lm_eval"
        expected = json.loads((model / "expected.json").read_text())
        pairs = [pair for line, scores in zip((model / "general.jsonl").read_text().splitlines(),
                                              expected["general"]["log_likelihoods"], strict=True)
                 for pair in ordered_pairs(json.loads(line), scores)]
        (self.dir / "pairs.jsonl").write_text(as_lines(pairs))
        said = subprocess.run([SIMULATED, "eval", model, "--questions", "pairs.jsonl", "--text", model / "text.txt",
                               "--batch", "2"], cwd=self.dir, check=True, timeout=100, capture_output=True, text=True,
                              env=ENVIRONMENT).stdout
        self.assertRegex(said, rf"pairs.jsonl: {len(pairs)} questions\n  acc +1\.0000 ")
        bits = float(said.split(" bits per byte")[0].split()[-1])
        self.assertAlmostEqual(bits, expected["text"]["bits_per_byte"], delta=2e-6)

    def test_fp32(self):
        self.train_both("fp32")

    def test_bf16_with_head_size_64_and_recomputation(self):
        self.train_both("bf16", model_n_head=2, model_n_embd=128, train_recompute="block", model_dropout=0.1)

    def test_llama(self):
        self.train_both("bf16", **LLAMA)

    def test_qwen3_with_recomputation(self):
        self.train_both("fp32", train_recompute="block", **QWEN3)

    def test_a_speedrun_model(self):
        self.train_both("bf16", **SPEEDRUN)

    def test_optimizers(self):
        """Rules of matrices, each with another rule of the other tensors. Five steps of Newton-Schulz multiply the
        smallest singular values, and their errors, by 3.4445 each. SOAP-Muon, which has SOAP's kernels, also divides by
        sqrt(V) + eps; with eps as large as the elements of a gradient, that magnifies little."""
        for matrices, others in (("muon", "lamb"), ("normuon", "lars"), ("soap_muon", "adafactor")):
            with self.subTest(matrices):
                self.train_both("fp32", steps=4, magnified=3.4445 ** 5, least_gain=0.05, optim_name=matrices,
                                optim_scalar_name=others, optim_eps=0.01, schedule_warmup_steps=1, model_n_layer=1)

    def test_fp16_with_a_dynamic_loss_scale(self):
        self.train_both("fp16", loss_scale_dynamic=True, loss_scale_initial=1024.0, model_dropout=0.1)

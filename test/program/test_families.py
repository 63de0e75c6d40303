"""Models of families other than GPT-2 in the program: ranks, ZeRO stages, resumed runs, exporting to and importing from
Hugging Face directories, and plans, which omit parts that a model lacks."""
import itertools
import json
import re
import shutil
import subprocess
import unittest

from test_ranks import EIGHT, MPI_ENVIRONMENT, mpirun
from trainer import ROOT, TRAINER, TrainerTest

# One key-value head per three query heads; heads wider than n_embd / n_head.
LLAMA = dict(model_family="llama", model_n_kv_head=1, model_head_size=18, model_hidden_size_mlp=70)
QWEN2 = dict(model_family="qwen2", model_tie_embeddings=True, model_sliding_window=5, model_window_pattern="LS")
QWEN3 = dict(model_family="qwen3", model_n_kv_head=1, model_head_size=20, model_rope_scaling="yarn",
             model_rope_factor=2, model_rope_original_positions=12)
SPEEDRUN = dict(model_family="custom", model_activation="relu2", model_norm="rmsnorm", model_norm_weight=False,
                model_norm_bias=False, model_position="rope", model_attention_bias="none", model_mlp_bias=False,
                model_qk_norm="unit", model_final_softcap=15, model_tie_embeddings=False, model_embedding_norm=True,
                model_z_loss=1e-4, model_sliding_window=7, model_window_pattern="SL", model_attention_softcap=20,
                data_document_mask=True)
# Parameter counts as published; for two models none are published, so they are computed.
PUBLISHED = {"smollm2_135M": 134_515_008, "qwen3_0.6B": 596_049_920, "tinyllama_1.1B": 1_100_048_384,
             "llama3_8B": 8_030_261_248,
             "llama_125M": 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768,
             "speedrun_124M": 2 * 50304 * 768 + 12 * 12 * 768**2}
# FLOPs by torchtitan's formula, 6 (parameters - embedding) + 12 layers heads head_size T, with half of the second term
# because of causality. Values: layers, heads * head_size, T, and the parameters of the embedding (if only looked up).
ARITHMETIC = {"tinyllama_1.1B": (22, 2048, 2048, 32000 * 2048), "llama3_8B": (32, 4096, 8192, 128256 * 4096),
              "qwen3_0.6B": (28, 2048, 4096, 0)}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "speedrun": SPEEDRUN}


def regions_of(plan):
    return {name: int(size) for name, size in re.findall(r"^ +(\w+) +(\d+) bytes", plan, re.M)}


class Families(TrainerTest):
    def test_they_learn(self):
        for name, changes in FAMILIES.items():
            with self.subTest(name):
                self.train(run_dir=name, train_max_steps=60, train_precision="bf16", **changes)
                losses = self.losses(name)
                self.assertAlmostEqual(losses[0], 5.55, delta=0.1)  # ln 257: uniform probabilities
                self.assertLess(losses[-1], 3.2)

    def test_a_resumed_run_has_the_same_bits(self):
        for name, changes in FAMILIES.items():
            with self.subTest(name):
                self.train(run_dir=name, train_max_steps=6, checkpoint_every_steps=3, checkpoint_keep=9,
                           eval_every_steps=3, **changes)
                expected = self.weights(6, name), self.records(name)
                shutil.rmtree(self.step_dir(6, name))
                self.run_trainer("config.json", "--resume")
                self.assertEqual((self.weights(6, name), self.records(name)), expected)

    def test_the_plan_omits_parts_that_a_model_lacks(self):
        gpt2 = regions_of(self.run_trainer("plan", self.write_config()))
        llama = regions_of(self.run_trainer("plan", self.write_config(**LLAMA)))
        speedrun = regions_of(self.run_trainer("plan", self.write_config(**SPEEDRUN)))
        for name in ("norm1_mean", "norm2_mean", "norm_f_mean"):
            self.assertIn(name, gpt2)
            self.assertNotIn(name, llama)
        self.assertNotIn("qk_rstd", llama)
        self.assertIn("qk_rstd", speedrun)
        self.assertIn("qk_raw", regions_of(self.run_trainer("plan", self.write_config(**QWEN3))))
        self.assertNotIn("qk_raw", speedrun)  # a norm without weights can be inverted
        self.assertIn("fc", llama)
        self.assertNotIn("fc", speedrun)  # backward needs only the output of relu2
        self.assertIn("first_key", speedrun)
        self.assertNotIn("first_key", llama)
        self.assertNotIn("rope_table", gpt2)
        # Embedding and head, 2 blocks of (2 norms, q k v, output, gate and up, down), the final norm.
        c, heads, kv, size, hidden, vocab = 48, 3, 1, 18, 70, 384
        parameters = 2 * vocab * c + 2 * (2 * c + (heads + 2 * kv) * size * c + heads * size * c + 3 * hidden * c) + c
        said = self.run_trainer("plan", self.write_config(**LLAMA))
        self.assertRegex(said, rf"parameters +{parameters}\n")
        # 6 per parameter except the embedding, 12 per channel of attention and visible key, on average T / 2.
        flops = 6 * (parameters - vocab * c) + 12 * 2 * heads * size * 20 / 2
        self.assertAlmostEqual(float(re.search(r"FLOPs per token +(\S+),", said)[1]) / flops, 1, delta=1e-4)
        windowed = self.run_trainer("plan", self.write_config(**QWEN2))
        whole = self.run_trainer("plan", self.write_config(**{**QWEN2, "model_window_pattern": "LL"}))
        saved = 12 * 48 * (20 / 2 - (5 - 25 / 40))  # of one layer
        self.assertAlmostEqual(self.flops(whole) - self.flops(windowed), saved, delta=30)

    def test_configurations_have_the_published_sizes(self):
        for name, parameters in PUBLISHED.items():
            with self.subTest(name):
                said = self.run_trainer("plan", ROOT / f"configs/{name}.json")
                self.assertRegex(said, rf"\nparameters +{parameters}\n")
                if name in ARITHMETIC:
                    layers, width, length, looked_up = ARITHMETIC[name]
                    flops = 6 * (parameters - looked_up) + 12 * layers * width * length / 2
                    self.assertAlmostEqual(self.flops(said) / flops, 1, delta=1e-4)

    def flops(self, plan):
        return float(re.search(r"FLOPs per token +(\S+),", plan)[1])

    def test_exports_are_read_with_the_same_bits(self):
        """With import and model.init_from, also from bf16 files and sharded files."""
        for name, changes in FAMILIES.items():
            if name == "speedrun":
                continue
            with self.subTest(name):
                self.train(run_dir=name, train_max_steps=3, **changes)
                self.run_trainer("export", "--hf", name, f"{name}_hf")
                self.run_trainer("import", f"{name}_hf", f"{name}_back")
                self.run_trainer("export", "--hf", f"{name}_back", f"{name}_again")
                for file in ("model.safetensors", "config.json", "tokenizer.json"):
                    self.assertEqual((self.dir / f"{name}_hf" / file).read_bytes(),
                                     (self.dir / f"{name}_again" / file).read_bytes(), file)
                still = dict(changes, train_max_steps=1, optim_learning_rate=0)
                self.train(run_dir=f"{name}_one", model_init_from=name, **still)
                self.train(run_dir=f"{name}_two", model_init_from=f"{name}_hf", **still)
                self.assertEqual(self.weights(1, f"{name}_one"), self.weights(1, f"{name}_two"))
                said = self.run_trainer("export", "--hf", name, f"{name}_parts", "--max-shard-bytes", 100000)
                self.assertIn("model.safetensors.index.json", said)
                self.train(run_dir=f"{name}_three", model_init_from=f"{name}_parts", **still)
                self.assertEqual(self.weights(1, f"{name}_one"), self.weights(1, f"{name}_three"))
                self.run_trainer("export", "--hf", name, f"{name}_bf16", "--dtype", "bf16")
                self.run_trainer("export", "--hf", f"{name}_bf16", f"{name}_same", "--dtype", "bf16")
                self.assertEqual((self.dir / f"{name}_bf16/model.safetensors").read_bytes(),
                                 (self.dir / f"{name}_same/model.safetensors").read_bytes())

    def test_models_that_no_file_format_can_describe_are_refused(self):
        self.train(train_max_steps=1, **SPEEDRUN)
        said = self.run_trainer("export", "--hf", "run", "hf", expect=78)
        self.assertIn("model.", said)
        self.assertFalse((self.dir / "hf").exists())
        said = self.train(run_dir="other", model_init_from="text.txt", train_max_steps=1, expect=78, **SPEEDRUN)
        self.assertIn("text.txt: llm.c files support only GPT-2 models", said)
        self.train(run_dir="llama", train_max_steps=1, **LLAMA)
        self.run_trainer("export", "--hf", "llama", "hf")
        for changes, words in ((dict(LLAMA, model_n_kv_head=3), "model.n_kv_head: 1 -> 3"),
                               (dict(LLAMA, model_norm_eps=1e-6), "model.norm_eps"),
                               ({}, "model.gated_mlp")):
            said = self.train(run_dir="other", model_init_from="hf", expect=78, **changes)
            self.assertIn(words, said)

    def test_three_commands_continue_training_from_a_directory(self):
        self.train(train_max_steps=8, **LLAMA)
        self.run_trainer("export", "--hf", "run", "hf")
        said = self.run_trainer("import", "--hf", "hf", "--out", "mine.json", "--data", "own")
        self.assertIn("next: train_gpt prepare TEXT --tokenizer hf/tokenizer.json --minutes 0 --out own", said)
        self.run_trainer("prepare", "text.txt", "--tokenizer", "hf/tokenizer.json", "--minutes", 0, "--out", "own")
        config = json.loads((self.dir / "mine.json").read_text())
        self.assertEqual(config["model"]["family"], "llama")
        self.assertEqual(config["model"]["init_from"], "hf")
        # The text is short, so steps are smaller than in the file.
        said = self.run_trainer("mine.json", "--set", "train.total_batch_tokens=96", "--set", "schedule.warmup_steps=1",
                                "--set", "eval.every_steps=0", "--set", "checkpoint.every_steps=0",
                                "--set", "train.precision=fp32", "--set", "train.max_steps=6")
        self.assertIn("step 6/6", said)
        first = self.losses("runs/mine")[0]
        self.assertAlmostEqual(first, self.losses("run")[-1], delta=0.5)
        self.assertIn("exists; nothing was written",
                      self.run_trainer("import", "--hf", "hf", "--out", "mine.json", expect=73))
        self.assertIn("no config.json", self.run_trainer("import", "--hf", "data", "--out", "x.json", expect=66))
        for arguments in ((), ("--hf", "hf"), ("--out", "x.json"), ("hf",), ("hf", "to", "--hf", "hf", "--out", "x")):
            self.run_trainer("import", *arguments, expect=64)

    def test_sample_and_eval_read_a_directory(self):
        self.train(train_max_steps=20, **QWEN3)
        self.run_trainer("export", "--hf", "run", "hf")
        sampled = [self.run_trainer("sample", source, "--prompt", "The", "--tokens", 15, "--temperature", 0)
                   for source in ("run", "hf")]
        self.assertEqual(*sampled)
        self.assertIn("llama", self.run_trainer("inspect", "hf").replace("qwen3", "llama"))

    def train_on(self, ranks, **changes):
        config = self.write_config(**changes)
        result = subprocess.run(mpirun(ranks, config) if ranks > 1 else [TRAINER, config], cwd=self.dir,
                                capture_output=True, text=True, timeout=120, env=MPI_ENVIRONMENT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_the_same_bits_for_any_number_of_ranks_and_stage(self):
        for name, precision in (("llama", "fp32"), ("speedrun", "bf16")):
            changes = dict(EIGHT, parallel_deterministic_reduce=True, train_max_steps=8, eval_every_steps=4,
                           eval_batches=3, train_precision=precision, train_recompute="block", **FAMILIES[name])
            self.train_on(1, run_dir=name, **changes)
            for ranks, stage in [*itertools.product((2,), range(4)), (4, 2), (4, 3)]:
                with self.subTest(name, ranks=ranks, stage=stage):
                    run = f"{name}_{ranks}_{stage}"
                    self.train_on(ranks, run_dir=run, parallel_zero_stage=stage, **changes)
                    self.assertEqual(self.records(run), self.records(name))
                    self.assertEqual(self.logical_state(8, run), self.logical_state(8, name))

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_an_untied_head_has_its_own_bucket(self):
        """Gradients are reduced per bucket unless the sum is deterministic, which is computed at the end."""
        changes = dict(EIGHT, train_max_steps=12, parallel_bucket_mb=0, **LLAMA)
        self.train_on(1, run_dir="one", **changes)
        for ranks, stage in [*itertools.product((2, 3), range(4))]:
            tokens = {} if ranks == 2 else dict(train_total_batch_tokens=2 * 20 * 9)
            if tokens:
                self.train_on(1, run_dir=f"one_{stage}", **{**changes, **tokens})
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.train_on(ranks, run_dir=run, parallel_zero_stage=stage, **{**changes, **tokens})
                one = self.losses(f"one_{stage}" if tokens else "one")
                for ours, expected in zip(self.losses(run), one, strict=True):
                    self.assertTrue(abs(ours - expected) <= 2e-6 * expected, f"{ours} instead of {expected}")
        plan = regions_of(self.run_trainer("plan", self.write_config(parallel_zero_stage=3, **LLAMA), "--gpus", 2))
        self.assertIn("param_slot_3", plan)
        tied = self.write_config(parallel_zero_stage=3, **LLAMA, model_tie_embeddings=True)
        self.assertNotIn("param_slot_3", regions_of(self.run_trainer("plan", tied, "--gpus", 2)))


if __name__ == "__main__":
    unittest.main()

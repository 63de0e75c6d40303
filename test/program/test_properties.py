"""Settings that must not change a single bit of a run, numbers in the logs, and round trips of weights."""
import array
import math
import os
import re
import subprocess
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, TRAINER, TrainerTest


PRECISIONS = {"fp32": {}, "bf16": {}, "fp16": {"loss_scale_fixed": 1024.0}}


class SameBits(TrainerTest):
    def check_same_bits(self, precisions, variants):
        """Requires that each variant (name -> changes) has the losses and final tensors of the unchanged run."""
        for precision in precisions:
            base = {"train_precision": precision, **PRECISIONS[precision]}
            self.train(run_dir=precision, **base)
            for name, changes in variants.items():
                with self.subTest(precision=precision, variant=name):
                    run = f"{precision}_{name}"
                    self.train(run_dir=run, **base, **changes)
                    self.assertEqual(self.losses(run), self.losses(precision))
                    self.assertEqual(self.weights(20, run), self.weights(20, precision))

    def test_repeated_runs_and_other_thread_counts(self):
        self.check_same_bits(PRECISIONS, {f"{threads}_threads": {"threads": threads} for threads in (1, 2, 4)})

    def test_recomputation(self):
        self.check_same_bits(PRECISIONS, {level: {"train_recompute": level} for level in ("gelu", "norm", "block")})

    def test_evaluation_saving_and_logging(self):
        self.check_same_bits(["fp32"], {
            "evaluated": {"eval_every_steps": 1},
            "saved": {"checkpoint_every_steps": 1, "checkpoint_keep": 1},
            "sampled": {"sample_every_steps": 3, "sample_tokens": 5, "sample_prompt": "To"},
            "logged": {"log_every_steps": 1},
            "silent": {"data_val": "", "data_tokenizer": ""},
        })

    def test_another_seed_gives_another_run(self):
        self.train()
        self.train(run_dir="other", run_seed=8)
        self.assertNotEqual(self.losses("run")[0], self.losses("other")[0])

    def test_it_learns(self):
        self.train(train_max_steps=60)
        losses = self.losses()
        self.assertAlmostEqual(losses[0], 5.55, delta=0.15)  # ln 257, the loss of uniform probabilities
        self.assertLess(losses[-1], 3.3)


class Numbers(TrainerTest):
    """Compares the log with counts and with the checkpoints."""

    def masters(self, step):
        """Returns every weight of a single-rank checkpoint, in the file's order."""
        content = (self.step_dir(step) / "shard_0000.bin").read_bytes()
        values = array.array("f")
        for piece in self.manifest(step)["shards"][0]["pieces"]:
            if piece["tensor"].startswith("master."):
                values.frombytes(content[piece["file_offset"]:piece["file_offset"] + 4 * piece["count"]])
        return values

    def test_a_step_moves_the_weights_by_its_rate_times_its_gradient(self):
        self.train(train_max_steps=5, schedule_warmup_steps=4, checkpoint_every_steps=1, checkpoint_keep=9,
                   optim_name="sgd", optim_momentum=0, optim_weight_decay=0, optim_grad_clip=0)
        for record in self.records(kind="train")[1:]:
            before, after = self.masters(record["step"] - 1), self.masters(record["step"])
            moved = math.sqrt(sum((a - b) ** 2 for a, b in zip(before, after, strict=True)))
            self.assertAlmostEqual(moved / (record["lr"] * record["grad_norm"]), 1, delta=1e-3)

    def test_tokens_and_epochs(self):
        windows = int(re.search(r"(\d+) windows of 20", self.train())[1])
        for record in self.records(kind="train"):
            self.assertEqual(record["tokens"], record["step"] * 120)
            self.assertAlmostEqual(record["epoch"], record["step"] * 6 / windows, delta=1e-9)


class Weights(TrainerTest):
    def test_round_trip_through_hugging_face(self):
        self.train()
        self.run_trainer("export", "--hf", "run", "exported")
        self.train(run_dir="again", model_init_from="exported", optim_learning_rate=0, optim_weight_decay=0,
                   train_max_steps=1)
        self.run_trainer("export", "--hf", "again", "exported_again")
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            first, second = (self.dir / folder / name for folder in ("exported", "exported_again"))
            self.assertEqual(first.read_bytes(), second.read_bytes(), name)

    def test_weights_of_a_checkpoint(self):
        self.train(eval_every_steps=20)
        self.train(run_dir="again", model_init_from="run", optim_learning_rate=0, train_max_steps=1, eval_every_steps=1)
        self.assertEqual(self.records("again", "val")[0]["loss"], self.records("run", "val")[0]["loss"])

    def test_shapes_that_do_not_fit_are_refused(self):
        self.train(train_max_steps=2)
        self.run_trainer("export", "--hf", "run", "exported")
        for source, code in (("run", 65), ("exported", 78)):
            with self.subTest(source):
                said = self.train(run_dir="other", model_init_from=source, model_n_embd=24, expect=code)
                self.assertRegex(said, r"\b24\b")
                self.assertRegex(said, r"\b48\b")


class Threads(TrainerTest):
    @unittest.skipUnless(len(os.sched_getaffinity(0)) > 1, "one core: all threads are on it")
    @unittest.skipUnless(TRAINER.name == "train_gpt_cpu", "the GPU's trainer has no threads that compute")
    def test_binding_follows_openmp(self):
        """OpenMP binds the first thread to one core. Threads started by it must not inherit that."""
        config = self.write_config(train_max_steps=10**6)
        process = subprocess.Popen([TRAINER, config], cwd=self.dir, stdout=subprocess.DEVNULL,
                                   env={**ENVIRONMENT, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.wait_for_steps(process)
        cores = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        self.assertEqual({len(of_thread) for of_thread in cores}, {1})
        self.assertEqual(len(set().union(*cores)), 2, cores)

    @unittest.skipUnless(TRAINER.name == "train_gpt_cpu", "the GPU's trainer has no threads that compute")
    def test_threads_that_sleep_or_spin_have_the_same_bits(self):
        config, losses = self.write_config(train_max_steps=20), []
        for policy in "passive", "ACTIVE":
            self.run_trainer(config, "--fresh", OMP_WAIT_POLICY=policy, OMP_NUM_THREADS="2")
            losses.append([record["loss"] for record in self.records(kind="train")])
        self.assertEqual(losses[0], losses[1])

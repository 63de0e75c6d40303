"""What must not change a single bit of a run, and weights that go out and come back."""
import os

from trainer import TrainerTest


class SameBits(TrainerTest):
    def same_as_plain(self, run, precision, env=None, **changes):
        self.train(run_dir=run, env=env, train_precision=precision, **changes)
        self.assertEqual(self.losses(run), self.losses("run"))
        self.assertEqual(self.weights(20, run), self.weights(20, "run"))

    def for_each_precision(self, check):
        for precision, scale in (("fp32", 1.0), ("bf16", 1.0), ("fp16", 1024.0)):
            with self.subTest(precision):
                for run in self.dir.glob("run*"):
                    run.rename(self.dir / f"{len(list(self.dir.iterdir()))}.old")
                self.train(train_precision=precision, loss_scale_fixed=scale)
                check(precision, {"loss_scale_fixed": scale})

    def test_threads(self):
        def check(precision, scale):
            for threads in (1, 2, 4):
                env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                self.same_as_plain(f"run_{threads}", precision, env, **scale)
        self.for_each_precision(check)

    def test_recomputation(self):
        def check(precision, scale):
            for level in ("gelu", "norm", "block"):
                self.same_as_plain(f"run_{level}", precision, train_recompute=level, **scale)
        self.for_each_precision(check)

    def test_looking_at_it(self):
        self.train()
        self.same_as_plain("run_eval", "fp32", eval_every_steps=1)
        self.same_as_plain("run_save", "fp32", checkpoint_every_steps=1, checkpoint_keep=1)
        self.same_as_plain("run_sample", "fp32", sample_every_steps=3, sample_tokens=5, sample_prompt="To")
        self.same_as_plain("run_log", "fp32", log_every_steps=1)
        self.same_as_plain("run_silent", "fp32", data_val="", data_tokenizer="")

    def test_another_seed_is_another_run(self):
        self.train()
        self.train(run_dir="other", run_seed=8)
        self.assertNotEqual(self.losses("run")[0], self.losses("other")[0])

    def test_it_learns(self):
        self.train(train_max_steps=60)
        losses = self.losses()
        self.assertAlmostEqual(losses[0], 5.55, delta=0.15)  # ln 257, the loss of knowing nothing
        self.assertLess(losses[-1], 3.3)


class Weights(TrainerTest):
    def test_round_trip_through_hugging_face(self):
        self.train()
        self.run_trainer("export", "--hf", "run", "exported")
        self.train(run_dir="again", model_init_from="exported", optim_learning_rate=0, optim_weight_decay=0,
                   train_max_steps=1, schedule_warmup_steps=0)
        self.run_trainer("export", "--hf", "again", "exported_again")
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            first, second = (self.dir / folder / name for folder in ("exported", "exported_again"))
            self.assertEqual(first.read_bytes(), second.read_bytes(), name)

    def test_weights_of_a_checkpoint(self):
        self.train(eval_every_steps=20)
        self.train(run_dir="again", model_init_from="run", optim_learning_rate=0, train_max_steps=1,
                   schedule_warmup_steps=0, eval_every_steps=1)
        self.assertEqual(self.records("again", "val")[0]["loss"], self.records("run", "val")[0]["loss"])

    def test_shapes_that_do_not_fit_are_refused(self):
        self.train(train_max_steps=2, schedule_warmup_steps=0)
        self.run_trainer("export", "--hf", "run", "exported")
        for source in ("run", "exported"):
            with self.subTest(source):
                said = self.train(run_dir="other", model_init_from=source, model_n_embd=24, expect=65)
                self.assertRegex(said, r"\b24\b")
                self.assertRegex(said, r"\b48\b")

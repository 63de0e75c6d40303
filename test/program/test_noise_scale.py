"""log.noise_scale_every_steps: the records, at every ZeRO stage, and the bits of the run."""
import math

from trainer import TrainerTest

CONFIG = 78
DECAY = 0.95
SAME = {"schedule_name": "constant", "schedule_warmup_steps": 0, "optim_learning_rate": 0}  # the weights never change


class NoiseScale(TrainerTest):
    def scales(self, run="run"):
        return {r["step"]: r["noise_scale"] for r in self.records(run, "train") if "noise_scale" in r}

    def averaged(self, measurements):
        """The ratio of the averaged estimates, from (small norm, tokens, norm, tokens) of each measurement."""
        noise = signal = 0
        for small, small_tokens, large, tokens in measurements:
            noise = DECAY * noise + (1 - DECAY) * (small**2 - large**2) / (1 / small_tokens - 1 / tokens)
            signal = DECAY * signal + (1 - DECAY) * (tokens * large**2 - small_tokens * small**2) / (
                tokens - small_tokens)
        return noise / signal

    def test_values(self):
        """The gradient norms of runs with smaller batches of the same samples give the same value."""
        self.train(run_dir="small", train_total_batch_tokens=60, train_max_steps=8, **SAME)
        small = [r["grad_norm"] for r in self.records("small", "train")]
        self.train(train_max_steps=4, log_noise_scale_every_steps=2, **SAME)
        large = [r["grad_norm"] for r in self.records("run", "train")]
        expected = [(small[2], 60, large[1], 120), (small[6], 60, large[3], 120)]
        scales = self.scales()
        self.assertEqual(list(scales), [2, 4])
        for count, scale in enumerate(scales.values(), 1):
            self.assertTrue(math.isclose(scale, self.averaged(expected[:count]), rel_tol=1e-4), (scale, expected))

        # On two ranks, the mean of both ranks' first micro-batches: samples 0 to 2 and 6 to 8.
        ranks = ["--nproc", 2, "--fresh", "--set", "train.total_batch_tokens=240"]
        mean = math.sqrt((small[0]**2 + small[2]**2) / 2)
        for stage in (["parallel.zero_stage=0"], ["parallel.zero_stage=1"],
                      ["parallel.zero_stage=3", "--set", "parallel.deterministic_reduce=true"]):
            config = self.write_config(train_max_steps=1, log_noise_scale_every_steps=1, **SAME)
            self.run_trainer(config, *ranks, "--set", *stage)
            norm = self.records("run", "train")[0]["grad_norm"]
            self.assertTrue(math.isclose(self.scales()[1], self.averaged([(mean, 60, norm, 240)]), rel_tol=1e-4))

    def test_equal_samples_have_no_noise(self):
        """Text with a period of train.seq_len bytes has equal windows, and every batch the same gradient."""
        (self.dir / "equal.txt").write_text("abcdefghijklmnopqrs\n" * 400)
        self.run_trainer("prepare", "equal.txt", "--tokenizer", "bytes", "--minutes", 0, "--val-fraction", 0, "--out",
                         "equal")
        config = self.write_config(data_train="equal/train_*.bin", data_val="", train_total_batch_tokens=240,
                                   train_max_steps=1, log_noise_scale_every_steps=1)
        for ranks in (1, 2):
            for stage in range(4):
                self.run_trainer(config, "--nproc", ranks, "--fresh", "--set", f"parallel.zero_stage={stage}")
                self.assertLess(abs(self.scales()[1]), 0.01, (ranks, stage))

    def test_it_changes_no_bit_and_continues_after_a_resume(self):
        for stage, more in ((0, []), (1, ["--nproc", 2]), (2, ["--nproc", 2]),
                            (3, ["--nproc", 2, "--set", "parallel.deterministic_reduce=true"])):
            more = [*more, "--set", f"parallel.zero_stage={stage}"]
            changes = {"train_max_steps": 9, "train_total_batch_tokens": 240, "checkpoint_every_steps": 4,
                       "model_dropout": 0.1}
            self.run_trainer(self.write_config(run_dir="without", **changes), *more, "--fresh")
            config = self.write_config(log_noise_scale_every_steps=3, **changes)
            self.run_trainer(config, *more, "--fresh")
            self.assertEqual(self.weights(9), self.weights(9, "without"))
            scales = self.scales()
            self.assertEqual(list(scales), [3, 6, 9])
            self.run_trainer(config, *more, "--resume-step", 8)
            self.assertEqual(self.scales(), scales)

    def test_one_micro_step_is_refused(self):
        for args in (["--set", "train.total_batch_tokens=60"], ["--nproc", 2]):
            said = self.run_trainer(self.write_config(log_noise_scale_every_steps=5), *args, expect=CONFIG)
            self.assertIn("log.noise_scale_every_steps needs at least 2 micro-steps per step: train.total_batch_tokens",
                          said)
        self.assertFalse((self.dir / "run").exists())

"""The trainer on a GPU: its runs are reproducible and resume bit for bit, and its loss follows the CPU trainer's.

Not part of `make test`, which needs no GPU. scripts/gpu_check.py runs each test as a separate stage:
TRAINER=build/train_gpt python3 test/program gpu_trainer
"""
import os
import shutil
import subprocess

from trainer import ENVIRONMENT, ROOT, TRAINER, TrainerTest

CPU_TRAINER = ROOT / os.environ.get("CPU_TRAINER", "build/train_gpt_cpu")
STEPS = 30
# Head size 64, which the kernels are optimized for, and odd sizes, for which they must be correct.
MODELS = {
    "aligned": dict(model_n_head=2, model_n_embd=128, model_n_positions=64, train_seq_len=64, train_batch_size=4,
                    train_total_batch_tokens=512),
    "odd": dict(model_n_head=3, model_n_embd=48, model_n_positions=24, train_seq_len=20, train_batch_size=3,
                train_total_batch_tokens=120),
}
MODELS["llama"] = dict(MODELS["aligned"], model_family="llama", model_n_kv_head=1)
MODELS["custom"] = dict(MODELS["odd"], model_family="custom", model_activation="relu2", model_norm="rmsnorm",
                        model_norm_weight=False, model_norm_bias=False, model_position="rope", model_qk_norm="unit",
                        model_final_softcap=15, model_tie_embeddings=False, model_embedding_norm=True,
                        model_z_loss=1e-4, model_sliding_window=7, model_window_pattern="SL",
                        model_attention_softcap=20, data_document_mask=True)
UNIT_ROUNDOFF = {"fp32": 2**-24, "bf16": 2**-8, "fp16": 2**-11}


def settings_of(model, precision):
    scaling = dict(loss_scale_dynamic=True, loss_scale_initial=1024) if precision == "fp16" else {}
    return dict(MODELS[model], train_precision=precision, **scaling)


class GpuTrainer(TrainerTest):
    def curve(self, trainer, run, **changes):
        """Returns the losses of a run of the given trainer."""
        config = self.write_config(run_dir=run, train_max_steps=STEPS, optim_learning_rate=1e-3, **changes)
        result = subprocess.run([trainer, config, "--fresh"], cwd=self.dir, capture_output=True, text=True, timeout=60,
                                errors="replace", env=ENVIRONMENT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return self.losses(run)

    def test_two_runs_and_a_resumed_one_give_the_same_bits(self):
        for precision in UNIT_ROUNDOFF:
            settings = dict(settings_of("aligned", precision), checkpoint_every_steps=10)
            with self.subTest(precision):
                for run in ("first", "second", "resumed"):
                    shutil.rmtree(self.dir / run, ignore_errors=True)
                self.train(run_dir="first", **settings)
                self.train(run_dir="second", device_graphs=False, **settings)
                self.assertEqual(self.records("first"), self.records("second"))
                self.assertEqual(self.weights(20, "first"), self.weights(20, "second"))
                # The state that a run leaves if it dies after step 10.
                shutil.copytree(self.dir / "first", self.dir / "resumed")
                shutil.rmtree(self.step_dir(20, "resumed"))
                self.train("--resume", run_dir="resumed", **settings)
                self.assertEqual(self.records("first"), self.records("resumed"))
                self.assertEqual(self.weights(20, "first"), self.weights(20, "resumed"))

    def test_loss_curves_follow_the_cpu(self):
        for name in MODELS:
            cpu = {precision: self.curve(CPU_TRAINER, f"cpu_{precision}", **settings_of(name, precision))
                   for precision in UNIT_ROUNDOFF}
            # The distance between the bf16 and fp32 curves measures the effect of roundings of 2^-8; it scales with the
            # unit roundoff. Factor 2: both curves have such errors. In fp32, errors count that 16-bit roundings hide:
            # exp and tanh are accurate to 2^-22 only, and sums have another order; hence factor 64.
            moved = max(abs(a - b) for a, b in zip(cpu["bf16"], cpu["fp32"]))
            self.assertGreater(cpu["fp32"][0] - cpu["fp32"][-1], 0.5, "the model does not learn")
            for precision, unit in UNIT_ROUNDOFF.items():
                with self.subTest(f"{name} {precision}"):
                    gpu = self.curve(TRAINER, f"gpu_{precision}", **settings_of(name, precision))
                    bound = 2 * moved * unit / UNIT_ROUNDOFF["bf16"] * (64 if precision == "fp32" else 1)
                    worst = max(abs(a - b) for a, b in zip(gpu, cpu[precision]))
                    print(f"{name} {precision}: losses of {len(gpu)} steps within {worst:.2e} of the CPU's, "
                          f"bound {bound:.2e}", flush=True)
                    self.assertEqual(len(gpu), STEPS)
                    self.assertTrue(worst <= bound)

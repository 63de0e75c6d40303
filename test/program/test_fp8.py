"""train.precision fp8: the blocks' GEMMs with operands of 8 bits."""
import shutil
import subprocess

from test_simulated import SIMULATED
from trainer import ENVIRONMENT, TRAINER, TrainerTest

# Sizes are multiples of 16, as GEMMs of 8 bits require.
FP8 = {"model_n_embd": 64, "model_n_head": 4, "train_precision": "fp8", "train_batch_size": 8,
       "train_total_batch_tokens": 320, "train_max_steps": 12}


class Fp8(TrainerTest):
    def test_it_learns_like_bf16(self):
        """An operand of 8 bits has a relative error of at most 2^-4 (E4M3) or 2^-3 (E5M2), and the errors of the terms
        of a sum are independent. The losses stay close, and differ."""
        self.train("--fresh", **FP8)
        fp8 = self.losses()
        self.assertEqual({record["fp8_saturated"] for record in self.records(kind="train")}, {0})
        self.train("--fresh", **{**FP8, "train_precision": "bf16"})
        bf16 = self.losses()
        self.assertNotIn("fp8_saturated", self.records(kind="train")[0])
        self.assertNotEqual(fp8, bf16)
        self.assertLess(fp8[-1], fp8[0] - 0.5)
        for a, b in zip(fp8, bf16, strict=True):
            self.assertLess(abs(a - b), 0.03 * b)

    def test_zero_stages_have_the_same_bits(self):
        """The weights that a rank converts are whole at every stage."""
        states = []
        for stage in range(4):
            self.train("--nproc", "2", "--fresh", **{**FP8, "parallel_zero_stage": stage})
            states.append(self.logical_state(FP8["train_max_steps"], "run"))
        for state in states[1:]:
            self.assertEqual(state, states[0])

    def test_ranks_of_every_kind_learn(self):
        """Operands in parts: each part has a scale, so the bits differ, but not the losses."""
        self.train("--fresh", **FP8)
        expected = self.losses()
        for change in ({"parallel_tensor": 2}, {"parallel_pipeline": 2}, {"parallel_deterministic_reduce": True},
                       {"parallel_tensor": 2, "parallel_deterministic_reduce": True},
                       {"parallel_pipeline": 2, "parallel_pipeline_schedule": "zero_bubble"}):
            ranks = [] if list(change) == ["parallel_deterministic_reduce"] else ["--nproc", "2"]
            self.train(*ranks, "--fresh", **{**FP8, **change})
            for loss, one in zip(self.losses(), expected, strict=True):
                self.assertLess(abs(loss - one), 0.01 * one, change)

    def test_a_run_resumes(self):
        self.train("--fresh", **FP8, checkpoint_every_steps=6)
        expected = self.weights(12)
        shutil.rmtree(self.step_dir(12))
        self.train("--resume", **FP8, checkpoint_every_steps=6)
        self.assertEqual(self.weights(12), expected)

    def test_validation_and_generation_compute_in_bf16(self):
        """They take other sizes than multiples of 16, and give the same results during training and afterwards."""
        self.train("--fresh", **FP8, eval_every_steps=12, eval_batches=2, sample_every_steps=6, sample_tokens=5)
        loss = self.records(kind="val")[-1]["loss"]
        self.assertIn(f"loss {loss:.6f}", self.run_trainer("eval", "run", "--batches", "2"))
        self.run_trainer("eval", "run", "--batches", "2", "--batch", "1")
        self.run_trainer("sample", "run", "--prompt", "to be", "--tokens", "5")

    def test_a_simulated_gpu_computes_the_same(self):
        def losses(program, **changes):
            config = self.write_config(**{**FP8, "train_max_steps": 4, **changes})
            subprocess.run([program, config, "--fresh"], cwd=self.dir, check=True, timeout=300,
                           stdout=subprocess.PIPE, env=ENVIRONMENT)
            return self.losses()

        gpu = losses(SIMULATED)
        for cpu_loss, gpu_loss in zip(losses(TRAINER), gpu, strict=True):
            self.assertLess(abs(cpu_loss - gpu_loss), 0.01)
        self.assertEqual(losses(SIMULATED, train_recompute="block"), gpu)

    def test_sizes_that_gemms_of_8_bits_do_not_have(self):
        tokens = {"train_batch_size": 3, "train_total_batch_tokens": 60}
        said = self.run_trainer(self.write_config(**{**FP8, **tokens}), expect=78)
        self.assertRegex(said, 'train.precision "fp8" computes 60 tokens at a time.* multiple of 16')
        said = self.run_trainer(self.write_config(**{**FP8, "model_n_embd": 40, "model_n_head": 5}), expect=78)
        self.assertRegex(said, "needs multiples of 16 channels, but a linear layer has 120")

    def test_plan_counts_the_operands(self):
        config = self.write_config(**FP8)
        self.assertRegex(self.run_trainer("plan", config), "FP8 operands")
        self.assertNotRegex(self.run_trainer("plan", config, "--set=train.precision=bf16"), "FP8 operands")

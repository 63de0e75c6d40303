"""offload.*: arrays in host memory, with the bits and the traffic that are expected."""
import re
import shutil
import subprocess

from test_simulated import SIMULATED
from trainer import ENVIRONMENT, TrainerTest

# About 130,000 parameters: eight pieces in windows of the least size.
MODEL = {"model_n_layer": 3, "model_n_embd": 64, "model_n_head": 2, "train_precision": "bf16", "train_max_steps": 3,
         "train_batch_size": 1, "train_total_batch_tokens": 80, "offload_window_mb": 0}
SEEDS = range(3)
WORKSPACE = 80  # MiB of GPU memory for GEMMs
# All state in host memory, and blocks that pass through slots.
ALL = {"offload_optimizer": True, "offload_weights": True, "offload_gradients": True}
DEEP = {"model_n_layer": 5, "train_total_batch_tokens": 60, "train_max_steps": 2, "parallel_bucket_mb": 0}


class Offload(TrainerTest):
    def simulated(self, *flags, expect=0, memory=None, seed=0, **changes):
        """Trains on a simulated GPU with `memory` MiB; returns the output. `seed`: of the order in which streams
        advance; 0: they advance as late as possible."""
        environment = {**ENVIRONMENT, "SIMULATED_SEED": str(seed)}
        if memory:
            environment["SIMULATED_MEMORY"] = str(memory)
        run = subprocess.run([SIMULATED, self.write_config(**{**MODEL, **changes}), *(flags or ["--fresh"])],
                             cwd=self.dir, timeout=300, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=environment)
        self.assertEqual(run.returncode, expect, run.stdout)
        return run.stdout

    def results(self, steps=MODEL["train_max_steps"]):
        """The losses, norms and logical state of the run."""
        return [(record["loss"], record["grad_norm"]) for record in self.records(kind="train")], \
            self.logical_state(steps, "run")

    def planned(self, *settings):
        """Returns the bytes of the plan: on the device, on the host, to the device, to the host."""
        said = self.run_trainer("plan", "config.json", *settings)
        return [int(re.search(pattern, said)[1]) for pattern in (
            r"(?m)^total +(\d+) bytes", r"total, host +(\d+) bytes", r"offload +(\d+) bytes per step to the device",
            r"bytes per step to the device, (\d+) to the host")]

    def test_optimizer_on_a_simulated_gpu(self):
        """Copies overtake each other there as much as streams allow."""
        # The last: the second of the average's two pieces is a part of the matrices, of whose updates none has two.
        wide = {"model_family": "llama", "model_n_layer": 1, "model_vocab_size": 900,
                "model_tie_embeddings": True, "offload_window_mb": 1}
        # Each row of a basis has 40 barriers in SOAP's first step.
        narrow = {"model_n_layer": 1, "model_n_embd": 16, "model_n_head": 1}
        for name, more, seeds in (("adamw", {}, SEEDS), ("lamb", {}, SEEDS), ("muon", {}, SEEDS), ("muon", wide, SEEDS),
                                  ("soap", narrow, SEEDS[:1])):
            with self.subTest(name, more=more):
                changes = {"optim_name": name, "average_kind": "exponential", **more}
                self.simulated(**changes)
                expected = self.results()
                for seed in seeds:
                    self.simulated(**changes, seed=seed, offload_optimizer=True)
                    self.assertEqual(self.results(), expected)
                _, _, to_device, to_host = self.planned()
                for record in self.records(kind="train")[1:]:  # SOAP's first update changes no weights
                    self.assertEqual(record["offload_bytes"], to_device + to_host)

    def test_optimizer_at_every_zero_stage(self):
        changes = {"train_total_batch_tokens": 40, "train_max_steps": 2}
        self.simulated("--nproc", "2", "--fresh", **changes)
        expected = self.results(2)
        for stage in range(4):
            with self.subTest(stage):
                self.simulated("--nproc", "2", "--fresh", **changes, parallel_zero_stage=stage, offload_optimizer=True)
                self.assertEqual(self.results(2), expected)

    def test_weights_and_gradients_on_a_simulated_gpu(self):
        other = {"optim_name": "adafactor", "train_precision": "fp8", "train_batch_size": 4,
                 "train_total_batch_tokens": 160, "train_recompute": "block"}
        for more, seeds in ({}, SEEDS), (other, SEEDS[:1]):
            self.simulated(**{**DEEP, **more})
            expected = self.results(2)
            for seed in seeds:
                with self.subTest(more=more, seed=seed):
                    self.simulated(**{**DEEP, **more, **ALL, "offload_weights": seed != 1,
                                      "offload_gradients": seed != 2, "offload_activations": bool(more)}, seed=seed)
                    self.assertEqual(self.results(2), expected)
                    _, _, to_device, to_host = self.planned()
                    self.assertEqual(self.records(kind="train")[-1]["offload_bytes"], to_device + to_host)

    def test_activations_on_a_simulated_gpu(self):
        changes = {"model_n_layer": 4, "train_recompute": "block"}
        self.simulated(**changes)
        expected = self.results()
        for seed in SEEDS:
            self.simulated(**changes, seed=seed, offload_activations=True, offload_optimizer=seed > 0)
            self.assertEqual(self.results(), expected)
            _, _, to_device, to_host = self.planned()
            self.assertEqual(self.records(kind="train")[-1]["offload_bytes"], to_device + to_host)

    def test_activations_of_several_micro_steps_in_flight(self):
        """Each rank has two parts of the layers, and inputs of two micro-steps share the windows."""
        changes = {"model_n_layer": 4, "train_recompute": "block", "train_total_batch_tokens": 160,
                   "train_max_steps": 2, "parallel_pipeline": 2, "parallel_pipeline_schedule": "interleaved"}
        self.simulated("--nproc", "2", "--fresh", **changes)
        expected = self.results(2)
        for seed in SEEDS[:2]:
            self.simulated("--nproc", "2", "--fresh", **changes, seed=seed, offload_activations=True)
            self.assertEqual(self.results(2), expected)

    def test_activations_of_every_kind_of_ranks(self):
        changes = {**MODEL, "model_n_layer": 4, "train_recompute": "block", "train_total_batch_tokens": 160}
        long = {"model_n_positions": 64, "train_seq_len": 64, "train_total_batch_tokens": 256}
        for layout in ({"parallel_pipeline": 2}, {"parallel_tensor": 2}, {"parallel_context": 2, **long},
                       {"parallel_zero_stage": 3}):
            with self.subTest(layout):
                self.train("--nproc", "2", "--fresh", **{**changes, **layout})
                expected = self.results()
                self.train("--nproc", "2", "--fresh", **{**changes, **layout}, offload_activations=True)
                self.assertEqual(self.results(), expected)

    def test_activations_need_recomputation(self):
        said = self.run_trainer(self.write_config(**MODEL, offload_activations=True), expect=78)
        self.assertIn('train.recompute must be "block", is "none"', said)

    def test_a_gpu_without_memory_for_the_state(self):
        """The wide model's masters and moments have 29 MB. A GPU for all but them also has the GEMMs' workspace."""
        wide = {"model_n_embd": 256, "model_n_head": 4, "train_max_steps": 1}
        self.write_config(**MODEL | wide, offload_optimizer=True)
        on_device, on_host, *_ = self.planned()
        self.assertGreater(on_host, 28e6)
        memory = (on_device >> 20) + 2 + WORKSPACE
        said = self.simulated(expect=71, memory=memory, **wide)
        self.assertIn("not enough memory", said)
        self.assertIn("offload.optimizer", said)
        self.simulated(memory=memory, **wide, offload_optimizer=True)

    def test_a_gpu_with_a_tenth_of_the_state(self):
        """A deep model trains with less device memory than a tenth of its weights, gradients, masters and moments, not
        counting the GEMMs' workspace."""
        deep = {**ALL, "model_n_layer": 32, "model_n_embd": 128, "model_n_head": 2, "train_max_steps": 1,
                "train_recompute": "block", "offload_activations": True, "parallel_bucket_mb": 0}
        self.write_config(**MODEL | deep)
        on_device, on_host, *_ = self.planned()
        self.assertLess(on_device, on_host / 10)
        memory = (on_device >> 20) + 2 + WORKSPACE
        for key in "weights", "gradients":
            said = self.simulated(expect=71, memory=memory, **{**deep, f"offload_{key}": False})
            self.assertIn(f"offload.{key}", said)
        self.simulated(memory=memory, **deep)

    def test_weights_and_gradients_need_one_rank_and_the_optimizer(self):
        for key in "weights", "gradients":
            on = {f"offload_{key}": True}
            said = self.run_trainer(self.write_config(**MODEL, **on), expect=78)
            self.assertIn(f"offload.{key} needs offload.optimizer", said)
            said = self.run_trainer("--nproc", "2", self.write_config(
                **{**MODEL, "train_total_batch_tokens": 80, "offload_optimizer": True, **on}), expect=78)
            self.assertIn(f"offload.{key} supports one rank, not 2", said)
        said = self.run_trainer(self.write_config(**MODEL, **ALL, parallel_deterministic_reduce=True), expect=78)
        self.assertIn("offload.gradients does not support parallel.deterministic_reduce", said)

    def test_a_model_of_14_billion_parameters_fits_an_h200_with_128_gib_of_host_memory(self):
        config = self.write_config(
            model_family="qwen2", model_n_layer=48, model_n_head=40, model_n_kv_head=8, model_n_embd=5120,
            model_hidden_size_mlp=13824, model_n_positions=4096, model_vocab_size=152064, model_tie_embeddings=False,
            train_batch_size=1, train_seq_len=4096, train_total_batch_tokens=2**19, train_precision="bf16",
            train_recompute="block", optim_state_dtype="bf16", offload_optimizer=True, offload_activations=True)
        on_device, on_host, to_device, _ = self.planned()
        self.assertLess(on_device, 0.94 * 141 * 2**30)
        self.assertLess(on_host, 0.9 * 128 * 2**30)
        # Masters and moments of 14.8 billion parameters, and 48 inputs for each token.
        self.assertEqual(round(to_device / 1e9, 1), round(14.770034 * 8 + 2**19 * 48 * 5120 * 2 / 1e9, 1))

        def step_ms(state_dtype):
            said = self.run_trainer("plan", config, "--gpus=1", "--gpu=h200", f"--set=optim.state_dtype={state_dtype}")
            return float(re.search(r"(?m)^.* configured$", said)[0].split()[11])
        # Two moments in FP32 have 4 bytes per parameter more. PCIe 5.0 at the share of its rate that plan assumes.
        expected = 14.770034e9 * 4 / (64e9 * 363 / 450) * 1e3
        self.assertAlmostEqual(step_ms("fp32") - step_ms("bf16"), expected, delta=1)

    def test_a_model_of_7_billion_parameters_fits_24_gib(self):
        """Qwen2.5 7B's sizes, with all state in host memory."""
        self.write_config(
            **ALL, model_family="qwen2", model_n_layer=28, model_n_head=28, model_n_kv_head=4, model_n_embd=3584,
            model_hidden_size_mlp=18944, model_n_positions=4096, model_vocab_size=152064, model_tie_embeddings=False,
            train_batch_size=2, train_seq_len=4096, train_total_batch_tokens=2**17, train_precision="bf16",
            train_recompute="block", train_head_rows=1024, optim_state_dtype="bf16", offload_activations=True)
        on_device, on_host, *_ = self.planned()
        self.assertLess(on_device, 0.94 * 24 * 2**30)
        self.assertLess(on_host, 0.9 * 128 * 2**30)

    def test_a_run_resumes_with_and_without_offload(self):
        """The state in the checkpoint is the same, so the keys may change."""
        changes = {**MODEL, "checkpoint_every_steps": 2}
        self.train("--fresh", **changes)
        expected = self.weights(3)
        for first, then in ((False, True), (True, False), (True, True)):
            self.train("--fresh", **changes, **(ALL if first else {}))
            shutil.rmtree(self.step_dir(3))
            self.train("--resume", **changes, **(ALL if then else {}))
            self.assertEqual(self.weights(3), expected)

    def test_evaluation_sampling_and_export_of_the_average(self):
        changes = {**MODEL, "average_kind": "exponential", "eval_every_steps": 2, "eval_batches": 2,
                   "sample_every_steps": 2, "sample_tokens": 4}
        outputs = []
        for offload in ({}, {"offload_optimizer": True}, ALL):
            self.train("--fresh", **changes, **offload)
            outputs.append([self.records(), self.run_trainer("eval", "run", "--batches", "2"),
                            self.run_trainer("eval", "run", "--batches", "2", "--nproc", "2"),
                            self.run_trainer("sample", "run", "--tokens", "8", "--seed", "1")])
            for record in outputs[-1][0]:
                record.pop("offload_bytes", None)
            self.assertEqual(outputs[-1], outputs[0])

"""Grids of CPU ranks under mpirun: ranks that divide the layers (tensor parallelism) train as one rank does. `make
grids` runs more grids, models and steps."""
import array
import itertools
import json
import math
import os
import re
import shutil
import unittest

import llmc_file
import test_ranks
from test_families import SPEEDRUN
from trainer import TrainerTest

# Heads and key-value heads that 4 and 2 ranks divide, and 257 tokens: one rank has most of the padding. Two micro-steps
# of 40 rows on two ranks with different samples.
SHAPE = {"model_n_head": 4, "train_batch_size": 2, "train_seq_len": 20, "train_total_batch_tokens": 2 * 20 * 4,
         "optim_learning_rate": 1e-3}
FAMILIES = {
    "gpt2": {},
    "llama": dict(model_family="llama", model_n_kv_head=2, model_hidden_size_mlp=72),
    "qwen3": dict(model_family="qwen3", model_n_kv_head=2, model_head_size=20),
    "speedrun": SPEEDRUN,
}
LONG = "LONG" in os.environ
# Ranks along `tensor` and `data`, and the ZeRO stage.
GRIDS = [(2, 1, 0), (4, 1, 0), (2, 2, 2), *([(2, 2, 0), (2, 2, 1), (2, 2, 3), (4, 2, 3)] if LONG else [])]


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Grid(TrainerTest):
    train_on = test_ranks.Ranks.train_on

    def train_on_grid(self, grid, *flags, **changes):
        tensor, data, stage = grid
        return self.train_on(tensor * data, *flags, stage=stage, parallel_tensor=tensor, **{**SHAPE, **changes})

    def check_losses(self, run, other, limit=1e-6):
        for name in ("train", "val"):
            records, expected = self.records(run, kind=name), self.records(other, kind=name)
            self.assertEqual(len(records), len(expected))
            for record, one in zip(records, expected):
                self.assertLessEqual(abs(record["loss"] - one["loss"]), limit * one["loss"], (run, record, one))
                if name == "train":
                    self.assertAlmostEqual(record["grad_norm"] / one["grad_norm"], 1, delta=50 * limit, msg=run)

    def check_state(self, run, other, step, limit):
        """Compares the norms of differences. Does not compare bases, whose vectors may turn, nor what is in them."""
        state, expected = self.logical_values(step, run), self.logical_values(step, other)
        self.assertEqual(state.keys(), expected.keys())
        for name in state:
            if not name.startswith(("v.", "left_basis.", "right_basis.")):
                values, others = array.array("f", bytes(state[name])), array.array("f", bytes(expected[name]))
                self.assertLessEqual(math.dist(values, others), limit * math.hypot(*others), (run, name))

    def test_auto_takes_the_first_layout_of_plan(self):
        config = dict(SHAPE, train_max_steps=2, parallel_auto=True)
        first = re.search(r"^ *(\d+) +(\d+) +1 +(\d+) +(\d) ", self.run_trainer(
            "plan", self.write_config(**config), "--gpus", 2, "--gpu", "cpu"), re.M)
        data, pipeline, tensor, stage = map(int, first.groups())
        said = self.train_on(2, **config)
        self.assertIn(f"layout   data {data}, pipeline {pipeline}, context 1, tensor {tensor}, ZeRO {stage}: ", said)
        kept = json.loads((self.dir / "run/config.json").read_text())["parallel"]
        self.assertEqual([kept[key] for key in ("auto", "pipeline", "tensor", "zero_stage")],
                         [False, pipeline, tensor, stage])
        # A resumed run chooses again. With one sequence per step, data parallelism is impossible.
        self.train_on(4, "--resume", "--accept-changes", **{**config, "train_max_steps": 4})
        self.assertEqual(len(self.records(kind="train")), 4)
        said = self.train_on(2, run_dir="other", **{**config, "train_total_batch_tokens": 40})
        self.assertRegex(said, r"layout   data 1, ")
        for key, value in (("tensor", 2), ("pipeline", 2), ("zero_stage", 1), ("pipeline_layers", [1, 1])):
            said = self.run_trainer(self.write_config(**config, **{f"parallel_{key}": value}), expect=78)
            self.assertIn(f"parallel.auto chooses parallel.{key}, which must not be set", said)
        said = self.train_on(2, run_dir="none", expect=78, **{**config, "train_total_batch_tokens": 50})
        self.assertIn("no layout of 2 ranks is valid; train.total_batch_tokens (50) must be a multiple", said)

    def test_losses_match_one_rank(self):
        changes = dict(train_max_steps=30 if LONG else 6, eval_every_steps=3, eval_batches=3, model_dropout=0.1)
        self.train_on_grid((1, 1, 0), run_dir="one", **changes)
        for grid in GRIDS:
            with self.subTest(grid=grid):
                self.train_on_grid(grid, run_dir="grid{}{}{}".format(*grid), **changes)
                self.check_losses("grid{}{}{}".format(*grid), "one")

    def test_families_recomputation_and_precision(self):
        """Grouped queries, QK norm with and without weights, gates, soft caps, z-loss, windows and documents."""
        levels = ("none", "norm", "gelu", "block")
        for number, (name, family) in enumerate(FAMILIES.items()):
            dropout = 0 if name == "speedrun" else 0.1
            changes = dict(train_max_steps=4, eval_every_steps=4, model_dropout=dropout, **family)
            # A recomputed layer takes the paths of all levels, and the speedrun's model has the parts of most families.
            for precision, limit in (("fp32", 1e-6), *([("bf16", 2e-3)] if LONG or name == "speedrun" else [])):
                one = f"{name}_{precision}"
                self.train_on_grid((1, 1, 0), run_dir=one, train_precision=precision, **changes)
                for level in levels if LONG and precision == "fp32" else ("block",):
                    grid = ((2, 1, 0), (2, 2, 3))[(number + levels.index(level)) % 2]
                    with self.subTest(name, grid=grid, precision=precision, level=level):
                        run = f"{one}_{level}"
                        self.train_on_grid(grid, run_dir=run, train_precision=precision, train_recompute=level,
                                           **changes)
                        self.check_losses(run, one, limit)

    def test_grids_have_the_bits_of_one_rank(self):
        """With deterministic_reduce every sum that ranks divide has the same terms on one rank."""
        cases = [("gpt2", "bf16", (4, 1, 0), {}), ("qwen3", "fp32", (2, 2, 2), dict(train_recompute="block")),
                 ("speedrun", "bf16", (2, 1, 0), dict(train_head_rows=7)), ("llama", "fp32", (2, 1, 0), {})]
        for name, precision, grid, changes in cases:
            changes = dict(train_max_steps=4, checkpoint_every_steps=4, train_precision=precision,
                           parallel_deterministic_reduce=True, **FAMILIES[name], **changes)
            with self.subTest(name, grid=grid, precision=precision):
                self.train_on_grid((1, 1, 0), run_dir=f"one_{name}", **changes)
                self.train_on_grid(grid, run_dir=f"grid_{name}", **changes)
                self.assertEqual(self.records(f"grid_{name}"), self.records(f"one_{name}"))
                self.assertEqual(self.logical_state(4, f"grid_{name}"), self.logical_state(4, f"one_{name}"))

    # Key/value heads that two ranks share, and one that four share, with biases, QK norm and RoPE.
    SHARED = [((4, 1, 0), dict(model_family="qwen3", model_n_kv_head=2, model_head_size=16)),
              ((2, 2, 0), dict(model_family="llama", model_n_kv_head=1, model_head_size=16, model_n_layer=2,
                               parallel_pipeline=2, parallel_pipeline_schedule="zero_bubble")),
              ((4, 1, 0), dict(model_family="llama", model_n_kv_head=1, model_head_size=32,
                               model_attention_bias="qkv")),
              ((2, 2, 2), dict(model_family="qwen3", model_n_kv_head=1, model_head_size=16, train_precision="bf16",
                               train_recompute="block", optim_name="muon"))]

    def test_ranks_share_key_value_heads(self):
        changes = dict(train_max_steps=6, checkpoint_every_steps=3, checkpoint_keep=9, eval_every_steps=3,
                       model_dropout=0.1, sample_every_steps=3, sample_tokens=8, sample_temperature=0,
                       train_check_replicas_every=2)
        for number, (grid, family) in enumerate(self.SHARED):
            one, run = f"one{number}", f"shared{number}"
            with self.subTest(grid=grid, **family):
                limit = 2e-3 if family.get("train_precision") else 1e-6
                alone = {key: value for key, value in family.items() if not key.startswith("parallel")}
                self.train_on_grid((1, 1, 0), run_dir=one, **changes, **alone)
                self.train_on_grid(grid, run_dir=run, **changes, **family)
                self.check_losses(run, one, limit)
                # Each continues the other's third step.
                for source, target, options in ((one, grid, family), (run, (1, 1, 0), alone)):
                    self.copy_run(source, 6)
                    self.train_on_grid(target, "--resume", run_dir="to", **changes, **options)
                    self.check_losses("to", one, limit)

    def test_initial_weights_have_the_bits_of_one_rank(self):
        """A rate of almost 0 leaves them as they are, except biases, which are 0 at the beginning."""
        changes = dict(train_max_steps=1, optim_learning_rate=1e-30, optim_weight_decay=0, checkpoint_every_steps=1)
        for name, family in FAMILIES.items() if LONG else [("qwen3", FAMILIES["qwen3"])]:
            masters = []
            for grid in [(1, 1, 0), (4 if name == "gpt2" else 2, 1, 0), (2, 2, 3)]:
                run = "{}{}{}{}".format(name, *grid)
                self.train_on_grid(grid, run_dir=run, **changes, **family)
                masters.append({key: digest for key, digest in self.logical_state(1, run).items()
                                if key.startswith("master.") and not key.endswith(".bias")})
            self.assertEqual(masters[1], masters[0])
            self.assertEqual(masters[2], masters[0])

    def test_weights_in_formats_of_other_programs(self):
        """Transposed matrices, stacked ones in several tensors, and a part that is only the vocabulary's padding."""
        for name in ("gpt2", "llama", "qwen3") if LONG else ("gpt2", "qwen3"):
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            self.train_on_grid((2, 1, 0), run_dir="run", train_max_steps=3, **FAMILIES[name])
            self.run_trainer("export", "--hf", "run", name)
            if name == "gpt2":
                llmc_file.write_model(self.dir / name, self.dir / "model.bin")
            for source, grid in itertools.product((name, *(["model.bin"] if name == "gpt2" else [])),
                                                  ((4 if name == "gpt2" else 2, 1, 1, 0), (2, 2, 1, 3), (2, 1, 2, 0))):
                with self.subTest(source, grid=grid):
                    shutil.rmtree(self.dir / "new", ignore_errors=True)
                    changes = dict(model_init_from=source, train_max_steps=1, optim_learning_rate=0)
                    tensor, data, pipeline, stage = grid
                    self.train_on(tensor * data * pipeline, stage=stage, run_dir="new", parallel_tensor=tensor,
                                  parallel_pipeline=pipeline, **{**SHAPE, **FAMILIES[name], **changes})
                    state, expected = self.logical_state(1, "new"), self.logical_state(3, "run")
                    for key in state:
                        if key.startswith("master."):
                            self.assertEqual(state[key], expected[key], key)

    def test_any_grid_continues_the_checkpoint_of_any_other(self):
        changes = dict(train_max_steps=4, checkpoint_every_steps=2, checkpoint_keep=9)
        self.train_on_grid((1, 1, 0), run_dir="one", **changes)
        grids = [(1, 1, 0), (4, 1, 0), (2, 2, 3), *([(2, 2, 1), (1, 4, 2)] if LONG else [])]
        for grid in grids:
            self.train_on_grid(grid, run_dir="from{}{}{}".format(*grid), **changes)
            shutil.rmtree(self.step_dir(4, "from{}{}{}".format(*grid)))
        for source, target in itertools.permutations(grids, 2):
            with self.subTest(source=source, target=target):
                self.copy_run("from{}{}{}".format(*source))
                self.train_on_grid(target, "--resume", run_dir="to", **changes)
                self.check_losses("to", "one")

    def test_a_grid_repeats_its_bits(self):
        changes = dict(train_max_steps=4, checkpoint_every_steps=2, checkpoint_keep=9, model_dropout=0.1,
                       parallel_deterministic_reduce=True, train_precision="bf16", train_check_replicas_every=2)
        self.train_on_grid((2, 2, 1), run_dir="first", **changes)
        self.train_on_grid((2, 2, 3), run_dir="second", **changes)
        self.train_on_grid((2, 1, 0), run_dir="third", **changes)
        for run in ("second", "third"):
            self.assertEqual(self.records(run), self.records("first"))
            self.assertEqual(self.logical_state(4, run), self.logical_state(4, "first"))
        shutil.rmtree(self.step_dir(4, "first"))
        self.train_on_grid((2, 2, 0), "--resume", run_dir="first", **changes)
        self.assertEqual(self.records("first"), self.records("second"))
        self.assertEqual(self.logical_state(4, "first"), self.logical_state(4, "second"))

    def test_optimizers(self):
        """LAMB's and LARS's norms of a tensor are sums over its parts, as Adafactor's averages of rows and columns."""
        for optimizer, rate in (("lamb", 1e-2), ("adafactor", 1e-2), *([("lion", 1e-3), ("lars", 1)] if LONG else [])):
            changes = dict(train_max_steps=4, optim_name=optimizer, optim_learning_rate=rate, optim_weight_decay=0.1,
                           parallel_bucket_mb=0, checkpoint_every_steps=2, checkpoint_keep=9,
                           train_check_replicas_every=2)
            one = f"{optimizer}_one"
            self.train_on_grid((1, 1, 0), run_dir=one, **changes)
            for grid in ((4, 1, 0), (2, 2, 2)):
                with self.subTest(optimizer=optimizer, grid=grid):
                    run = "{}{}{}{}".format(optimizer, *grid)
                    self.train_on_grid(grid, run_dir=run, **changes)
                    self.check_losses(run, one)
                    self.check_state(run, one, 4, 1e-3)
            for source, grid in ((one, (4, 1, 0)), (run, (1, 2, 1))):
                with self.subTest(optimizer=optimizer, source=source, grid=grid):
                    self.copy_run(source, 4)
                    self.train_on_grid(grid, "--resume", run_dir="to", **changes)
                    self.check_losses("to", one)
                    self.check_state("to", one, 4, 1e-3)

    # Queries are larger than keys and values.
    STACKED = dict(model_family="llama", model_n_kv_head=2, model_hidden_size_mlp=72)
    # Optimizers of matrices, with the limit of the relative difference of losses. Roundings of gradients grow in them
    # as they do with several ranks and without deterministic_reduce: in 6 steps to 7e-7 (normuon) and 4e-5 (soap_muon)
    # of the loss, and to 3 % of a tensor (soap). Parts of a matrix in the wrong order change all of it.
    MATRICES = [("muon", 2e-6, {}, [(2, 1, 0), (2, 2, 0), (2, 2, 1), (4, 1, 0)]),
                ("normuon", 2e-6, STACKED, [(2, 1, 0), (2, 2, 0), (2, 2, 3)]),
                ("soap", 1e-4, {}, [(2, 1, 0), (2, 2, 3), (4, 1, 0)]),
                ("soap_muon", 1e-4, STACKED, [(2, 1, 0), (2, 2, 1)])]

    def test_optimizers_of_matrices(self):
        """Grids with the same `tensor` have the same bits, also if one continues another's checkpoint. Others have the
        losses of one rank."""
        for optimizer, limit, family, grids in self.MATRICES:
            changes = dict(train_max_steps=6, checkpoint_every_steps=3, checkpoint_keep=9, eval_every_steps=6,
                           eval_batches=2, optim_name=optimizer, parallel_bucket_mb=0,
                           parallel_deterministic_reduce=True, **family)
            one, first = f"{optimizer}110", f"{optimizer}210"
            self.train_on_grid((1, 1, 0), run_dir=one, **changes)
            for grid in grids:
                run = "{}{}{}{}".format(optimizer, *grid)
                with self.subTest(run=run):
                    self.train_on_grid(grid, run_dir=run, **changes)
                    self.check_losses(run, one, limit)
                    self.check_state(run, one, 6, 0.1)
                    if grid[0] == 2:
                        self.assertEqual(self.records(run), self.records(first))
                        self.assertEqual(self.logical_state(6, run), self.logical_state(6, first))
            for source, grid in ((first, (2, 2, 3)), (one, (2, 2, 1)), (run, (1, 2, 1))):
                with self.subTest(source=source, grid=grid):
                    self.copy_run(source, 6)
                    self.train_on_grid(grid, "--resume", run_dir="to", **changes)
                    self.check_losses("to", one, limit)
                    if source == first:
                        self.assertEqual(self.records("to"), self.records(first))
                        self.assertEqual(self.logical_state(6, "to"), self.logical_state(6, first))

    def test_traffic_of_matrices(self):
        """24 matrices of equal size, so that every rank owns as many. Rank 0 sends the halves of those that it does not
        own, but without shards only to owners that lack them, and the halves of results that others lack."""
        channels, sent = 96, {}
        for optimizer, grid in itertools.product(("adamw", "muon"), ((2, 1, 0), (2, 2, 0))):
            self.train_on_grid(grid, run_dir="run", train_max_steps=2, model_n_layer=4, model_n_embd=channels,
                               model_hidden_size_mlp=channels, optim_name=optimizer)
            sent[optimizer, grid] = self.records("run", "train", without=())[1]["comm_bytes"]
            shutil.rmtree(self.dir / "run")
        # (2, 1): 12 halves of other owners', 12 of results. (2, 2): 6 of rank 1's, 18 of results.
        for grid in ((2, 1, 0), (2, 2, 0)):
            self.assertEqual(sent["muon", grid] - sent["adamw", grid], 24 * 2 * channels**2 // 2)

    def test_samples_match_one_rank(self):
        changes = dict(train_max_steps=4, sample_every_steps=2, sample_tokens=8, sample_temperature=0)
        samples = []
        for grid in [(1, 1, 0), (2, 2, 3)]:
            run = "sample{}{}{}".format(*grid)
            self.train_on_grid(grid, run_dir=run, **changes)
            lines = (self.dir / run / "samples.jsonl").read_text().splitlines()
            samples.append([json.loads(line)["text"] for line in lines])
        self.assertEqual(len(samples[0]), 2)
        self.assertEqual(samples[1], samples[0])

    def test_sample_divides_the_layers(self):
        """Prompts of any length, more texts than ranks, texts that lose their beginning, and documents."""
        def texts(ranks, *options, expect=0):
            prompts = [word for prompt in ("A", "Second prompt", "") for word in ("--prompt", prompt)]
            return self.run_trainer("sample", "run", *prompts, "--tokens", 30, "--nproc", ranks, *options,
                                    expect=expect, **test_ranks.MPI_ENVIRONMENT)
        for name, family in FAMILIES.items() if LONG else [("llama", FAMILIES["llama"])]:
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            documents = dict(data_document_mask=True, data_document_token=10)
            self.train_on_grid((2, 1, 0), run_dir="run", train_max_steps=100, **{**documents, **family})
            for options in (("--temperature", 0), *(("--seed", seed, "--temperature", 2) for seed in range(3))):
                one = texts(1, *options)
                for ranks in (2, 4) if name in ("gpt2", "speedrun") else (2,):
                    with self.subTest(name, ranks=ranks, options=options):
                        self.assertEqual(texts(ranks, *options), one)
        self.assertIn("parallel.tensor must be a power of two up to 16, is 3", texts(3, expect=78))

    def test_memory_and_traffic(self):
        """A rank sends (t - 1) / t of B T C elements per collective. Each pass has 2 gathers and 2 sums per layer, and
        the backward pass 2 more gathers, of the inputs of qkv and fc. The embedding and the head add some."""
        layers, rows, channels, vocabulary = 4, 40, 96, 384
        for tensor in (2, 4):
            run = f"tensor{tensor}"
            said = self.train_on_grid((tensor, 1, 0), run_dir=run, train_max_steps=2, model_n_layer=layers,
                                      model_n_embd=channels, train_total_batch_tokens=rows)
            plan = self.run_trainer("plan", "config.json", "--gpus", tensor)
            regions = {name: int(size) for name, size in re.findall(r"^ +(\w+) +(\d+) bytes", plan, re.M)}
            total = int(re.search(r"^total +(\d+) bytes", plan, re.M)[1])
            self.assertIn(f"{total / 2**20:.1f} MiB", said)
            # The tensors that ranks divide, then the others; each tensor begins at a multiple of 128 elements, as does
            # each layer's part of an activation.
            divided = vocabulary * channels + layers * (12 * channels**2 + 7 * channels)
            others = 24 * channels + 2 * 128 + layers * 6 * 128
            self.assertAlmostEqual(regions["master"] / 4, divided / tensor + others, delta=layers * 128 * 2)
            self.assertEqual(regions["residual"], 4 * layers * -(-rows * channels // tensor // 128) * 128)
            whole = 4 * rows * channels
            summed = 4 * -(-(2 * channels + layers * 4 * channels) // (128 * tensor)) * 128 * tensor
            collectives = (1 + 4 * layers) + 1 + (1 + 6 * layers + 1)  # forward, head, backward
            sums_of_rows = 12 * rows * tensor
            expected = (collectives * whole + sums_of_rows + 2 * summed) * (tensor - 1) // tensor
            self.assertEqual(self.records(run, "train", without=())[1]["comm_bytes"], expected)
        # Two ranks with the same key/value head exchange the halves of it, and of its gradient.
        size, sent = 16, []
        for heads in (2, 1):
            self.train_on_grid((2, 1, 0), run_dir=f"kv{heads}", train_max_steps=2, model_n_layer=layers,
                               model_family="llama", model_head_size=size, model_n_kv_head=heads,
                               train_total_batch_tokens=rows)
            sent.append(self.records(f"kv{heads}", "train", without=())[1]["comm_bytes"])
        self.assertEqual(sent[1] - sent[0], 2 * layers * rows * size * 4)

    def test_grids_that_do_not_divide_the_model(self):
        for grid, changes, words in [
                ((2, 1, 0), dict(model_n_head=3), ("model.n_head (3)", "parallel.tensor (2)")),
                ((4, 1, 0), dict(model_n_kv_head=3, model_n_head=12, model_head_size=8),
                 ("model.n_kv_head (3)", "divides it is 1")),
                ((4, 1, 0), dict(model_n_kv_head=2, model_head_size=12, model_family="llama"),
                 ("model.n_kv_head (2)", "model.head_size to be a multiple of 16, is 12")),
                ((2, 1, 0), dict(model_hidden_size_mlp=75), ("model.hidden_size_mlp (75)",)),
                ((3, 1, 0), {}, ("power of two", "is 3")),
                ((2, 1, 0), dict(train_batch_size=1, train_seq_len=15, train_total_batch_tokens=60),
                 ("train.seq_len (15)", "parallel.tensor (2)")),
                ((2, 1, 0), dict(log_noise_scale_every_steps=1), ("log.noise_scale_every_steps",))]:
            with self.subTest(changes):
                said = self.train_on_grid(grid, expect=78, **changes)
                for word in words:
                    self.assertIn(word, said)
        said = self.train_on(3, expect=78, parallel_tensor=2, **SHAPE)
        self.assertIn("the number of ranks (3) must be a multiple of parallel.tensor (2)", said)

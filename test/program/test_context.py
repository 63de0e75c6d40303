"""Ring attention of CPU ranks under mpirun: ranks that divide every sequence (context parallelism) train as one rank
does. `make grids` runs more grids, models and levels of recomputation."""
import collections
import itertools
import json
import math
import re
import shutil
import signal
import unittest

import test_grid
import test_pipeline
import test_ranks
from ordered_pairs import as_lines
from trainer import TrainerTest

LONG = test_grid.LONG
# 4 ranks have 2 chunks of 16 tokens each. The windows and documents of these models end within a chunk, at its end and
# in another one.
SHAPE = {"model_n_head": 4, "model_n_layer": 2, "train_batch_size": 2, "train_seq_len": 128, "model_n_positions": 256,
         "train_total_batch_tokens": 2 * 128 * 4, "optim_learning_rate": 1e-3, "data_document_mask": True,
         "data_document_token": 10}
FAMILIES = {**test_grid.FAMILIES, "speedrun": {**test_grid.FAMILIES["speedrun"], "model_sliding_window": 23}}
Layout = collections.namedtuple("Layout", "context data tensor stages zero", defaults=(1, 1, 1, 0))
ONE = Layout(1)
LAYOUTS = [Layout(2), Layout(4), Layout(2, 2, zero=3), Layout(2, tensor=2), Layout(2, stages=2, zero=1),
           *([Layout(4, 2, zero=2), Layout(2, 2, 2, zero=3), Layout(2, 1, 2, 2), Layout(8)] if LONG else [])]
# Every division of 2, 4 and 8 ranks, with all ZeRO stages.
DIVISIONS = [Layout(*sizes, zero=(sizes[0] + sizes[2]) % (3 if sizes[3] > 1 else 4))
             for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) in (2, 4, 8)]


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Context(TrainerTest):
    train_on, check_end = test_ranks.Ranks.train_on, test_ranks.Ranks.check_end
    check_losses = test_grid.Grid.check_losses
    check_lost_rank = test_pipeline.Pipeline.check_lost_rank

    def train_as(self, layout, *flags, **changes):
        if not flags:
            shutil.rmtree(self.dir / changes["run_dir"], ignore_errors=True)
        return self.train_on(math.prod(layout[:4]), *flags, stage=layout.zero, parallel_context=layout.context,
                             parallel_tensor=layout.tensor, parallel_pipeline=layout.stages,
                             **{**test_pipeline.HANGS, **SHAPE, **changes})

    def test_losses_match_one_rank(self):
        """Positions, documents, dropout, evaluations, and the norm of the gradients of all ranks."""
        changes = dict(train_max_steps=4, eval_every_steps=2, eval_batches=3, model_dropout=0.1)
        if LONG:
            changes["train_seq_len"], changes["train_total_batch_tokens"] = 256, 2 * 256 * 4
        self.train_as(ONE, run_dir="one", **changes)
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                self.train_as(layout, run_dir="run", **changes)
                self.check_losses("run", "one")

    def test_families_recomputation_and_precision(self):
        """Rotary positions, grouped queries, windows and soft caps."""
        levels = ("none", "norm", "gelu", "block")
        for number, (name, family) in enumerate(FAMILIES.items()):
            changes = dict(train_max_steps=3, eval_every_steps=3, **family)
            for precision, limit in (("fp32", 1e-6), *([("bf16", 2e-3)] if LONG or name == "speedrun" else [])):
                self.train_as(ONE, run_dir=name, train_precision=precision, **changes)
                for level in levels if LONG else ("block",):
                    layout = (Layout(4), Layout(2, tensor=2, zero=0))[(number + levels.index(level)) % 2]
                    with self.subTest(name, layout=layout, precision=precision, level=level):
                        self.train_as(layout, run_dir="run", train_precision=precision, train_recompute=level,
                                      **changes)
                        self.check_losses("run", name, limit)

    def test_divisions_have_the_bits_of_one_rank(self):
        """With deterministic_reduce, sums over positions have the same terms on one rank. LONG: for 50 steps."""
        cases = [("gpt2", "bf16", [Layout(4), Layout(2, 2, zero=2)], dict(model_dropout=0.1, train_head_rows=24)),
                 ("qwen3", "fp32", [Layout(2, tensor=2)], dict(train_recompute="block")),
                 ("speedrun", "bf16", [Layout(2, stages=2)], dict(parallel_pipeline_schedule="zero_bubble")),
                 ("llama", "fp32", [Layout(8)], dict(optim_name="muon", model_n_kv_head=4))]
        if LONG:
            cases = [(name, precision, DIVISIONS, {}) for name in FAMILIES for precision in ("fp32", "bf16")]
        steps = 50 if LONG else 3
        for name, precision, layouts, changes in cases:
            changes = {**FAMILIES[name], **changes, "train_max_steps": steps, "checkpoint_every_steps": steps,
                       "train_precision": precision, "train_batch_size": 1, "train_seq_len": 256,
                       "train_total_batch_tokens": 8 * 256}
            if LONG:
                changes.update(model_n_layer=8, model_n_head=8, model_n_kv_head=8)
            if LONG and name == "llama":  # grouped queries
                changes.update(model_n_head=16, model_head_size=6)
            self.train_as(ONE, run_dir="plain", **changes)
            changes["parallel_deterministic_reduce"] = True
            self.train_as(ONE, run_dir="one", **changes)
            if not LONG:
                self.check_losses("one", "plain", 1e-6 if precision == "fp32" else 2e-3)
            for layout in layouts:
                with self.subTest(name, layout=layout, precision=precision):
                    self.train_as(layout, run_dir="run", **changes)
                    self.assertEqual(self.records("run"), self.records("one"))
                    self.assertEqual(self.logical_state(steps, "run"), self.logical_state(steps, "one"))

    def test_a_ring_repeats_its_bits_and_continues_any_checkpoint(self):
        changes = dict(train_max_steps=4, checkpoint_every_steps=2, checkpoint_keep=9, model_dropout=0.1,
                       parallel_deterministic_reduce=True, train_precision="bf16", train_check_replicas_every=2)
        self.train_as(Layout(2, 2, zero=1), run_dir="first", **changes)
        self.train_as(Layout(2, 2, zero=3), run_dir="second", **changes)
        self.assertEqual(self.records("second"), self.records("first"))
        self.assertEqual(self.logical_state(4, "second"), self.logical_state(4, "first"))
        for target in (Layout(2, 2, zero=2), ONE, Layout(1, 2, 2, zero=2), Layout(4, zero=1)):
            with self.subTest(target=target):
                self.copy_run("first", 4)
                self.train_as(target, "--resume", run_dir="to", **changes)
                self.assertEqual(self.records("to"), self.records("first"))
                self.assertEqual(self.logical_state(4, "to"), self.logical_state(4, "first"))

    def test_shorter_sequences_samples_and_questions(self):
        """Sequences of 64 tokens in the first steps. Samples and questions need single rows of a rank."""
        (self.dir / "questions.jsonl").write_text(as_lines(
            {"context": "the king said " * n, "choices": ["to him", "and", "or not"], "label": n % 3}
            for n in range(1, 8)))
        changes = dict(eval_every_steps=2, eval_batches=2, eval_questions="questions.jsonl", train_max_steps=4,
                       train_seq_ramp=[{"until_step": 2, "seq_len": 64}], sample_every_steps=2, sample_tokens=8,
                       sample_temperature=0, model_dropout=0.1)
        answers = []
        for number, layout in enumerate((ONE, Layout(2), Layout(2, 2, zero=3), Layout(2, tensor=2))):
            self.train_as(layout, run_dir=f"run{number}", **changes)
            lines = (self.dir / f"run{number}" / "samples.jsonl").read_text().splitlines()
            answers.append([*(json.loads(line)["text"] for line in lines), *self.records(f"run{number}", "questions")])
            self.check_losses(f"run{number}", "run0")
        self.assertEqual(len(answers[0]), 4)
        self.assertEqual(answers[1:], [answers[0]] * 3)

    def test_memory_and_traffic(self):
        """A rank has the activations of its tokens. It sends keys and values to the next rank in each step of the ring
        but the last, in both passes, and gradients of the chunks of keys that its queries saw, in FP32."""
        layers, channels, batch, length = 2, 48, 2, 128
        for context in (2, 4):
            run = f"context{context}"
            self.train_as(Layout(context), run_dir=run, train_max_steps=2, train_total_batch_tokens=batch * length)
            plan = self.run_trainer("plan", "config.json", "--gpus", context)
            regions = {name: int(size) for name, size in re.findall(r"^ +(\w+) +(\d+) bytes", plan, re.M)}
            rows = batch * length // context
            self.assertEqual(regions["residual"], 4 * layers * rows * channels)
            self.assertEqual(regions["ring_dkv"], 4 * rows * 2 * channels)
            kv = 4 * rows * 2 * channels  # of this rank, in FP32
            ring = (context - 1) * kv
            # Rank 0's queries see both chunks of every later rank.
            per_layer = ring + ring + (context - 1) * kv
            sent = [json.loads(line)["comm_bytes"] for line in
                    (self.dir / run / "metrics.jsonl").read_text().splitlines()]
            self.train_as(Layout(1, context), run_dir="replicas", train_max_steps=2,
                          train_total_batch_tokens=context * batch * length)
            data = [json.loads(line)["comm_bytes"] for line in
                    (self.dir / "replicas" / "metrics.jsonl").read_text().splitlines()]
            self.assertEqual(sent[1] - data[1], layers * per_layer)

    def test_a_lost_rank_is_reported_with_its_place(self):
        for rank, number in [(3, signal.SIGKILL), *((rank, signal.SIGSTOP) for rank in range(4))]:
            with self.subTest(rank=rank, number=number):
                place = f"(data {rank // 2}, context {rank % 2})"
                self.check_lost_rank(rank, number, place, parallel_context=2, **SHAPE)

    def test_layouts_that_do_not_divide_the_sequences(self):
        for ranks, changes, words in [
                (2, dict(train_seq_len=96, train_total_batch_tokens=2 * 96),
                 ("train.seq_len (96) must be a multiple of 32 times parallel.context (2)",)),
                (2, dict(train_seq_ramp=[{"until_step": 2, "seq_len": 32}]),
                 ("until step 2 (32)", "parallel.context (2)")),
                (2, dict(log_noise_scale_every_steps=1), ("log.noise_scale_every_steps", "parallel.context (2)")),
                (3, {}, ("the number of ranks (3) must be a multiple of parallel.context (2)",))]:
            with self.subTest(changes):
                said = self.train_on(ranks, expect=78, parallel_context=2, **{**SHAPE, **changes})
                for word in words:
                    self.assertIn(word, said)

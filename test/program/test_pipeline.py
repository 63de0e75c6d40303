"""Pipelines of CPU ranks under mpirun: ranks that have different layers train as one rank does, with
deterministic_reduce with the same bits. `make grids` runs more grids, models and steps."""
import collections
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import unittest

import test_grid
import test_ranks
from test_stragglers import rank_of
from trainer import TrainerTest, trainers_in

LONG = test_grid.LONG
# Four micro-steps on one rank, two on each of two with different samples.
SHAPE = {**test_grid.SHAPE, "model_n_layer": 8, "train_total_batch_tokens": 2 * 20 * (8 if LONG else 4)}
# One of two ranks has no part of a narrow tied embedding.
FAMILIES = {**test_grid.FAMILIES, "gpt2": dict(model_n_embd=16), "untied": dict(model_tie_embeddings=False)}
Layout = collections.namedtuple("Layout", "stages data tensor zero schedule layers", defaults=(1, 1, 0, "1f1b", ()))
LAYOUTS = [Layout(2), Layout(4, layers=(1, 4, 2, 1)), Layout(3, schedule="interleaved"),
           Layout(2, 2, 1, 2, "gpipe"), Layout(2, 1, 2), Layout(3, schedule="zero_bubble"),
           *([Layout(2, schedule="gpipe"), Layout(2, schedule="interleaved"), Layout(3), Layout(2, 2, 1, 1),
              Layout(4, 2, 1, 0), Layout(2, 2, 2, 2), Layout(2, 2, 2, 1, "interleaved"),
              Layout(4, 2, 1, 1, "zero_bubble"), Layout(2, 1, 2, 0, "zero_bubble")] if LONG else [])]
ONE = Layout(1)


def factorizations():
    """Every layout of 2, 4 and 8 ranks without context parallelism, with all ZeRO stages and schedules."""
    layouts = [Layout(stages, ranks // stages // tensor, tensor) for ranks in (2, 4, 8)
               for stages in (1, 2, 4, 8) for tensor in (1, 2, 4, 8) if stages * tensor <= ranks]
    for number, layout in enumerate(layouts):
        schedule = ("1f1b", "gpipe", "zero_bubble", "interleaved")[number % 4] if 1 < layout.stages < 8 else "1f1b"
        zero = number % (2 if schedule == "zero_bubble" else 3 if layout.stages > 1 else 4)
        yield layout._replace(zero=zero if layout.data > 1 else 0, schedule=schedule)


HANGS = dict(parallel_start_timeout_s=40, parallel_step_timeout_s=40)  # are reported within the limit of a test


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Pipeline(TrainerTest):
    train_on, check_end = test_ranks.Ranks.train_on, test_ranks.Ranks.check_end
    check_losses = test_grid.Grid.check_losses

    def train_as(self, layout, *flags, **changes):
        if not flags:
            shutil.rmtree(self.dir / changes["run_dir"], ignore_errors=True)
        return self.train_on(layout.stages * layout.data * layout.tensor, *flags, stage=layout.zero,
                             parallel_pipeline=layout.stages, parallel_tensor=layout.tensor,
                             parallel_pipeline_schedule=layout.schedule, parallel_pipeline_layers=layout.layers,
                             **{**HANGS, **SHAPE, **changes})

    def check_bits(self, run, other, step):
        self.assertEqual(self.records(run), self.records(other))
        self.assertEqual(self.logical_state(step, run), self.logical_state(step, other))

    def test_stages_have_the_bits_of_one_rank(self):
        """The sums of micro-steps, ranks and a tied embedding, and the norm that clips them. Dropout, documents and
        evaluations are in them, too. The masters in bf16 are rounded by random bits."""
        steps = 50 if LONG else 4
        changes = dict(train_max_steps=steps, checkpoint_every_steps=steps, eval_every_steps=steps // 2,
                       eval_batches=3, model_dropout=0.1, parallel_deterministic_reduce=True, data_document_mask=True,
                       data_document_token=10)
        for precision, others in (
                ("fp32", {}), ("bf16", dict(optim_master_dtype="bf16", optim_state_dtype="bf16")),
                *([("bf16", dict(model_tie_embeddings=False)), *itertools.product(
                    ("fp32", "bf16"), (FAMILIES[name] for name in ("llama", "qwen3", "speedrun")))] if LONG else [])):
            own = dict(changes, train_precision=precision, **others)
            if LONG:
                own.update(model_n_head=8, model_n_kv_head=8, model_n_embd=64)
            self.train_as(ONE, run_dir="one", **own)
            layouts = LAYOUTS if LONG or precision == "fp32" else LAYOUTS[2:]
            for layout in [*layouts, *(factorizations() if LONG else [])]:
                if layout.tensor == 1 or "optim_master_dtype" not in others:  # their random bits depend on parts
                    with self.subTest(layout=layout, precision=precision):
                        recompute = "block" if layout.stages == 2 and layout.schedule != "zero_bubble" else "none"
                        self.train_as(layout, run_dir="run", train_recompute=recompute, **own)
                        self.check_bits("run", "one", steps)

    def test_a_stage_is_far_ahead_of_the_next_one(self):
        """What it has sent is still there when the next stage takes it."""
        changes = dict(train_max_steps=4, train_batch_size=1, checkpoint_every_steps=4, model_tie_embeddings=False,
                       parallel_deterministic_reduce=True)
        self.train_as(ONE, run_dir="one", **changes)
        self.train_as(Layout(2, schedule="gpipe", layers=(1, 7)), run_dir="run", **changes)
        self.check_bits("run", "one", 4)

    def test_families_match_one_rank(self):
        """Tied embeddings, an embedding norm, grouped queries, windows and clipping."""
        for number, (name, family) in enumerate(FAMILIES.items()):
            changes = dict(train_max_steps=4, eval_every_steps=4, log_norms_every_steps=2, **family)
            self.train_as(ONE, run_dir=name, **changes)
            for layout in LAYOUTS if LONG else LAYOUTS[number % 3::3]:
                run = f"{name}_run"
                with self.subTest(name, layout=layout):
                    self.train_as(layout, run_dir=run, **changes)
                    self.check_losses(run, name)
                    norms = [self.records(one, "norms")[-1] for one in (run, name)]
                    for kind in ("grad_norms", "activation_rms"):
                        self.assertEqual(norms[0][kind].keys(), norms[1][kind].keys())
                        for key, norm in norms[1][kind].items():
                            # An activation's are of a rank's own rows.
                            if kind == "grad_norms" or layout.data * layout.tensor == 1:
                                self.assertAlmostEqual(norms[0][kind][key], norm, delta=1e-4 * norm, msg=key)

    def test_optimizers(self):
        """Layers, matrices and factors of a stage, and their checkpoint."""
        limits = {"lamb": 1e-6, "adafactor": 1e-6, "muon": 2e-6, **({"soap": 1e-4, "normuon": 2e-6} if LONG else {})}
        for optimizer, limit in limits.items():
            changes = dict(train_max_steps=4, checkpoint_every_steps=4, optim_name=optimizer,
                           parallel_deterministic_reduce=True)
            self.train_as(ONE, run_dir=optimizer, **changes)
            for layout in (Layout(3), Layout(2, 2, 1, 2), Layout(2, 1, 2)):
                with self.subTest(optimizer, layout=layout):
                    self.train_as(layout, run_dir="run", **changes)
                    if layout.tensor == 1:
                        self.check_bits("run", optimizer, 4)
                    else:
                        self.check_losses("run", optimizer, limit)

    def test_any_layout_continues_the_checkpoint_of_any_other(self):
        changes = dict(train_max_steps=4, checkpoint_every_steps=2, checkpoint_keep=9, train_check_replicas_every=2)
        layouts = [ONE, *LAYOUTS] if LONG else [ONE, Layout(3, schedule="interleaved"), Layout(2, 2, 1, 2),
                                                Layout(2, 1, 2)]
        for number, layout in enumerate(layouts):
            self.train_as(layout, run_dir=f"from{number}", **changes)
            shutil.rmtree(self.step_dir(4, f"from{number}"))
        for source, target in itertools.permutations(range(len(layouts)), 2):
            with self.subTest(source=layouts[source], target=layouts[target]):
                self.copy_run(f"from{source}")
                self.train_as(layouts[target], "--resume", run_dir="to", **changes)
                self.check_losses("to", "from0")

    def test_samples_match_one_rank(self):
        changes = dict(train_max_steps=2, sample_every_steps=2, sample_tokens=8, sample_temperature=0)
        samples = []
        for layout in (ONE, Layout(3), Layout(2, 1, 2)):
            self.train_as(layout, run_dir="run", **changes)
            lines = (self.dir / "run" / "samples.jsonl").read_text().splitlines()
            samples.append([json.loads(line)["text"] for line in lines])
        self.assertEqual(len(samples[0]), 1)
        self.assertEqual(samples[1:], [samples[0]] * 2)

    def test_memory_and_traffic(self):
        """A stage keeps the activations of the micro-steps in flight, and sends B T C elements for each of them to each
        neighbor; the last stage has the logits."""
        rows, channels, micro_steps = 40, 48, 4
        for layout in (Layout(2, layers=(6, 2)), Layout(2, schedule="gpipe", layers=(2, 6)),
                       Layout(3, layers=(1, 2, 5))):
            with self.subTest(layout=layout):
                self.train_as(layout, run_dir="run", train_max_steps=2, model_tie_embeddings=False,
                              train_total_batch_tokens=micro_steps * rows)
                plan = self.run_trainer("plan", "config.json")
                stage = int(re.search(r"^stage (\d) of 0 to", plan)[1])
                in_flight = 4 if layout.schedule == "gpipe" else layout.stages - stage
                regions = {name: int(size) for name, size in re.findall(r"^ +(\w+) +(\d+) bytes", plan, re.M)}
                whole = 4 * rows * channels
                self.assertEqual(regions["residual"], in_flight * layout.layers[stage] * whole)
                self.assertEqual("logits" in regions, stage == layout.stages - 1)
                sent = [json.loads(line)["comm_bytes"] for line in
                        (self.dir / "run" / "metrics.jsonl").read_text().splitlines()]
                self.assertEqual(sent[1], micro_steps * whole)  # of rank 0, whose only neighbor is the next stage

    def check_lost_rank(self, rank, number, place, ranks=4, **changes):
        """Sends this signal to a rank; the others must report it with this text of its place."""
        shutil.rmtree(self.dir / "run", ignore_errors=True)
        config = self.write_config(**changes, train_max_steps=10**6, parallel_silence_s=3)
        process = subprocess.Popen(test_ranks.mpirun(ranks, config), cwd=self.dir, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=test_ranks.MPI_ENVIRONMENT)
        self.addCleanup(process.kill)
        self.wait_for_steps(process)
        pids = sorted(trainers_in(self.dir), key=rank_of)
        os.kill(pids[rank], number)
        codes = (76, 128 + 9) if number == signal.SIGKILL else (76, 80, 128 + 9)
        self.check_end(process, pids, pids[rank], 30, codes, f"rank {rank} {place} on ")

    def test_a_lost_rank_is_reported_with_its_place(self):
        for rank, number in [(3, signal.SIGKILL), *((rank, signal.SIGSTOP) for rank in range(4))]:
            with self.subTest(rank=rank, number=number):
                self.check_lost_rank(rank, number, f"(data 0, pipeline {rank // 2}, tensor {rank % 2})",
                                     parallel_pipeline=2, parallel_tensor=2, **SHAPE)

    def test_layouts_that_do_not_divide_the_model(self):
        for ranks, changes, words in [
                (4, dict(parallel_pipeline=4, model_n_layer=3), ("parallel.pipeline (4)", "model.n_layer (3)")),
                (2, dict(parallel_pipeline=2, parallel_pipeline_layers=[3, 2]),
                 ("parallel.pipeline_layers", "8")),
                (2, dict(parallel_pipeline=2, parallel_pipeline_layers=[6]), ("parallel.pipeline_layers", "2")),
                (2, dict(parallel_pipeline=2, stage=3), ("parallel.zero_stage", "parallel.pipeline (2)")),
                (2, dict(parallel_pipeline=2, parallel_pipeline_schedule="zero_bubble", train_recompute="norm",
                         stage=2),
                 ('must be "none", is "norm"', "parallel.zero_stage (2) must be at most 1")),
                (3, dict(parallel_pipeline=2), ("the number of ranks (3)", "parallel.pipeline (2)"))]:
            with self.subTest(changes):
                said = self.train_on(ranks, expect=78, **{**SHAPE, **changes})
                for word in words:
                    self.assertIn(word, said)

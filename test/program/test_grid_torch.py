"""Grids of CPU ranks under mpirun, and one rank, have the losses and gradient norms that PyTorch had in
test/recorded/torch/grids.json. `make grids` trains each model on every grid."""
import collections
import itertools
import json
import math
import shutil
import sys
import unittest

import test_grid
import test_pipeline
import test_ranks
from trainer import ROOT, TrainerTest

RECORDED = ROOT / "test/recorded/torch"
sys.path.insert(0, str(RECORDED))
import grid_models

LONG = test_grid.LONG
EXPECTED = json.loads((RECORDED / "grids.json").read_text())
Layout = collections.namedtuple("Layout", "stages context tensor data zero schedule deterministic",
                                defaults=(1, 1, 1, 1, 0, "1f1b", False))
ONE = Layout()
SCHEDULES = {1: ["1f1b"], 2: ["1f1b", "interleaved", "zero_bubble", "gpipe"], 4: ["gpipe", "1f1b", "zero_bubble"]}
CASES = [("fp32", "gpt2", ONE), ("fp32", "llama", ONE), ("fp32", "qwen3", ONE),
         ("fp32", "llama", Layout(tensor=4)),
         ("fp32", "gpt2", Layout(stages=2, tensor=2)),
         ("fp32", "qwen3", Layout(context=2, data=2, zero=3, deterministic=True)),
         ("fp32", "llama", Layout(stages=2, data=2, zero=1, schedule="gpipe", deterministic=True)),
         ("fp32", "qwen3", Layout(stages=2, tensor=2, data=2, zero=2, schedule="interleaved")),
         ("fp32", "gpt2", Layout(stages=2, context=2, tensor=2, schedule="zero_bubble")),
         ("bf16", "qwen3", Layout(context=2, tensor=2)),
         ("bf16", "gpt2", Layout(stages=2, data=2, zero=1, deterministic=True))]


def all_grids():
    """Returns one rank and every grid of 2, 4 and 8 ranks that divides 4 layers, 4 heads and 128 tokens, with all ZeRO
    stages and schedules."""
    layouts = [ONE]
    for stages, context, tensor, data in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        number = len(layouts)
        if stages * context * tensor * data not in (2, 4, 8):
            continue
        schedule = SCHEDULES[stages][number % len(SCHEDULES[stages])]
        most = 4 if stages == 1 else 2 if schedule == "zero_bubble" else 3
        layouts.append(Layout(stages, context, tensor, data, number % most if data * context > 1 else 0, schedule))
    return layouts


LONG_CASES = [(precision, name, layout._replace(deterministic=deterministic))
              for precision, deterministic in (("fp32", False), ("fp32", True), ("bf16", False))
              for name in EXPECTED for layout in all_grids()]


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class GridTorch(TrainerTest):
    train_on = test_ranks.Ranks.train_on

    def setUp(self):
        super().setUp()
        grid_models.write_text(self.dir / "text.bin")
        for name in grid_models.MODELS:
            grid_models.write_model(name, self.dir / name)

    def train_as(self, precision, name, layout):
        keys = {f"model_{key}": value for key, value in grid_models.keys_of(name).items()}
        shutil.rmtree(self.dir / "run", ignore_errors=True)
        self.train_on(
            math.prod(layout[:4]), stage=layout.zero, **test_pipeline.HANGS, **keys, model_init_from=name,
            model_vocab_size=grid_models.VOCABULARY, model_n_positions=grid_models.SEQ_LEN, data_train="text.bin",
            data_val="", data_tokenizer="", train_max_steps=grid_models.STEPS, train_batch_size=1,
            train_seq_len=grid_models.SEQ_LEN, train_total_batch_tokens=grid_models.SEQUENCES * grid_models.SEQ_LEN,
            train_precision=precision, optim_learning_rate=grid_models.LEARNING_RATE,
            optim_beta1=grid_models.BETAS[0], optim_beta2=grid_models.BETAS[1], optim_eps=grid_models.EPS,
            optim_weight_decay=grid_models.WEIGHT_DECAY, optim_grad_clip=grid_models.GRAD_CLIP,
            schedule_name="constant", schedule_warmup_steps=0, parallel_pipeline=layout.stages,
            parallel_context=layout.context, parallel_tensor=layout.tensor,
            parallel_pipeline_schedule=layout.schedule, parallel_deterministic_reduce=layout.deterministic)

    def check(self, precision, name, layout):
        """Compares with PyTorch. A limit is 3 times the error of PyTorch in this precision, at least 1e-6."""
        with self.subTest(name, precision=precision, layout=layout):
            self.train_as(precision, name, layout)
            records, expected = self.records("run", "train"), EXPECTED[name]
            self.assertEqual(len(records), grid_models.STEPS)
            for key in ("loss", "grad_norm"):
                errors = [abs(record[key] / value - 1) for record, value in zip(records, expected[key])]
                limit = max(1e-6, 3 * expected[f"{precision}_error"][key])
                self.assertLessEqual(max(errors), limit, f"{key} in step {errors.index(max(errors)) + 1}")

    def test_grids_have_the_losses_of_pytorch(self):
        for precision, name, layout in LONG_CASES if LONG else CASES:
            self.check(precision, name, layout)

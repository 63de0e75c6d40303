"""CUDA graphs: passes that are replayed on the simulated GPU train with the same bits as passes that are queued."""
import re
import subprocess

from test_simulated import SIMULATED
from trainer import ENVIRONMENT, TrainerTest

MICRO_STEPS, STEPS = 4, 4


class Graphs(TrainerTest):
    def trained(self, *flags, graphs, **changes):
        """Returns the records of the steps and the last shards, and of one rank the numbers of graphs, launches, graphs
        at a time and waits of the host."""
        changes = {"model_n_layer": 1, "train_max_steps": STEPS, "train_batch_size": 1, "train_precision": "bf16",
                   "train_total_batch_tokens": MICRO_STEPS * 20, **changes}
        run = subprocess.run([SIMULATED, self.write_config(device_graphs=graphs, **changes), "--fresh", *flags],
                             cwd=self.dir, check=True, timeout=200, capture_output=True, text=True,
                             env={**ENVIRONMENT, "SIMULATED_COUNTS": "1"})
        counts = re.findall(r"simulated GPU: (\d+) graphs, launched (\d+) times, at most (\d+) kept; (\d+) waits",
                            run.stderr)[-1]
        shards = [path.read_bytes() for path in sorted(self.step_dir(changes["train_max_steps"]).glob("shard_*.bin"))]
        return (self.records("run", "train"), shards), *map(int, counts)

    def check(self, graphs, launches, *flags, most=None, **changes):
        """Trains with graphs and without. `most`: of the graphs at a time; None: all."""
        queued, *no_graphs, queued_waits = self.trained(*flags, graphs=False, **changes)
        replayed, *counts, waits = self.trained(*flags, graphs=True, **changes)
        self.assertEqual(no_graphs, [0, 0, 0])
        self.assertEqual(counts, [graphs, launches, graphs if most is None else most])
        self.assertEqual((replayed, waits), (queued, queued_waits))

    def test_micro_steps(self):
        """Of 16 forward passes all but the first are launches of a graph. So are all but the first of the 4 backward
        passes that overwrite the gradients, and of the 12 that add to them."""
        self.check(3, 15 + 3 + 11)

    def test_recomputation_and_fp16(self):
        self.check(3, 29, train_recompute="block", train_precision="fp16", loss_scale_dynamic=True)

    def test_dropout_and_documents(self):
        self.check(3, 29, model_dropout=0.2, data_document_mask=True)

    def test_the_deterministic_sum(self):
        """The backward passes of micro-steps 0 to 3 differ: their sums go to other places."""
        self.check(5, 15 + 4 * 3, parallel_deterministic_reduce=True)

    def test_ramps(self):
        """A step of two micro-steps, then four with short sequences, then twice four with whole ones: other scales."""
        self.check(6, 1 + 3 + 7 + 1 + 2 + 5, most=3, train_seq_ramp=[{"until_step": 2, "seq_len": 10}],
                   train_batch_ramp=[{"until_step": 1, "total_batch_tokens": 40}])

    def test_passes_that_the_host_reads(self):
        """A measured forward pass is queued, and evaluations and samples come between the passes."""
        self.check(3, 15 - 2 + 3 + 11, log_norms_every_steps=2, eval_every_steps=2, eval_batches=1)

    def test_ranks(self):
        """The first micro-step of a step may wait for parameters, and the last one's gradients are summed."""
        for stage in (0, 1):
            self.check(2, 2 * (2 * STEPS - 1), "--nproc", "2", parallel_zero_stage=stage,
                       train_total_batch_tokens=2 * MICRO_STEPS * 20)
        self.check(0, 0, "--nproc", "2", parallel_zero_stage=2, train_total_batch_tokens=2 * MICRO_STEPS * 20)

    def test_the_host_waits_once_per_step(self):
        few, many = (self.trained(graphs=True, model_dropout=0.2, data_document_mask=True, train_max_steps=steps)[-1]
                     for steps in (STEPS, 2 * STEPS))
        self.assertEqual(many - few, STEPS)

"""--profile: the trace matches the format, the model's shapes and the run's records, and changes no bit of the run."""
import json
import os
import shutil
import subprocess
import unittest
from collections import Counter
from pathlib import Path

from test_ranks import MPI_ENVIRONMENT
from test_simulated import SIMULATED
from trainer import ENVIRONMENT, ROOT, TINY, TRAINER, TrainerTest

HOST, DEVICE, COMMUNICATION = 1, 2, 3
LAYERS, WIDTH, LENGTH = TINY["model"]["n_layer"], TINY["model"]["n_embd"], TINY["train"]["seq_len"]
ROWS = -(-TINY["model"]["vocab_size"] // 128) * 128  # of the padded embedding
MATRICES = 12 * LAYERS * WIDTH ** 2 + ROWS * WIDTH
# Launches per micro-step, and additional ones per step.
LINEAR = 4 * LAYERS + 1
MICRO_STEP = {"embedding_forward": 1, "residual_norm_forward": 2 * LAYERS + 1, "matmul_forward": LINEAR,
              "attention_forward": LAYERS, "cross_entropy": 1, "loss_sum": 1, "norm_backward": 2 * LAYERS + 1,
              "matmul_backward_input": LINEAR, "matmul_backward_weight": LINEAR, "attention_backward": LAYERS,
              "embedding_backward": 1}
UPDATE = {"squared_sums": 1, "grad_norm_finish": 1, "elementwise_update": 1}
PHASES = {"train_max_steps": 6, "eval_every_steps": 4, "eval_batches": 1, "checkpoint_every_steps": 4}


class Event:
    def __init__(self, fields):
        self.name, self.lane, self.rank, self.args = fields["name"], fields["tid"], fields["pid"], fields["args"]
        self.begin, self.ns = round(fields["ts"] * 1000), round(fields["dur"] * 1000)
        self.end = self.begin + self.ns

    def holds(self, other):
        return self.begin <= other.begin and other.end <= self.end


class ProfileTest(TrainerTest):
    def trace(self, steps, rank=0, run="run"):
        """Returns the spans of a rank's file and its "otherData", after checking the file against the format's
        description (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "JSON Object Format")."""
        path = self.dir / run / "profile" / f"rank_{rank}.steps_{steps}.json"
        trace = json.loads(path.read_text())
        self.assertIn(trace["displayTimeUnit"], ("ms", "ns"))
        self.assertLessEqual(set(trace), {"traceEvents", "displayTimeUnit", "otherData"})
        lanes, named = {}, set()
        for fields in trace["traceEvents"]:
            self.assertIsInstance(fields["name"], str)
            self.assertEqual(fields["pid"], rank)
            if fields["ph"] == "M":
                self.assertIn(fields["name"], ("process_name", "thread_name"))
                self.assertIsInstance(fields["args"]["name"], str)
                if fields["name"] == "thread_name":
                    named.add(fields["tid"])
            else:
                self.assertEqual(fields["ph"], "X")
                self.assertGreaterEqual(min(fields["ts"], fields["dur"]), 0)
                lanes.setdefault(fields["tid"], []).append(Event(fields))
        self.assertLessEqual(set(lanes), named)
        for lane, events in lanes.items():
            open_events = []  # spans of a lane are nested or disjoint
            for event in sorted(events, key=lambda e: (e.begin, -e.end)):
                while open_events and open_events[-1].end <= event.begin:
                    open_events.pop()
                self.assertTrue(not open_events or lane == HOST and open_events[-1].holds(event),
                                f"{event.name} overlaps {open_events[-1].name if open_events else None}")
                open_events.append(event)
        return lanes, trace["otherData"]

    def check_ops(self, lanes, other, steps, micro_steps, tokens):
        """Requires each op as often as in the model, with FLOPs and roofline fractions that follow from the shapes."""
        ops = [e for e in lanes[DEVICE] if e.args["step"] > 0 and "shape" in e.args]
        expected = Counter({name: count * micro_steps for name, count in MICRO_STEP.items()}) + Counter(UPDATE)
        self.assertEqual(Counter((e.args["step"], e.name.split()[0]) for e in ops),
                         Counter({(step, name): count for step in steps for name, count in expected.items()}))
        for layer in range(LAYERS):
            of_layer = Counter(e.name for e in ops if e.args.get("layer") == layer)
            each = len(steps) * micro_steps
            for name in ("qkv", "attn_proj", "fc", "fc_proj"):
                for op in ("matmul_forward", "matmul_backward_input", "matmul_backward_weight"):
                    self.assertEqual(of_layer[f"{op} {name}.weight"], each)
            self.assertEqual(of_layer["residual_norm_forward norm1.weight"], each)
        self.assertEqual({e.name for e in ops if "layer" not in e.args},
                         {"embedding_forward", "residual_norm_forward norm_f.weight", "matmul_forward wte",
                          "cross_entropy", "loss_sum", "matmul_backward_weight wte", "matmul_backward_input wte",
                          "norm_backward norm_f.weight", "embedding_backward", *UPDATE})
        # See docs/profiling.md: of the convention's 6 N, only matrices are GEMMs. Attention's backward pass computes
        # five GEMMs where the convention counts four.
        flops = sum(e.args["flops"] for e in ops) / (tokens * len(steps))
        self.assertEqual(flops, 6 * MATRICES + 7 * LAYERS * WIDTH * LENGTH)
        vectors = LAYERS * 13 * WIDTH + 2 * WIDTH + TINY["model"]["n_positions"] * WIDTH
        self.assertEqual(other["model_flops_per_token"], 6 * (MATRICES + vectors) + 6 * LAYERS * WIDTH * LENGTH)
        for e in ops:
            compute, memory = e.args["flops"] / other["roofline_flops_per_s"], e.args["bytes"] / other[
                "roofline_bytes_per_s"]
            self.assertEqual(e.args["bound"], "compute" if compute > memory else "memory")
            if e.ns > 1000:
                self.assertAlmostEqual(e.args["roofline_share"] / (max(compute, memory) / e.ns * 1e9), 1, delta=2e-3)
                self.assertAlmostEqual(e.args["GB_per_s"] / (e.args["bytes"] / e.ns), 1, delta=2e-3)
        weight, = {e.args["bytes"] for e in ops if e.name == "matmul_backward_weight fc.weight"
                   and e.args["layer"] == 1 and e.args["step"] == steps[0]} - self.accumulating
        return ops, weight

    accumulating = set()

    def check_steps(self, lanes, steps, micro_steps, last=None):
        """Requires that steps contain their phases and, if host and device have one clock, their ops.

        Each step except the run's `last` also waits for the next step's data."""
        spans = {e.args["step"]: e for e in lanes[HOST] if e.name == "step"}
        self.assertEqual(sorted(spans), list(steps))
        for step, span in spans.items():
            inside = Counter(e.name for e in lanes[HOST] if e.args["step"] == step and not e.name.startswith("wait"))
            self.assertEqual(inside, {"step": 1, "data": micro_steps + (step != last), "forward": micro_steps,
                                      "backward": micro_steps, "update": 1})
            self.assertTrue(all(span.holds(e) for e in lanes[HOST] if e.args["step"] == step))
        return spans


class Profile(ProfileTest):
    def test_one_rank(self):
        """Traces steps 3 to 5 of 6, with a validation and a checkpoint after step 4; the run's bits do not change."""
        self.train(**PHASES, run_dir="without")
        rows, half = 3 * LENGTH, 4  # bytes per fp32 value
        self.accumulating = {half * (rows * WIDTH + rows * 4 * WIDTH + 2 * 4 * WIDTH * WIDTH)}
        said = self.train("--profile", "3:5", **PHASES)
        self.assertEqual(self.records(), self.records("without"))
        self.assertEqual(self.weights(6), self.weights(6, "without"))
        self.assertEqual([p.name for p in (self.dir / "run/profile").iterdir()], ["rank_0.steps_3-5.json"])
        self.assertFalse((self.dir / "without/profile").exists())

        lanes, other = self.trace("3-5")
        ops, weight_bytes = self.check_ops(lanes, other, range(3, 6), micro_steps=2, tokens=120)
        self.assertEqual(weight_bytes, half * (rows * WIDTH + rows * 4 * WIDTH + 4 * WIDTH * WIDTH))
        spans = self.check_steps(lanes, range(3, 6), micro_steps=2)
        for step, span in spans.items():
            own = [e for e in ops if e.args["step"] == step]
            self.assertTrue(all(span.holds(e) for e in own))
            # Spans are not much shorter than their work at the measured rate, which is too low if cores are busy.
            least = sum(e.args["flops"] for e in own) / other["roofline_flops_per_s"]
            self.assertGreater(sum(e.ns for e in own), 0.1 * least * 1e9)
        self.assertGreater(other["roofline_flops_per_s"], 1e8)
        self.assertGreater(other["roofline_bytes_per_s"], 1e8)
        self.assertIn("measured", other["roofline_is"])
        self.assertNotIn(COMMUNICATION, lanes)

        # Between steps 4 and 5.
        beside = {e.name: e for e in lanes[HOST] if e.name in ("validation", "checkpoint")}
        self.assertEqual(set(beside), {"validation", "checkpoint"})
        for event in beside.values():
            self.assertTrue(spans[4].end <= event.begin and event.end <= spans[5].begin)
        validated = [e for e in lanes[DEVICE] if beside["validation"].holds(e)]
        self.assertEqual(Counter(e.name.split()[0] for e in validated),
                         {name: count for name, count in MICRO_STEP.items() if "backward" not in name})

        # The table has the same totals.
        table = said[said.index("profile  steps 3 to 5"):].splitlines()
        line, = [line for line in table if line.startswith("matmul_forward wte ")]
        calls, ms, share, roof = map(float, line.split()[2:])
        head = [e for e in ops if e.name == "matmul_forward wte"]
        head_ms = sum(e.ns for e in head) / 3e6
        self.assertEqual((calls, len(head)), (2, 6))
        self.assertAlmostEqual(ms, head_ms, delta=6e-4)
        step_ms = [record["step_ms"] for record in self.records(kind="train", without=()) if 3 <= record["step"] <= 5]
        total = float(next(line for line in table if line.startswith("step ")).split()[1])
        self.assertAlmostEqual(total, sum(step_ms) / 3, delta=2e-3)
        for (step, span), recorded in zip(spans.items(), step_ms):  # same start; the span ends a little later
            self.assertLessEqual(sum(e.ns for e in ops if e.args["step"] == step) / 1e6, recorded + 1e-3)
            self.assertLessEqual(recorded, span.ns / 1e6 + 1e-3)
        self.assertAlmostEqual(share, 100 * head_ms / total, delta=0.1)
        least = head[0].args["flops"] / other["roofline_flops_per_s"], head[0].args["bytes"] / other[
            "roofline_bytes_per_s"]
        self.assertAlmostEqual(roof, 100 * max(least) * 2e3 / head_ms, delta=0.1 + 1e-3 * roof)

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_two_ranks(self):
        changes = dict(train_max_steps=5, train_total_batch_tokens=240, parallel_zero_stage=2,
                       parallel_bucket_mb=0)
        for run, flags in (("without", []), ("run", ["--profile", "2:4"])):
            config = self.write_config(run_dir=run, **changes)
            result = subprocess.run([TRAINER, "--nproc", "2", config, *flags], cwd=self.dir, capture_output=True,
                                    text=True, timeout=120, env=MPI_ENVIRONMENT)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.records(), self.records("without"))
        self.assertIn("exposed communication", result.stdout)
        sent = sum(record["comm_bytes"] for record in self.records(kind="train", without=())
                   if 2 <= record["step"] <= 4)
        collectives = []
        for rank in range(2):
            lanes, other = self.trace("2-4", rank)
            self.assertEqual((other["rank"], other["ranks"]), (rank, 2))
            self.check_steps(lanes, range(2, 5), micro_steps=2)
            counts = Counter(e.name for e in lanes[COMMUNICATION])
            buckets = LAYERS + 1
            self.assertEqual(counts["reduce_scatter_sum"], 3 * 2 * buckets)
            self.assertEqual(counts["all_gather"], 3 * buckets)
            tensors = [e for e in lanes[COMMUNICATION] if e.name in ("reduce_scatter_sum", "all_gather")]
            self.assertEqual(sum(e.args["bytes_sent"] for e in tensors), sent)
            reduced, = {e.args["bytes_sent"] for e in lanes[COMMUNICATION] if e.name == "all_reduce_sum"}
            self.assertEqual(reduced % 8, 0)
            self.assertTrue(any(e.name == "wait" for e in lanes[DEVICE]))
            collectives.append(tensors)
        # One time axis: no collective ends on one rank before it begins on the other.
        for one, other in zip(*collectives):
            self.assertEqual(one.name, other.name)
            self.assertGreater(min(one.end, other.end) + 1e6, max(one.begin, other.begin))

        # docs/profiling.md merges several traces with this command.
        recipe = ("import json, sys; print(json.dumps({'traceEvents': [event for path in sys.argv[1:] "
                  "for event in json.load(open(path))['traceEvents']]}))")
        self.assertIn(recipe, (ROOT / "docs/profiling.md").read_text())
        merged = subprocess.run(["python3", "-c", recipe, *sorted((self.dir / "run/profile").iterdir())],
                                capture_output=True, check=True)
        self.assertEqual({event["pid"] for event in json.loads(merged.stdout)["traceEvents"]}, {0, 1})

    def test_resumed_runs(self):
        changes = dict(train_max_steps=4, schedule_name="constant")
        self.train(**changes)
        resume = ["--resume", "--accept-changes"]
        said = self.train(*resume, "--profile", "2:3", **{**changes, "train_max_steps": 5})
        self.assertIn("no trace: steps 2 to 3 are already done, the run continues at step 5", said)
        self.assertFalse((self.dir / "run/profile").exists())
        said = self.train(*resume, "--profile", "2:100", **{**changes, "train_max_steps": 7})
        self.assertIn("begins with step 6", said)
        lanes, _ = self.trace("6-7")  # until the run's end
        self.check_steps(lanes, (6, 7), micro_steps=2, last=7)

    def test_wrong_arguments(self):
        config = self.write_config(train_max_steps=4)
        for text in ("", "3", "5:3", "0:2", "-1:2", "1:2:3", "a:b", "1:99999999999"):
            said = self.run_trainer(config, f"--profile={text}", expect=64)
            self.assertIn("expected START:STOP, the first and last step", said, text) if text else None
        said = self.run_trainer(config, "--profile", "5:9", expect=64)
        self.assertIn("--profile 5:9 begins after the last step of the run, 4 (train.max_steps)", said)
        self.assertFalse((self.dir / "run").exists())
        said = self.run_trainer("--profile", "1:2", "eval", "run", expect=64)
        self.assertIn("--profile is an option of training", said)

    def test_a_trace_that_cannot_be_written_does_not_end_a_run(self):
        self.train(train_max_steps=1)
        (self.dir / "run/profile").write_text("a file")
        said = self.train("--resume", "--accept-changes", "--profile", "2:2", train_max_steps=3)
        self.assertIn("rank 0 could not write its trace: ", said)
        self.assertEqual(len(self.losses()), 3)


class SimulatedGpu(ProfileTest):
    """The same with CUDA events and NCCL's stream. A kernel takes a microsecond of simulated time."""

    def test_two_ranks(self):
        changes = dict(train_max_steps=2, model_n_layer=LAYERS, train_total_batch_tokens=120)
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "SIMULATED_GPU": "NVIDIA H200"}
        for run, flags in (("without", []), ("run", ["--profile", "1:2"])):
            result = subprocess.run([SIMULATED, "--nproc", "2", self.write_config(run_dir=run, **changes), *flags],
                                    cwd=self.dir, capture_output=True, text=True, timeout=170, env=environment)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.records(), self.records("without"))
        lanes, other = self.trace("1-2")
        self.assertEqual((other["roofline_flops_per_s"], other["roofline_bytes_per_s"]), (66.9e12, 4.8e12))
        ops, _ = self.check_ops(lanes, other, range(1, 3), micro_steps=1, tokens=60)
        self.check_steps(lanes, range(1, 3), micro_steps=1, last=2)
        self.assertGreater(min(e.ns for e in ops), 900)
        self.assertEqual({e.args["bytes_sent"] > 0 for e in lanes[COMMUNICATION] if e.name != "all_reduce_max"}, {True})
        self.assertTrue(any(e.name == "wait" for e in lanes[DEVICE]))


if __name__ == "__main__":
    unittest.main()

"""Monitoring files of a run: times, samples and norms, and event files for TensorBoard."""
import contextlib
import io
import json
import math
import os
import runpy
import struct
import sys
import time
import types
from pathlib import Path
from unittest import mock

import event_file
from trainer import ROOT, TrainerTest

DATA = ROOT / "test/recorded/tensorboard"
MONITORED = {"train_max_steps": 10, "eval_every_steps": 5, "eval_batches": 1, "sample_every_steps": 5,
             "sample_tokens": 8, "sample_prompt": "The ", "log_norms_every_steps": 4}


class EventFiles(TrainerTest):
    def test_the_reader_reads_files_of_tensorboard(self):
        expected = json.loads((DATA / "tensorboard.json").read_text())
        values, starts = event_file.read(DATA / "tensorboard.events")
        self.assertEqual({value.tag: repr(value.value) for value in values}, expected["scalars"])
        self.assertEqual({value.step for value in values}, {2**40})
        self.assertEqual({value.time for value in values}, {expected["time"]})
        self.assertEqual(starts, [7])
        damaged = bytearray((DATA / "tensorboard.events").read_bytes())
        for place in (3, 9, 20, len(damaged) - 1):
            damaged[place] ^= 1
            with self.assertRaises((AssertionError, struct.error)):
                list(event_file.records(bytes(damaged)))
            damaged[place] ^= 1

    def events(self, run="run"):
        """Returns the values that TensorBoard shows, and the start of each file.

        TensorBoard reads the files in the order of their names. At a start it drops the values of this step and later
        ones.
        """
        values, starts = [], []
        for path in sorted((self.dir / run / "tensorboard").iterdir()):
            found, (start,) = event_file.read(path)
            values = [value for value in values if value.step < start] + found
            starts.append(start)
        return values, starts

    def check_scalars(self, values):
        """Requires each number of metrics.jsonl exactly once, with its time."""
        expected = {}
        for record in self.records(without=("time",)):
            for key, value in record.items():
                if isinstance(value, (int, float)) and key != "step":
                    expected[record["step"], f"{record['kind']}/{key}"] = struct.unpack("f", struct.pack("f", value))[0]
        found = {(value.step, value.tag): value.value for value in values if (value.step, value.tag) in expected}
        self.assertEqual(found, expected)
        keys = [(value.step, value.tag) for value in values]
        self.assertEqual(len(keys), len(set(keys)), "a step appears twice")
        for value in values:
            self.assertLess(abs(value.time - time.time()), 600)

    def test_event_files_match_the_other_files(self):
        self.train(**MONITORED)
        values, starts = self.events()
        self.assertEqual(starts, [1])
        self.check_scalars(values)
        tags = {value.tag for value in values}
        for key in ("loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "compute_ms", "optimizer_ms", "comm_ms",
                    "data_ms", "epoch", "resident_bytes"):
            self.assertIn(f"train/{key}", tags)
        self.assertNotIn("train/mfu", tags)  # unknown on a CPU

    def test_norms(self):
        self.train(**MONITORED)
        values = [value for value in self.events()[0] if value.step == 8]
        record, = [r for r in self.records(kind="norms") if r["step"] == 8]
        grad_norms, rms = record["grad_norms"], record["activation_rms"]
        step, = [r for r in self.records(kind="train") if r["step"] == 8]
        together = math.sqrt(sum(norm * norm for norm in grad_norms.values()))
        self.assertAlmostEqual(together / step["grad_norm"], 1, places=6)
        self.assertEqual(list(rms), ["h.0.residual", "h.0.residual_mid", "h.1.residual", "h.1.residual_mid",
                                     "residual_f"])
        shown = {value.tag: value.value for value in values if not value.tag.startswith("train/")}
        norms = {f"grad_norms/{name}": value for name, value in grad_norms.items()}
        norms |= {f"activation_rms/{name}": value for name, value in rms.items()}
        self.assertEqual(shown, {tag: struct.unpack("f", struct.pack("f", norm))[0] for tag, norm in norms.items()})

    def test_a_resumed_run_shows_no_step_twice(self):
        changes = dict(MONITORED, checkpoint_every_steps=5, checkpoint_keep=9)
        self.train(**dict(changes, train_max_steps=10, schedule_name="constant"))
        whole = self.records()
        samples = (self.dir / "run/samples.jsonl").read_text().splitlines()
        for path in self.step_dir(10).iterdir():
            path.unlink()
        self.step_dir(10).rmdir()
        self.train("--resume", **dict(changes, train_max_steps=10, schedule_name="constant"))
        values, starts = self.events()
        self.assertEqual(starts, [1, 6])
        self.check_scalars(values)
        self.assertEqual(self.records(), whole)
        again = (self.dir / "run/samples.jsonl").read_text().splitlines()
        strip = [{k: v for k, v in json.loads(line).items() if k != "time"} for line in samples]
        self.assertEqual([{k: v for k, v in json.loads(line).items() if k != "time"} for line in again], strip)
        self.assertEqual(again[0], samples[0])

    def test_samples_and_times(self):
        before = time.time()
        said = self.train(**MONITORED)
        samples = [json.loads(line) for line in (self.dir / "run/samples.jsonl").read_text().splitlines()]
        self.assertEqual([sample["step"] for sample in samples], [5, 10])
        for sample in samples:
            self.assertEqual(sample["prompt"], "The ")
            self.assertTrue(sample["text"].startswith("The "))
            self.assertIn(f"step {sample['step']} | sample\nThe ", said)
        times = [record["time"] for record in self.records(without=())] + [time.time() + 0.001]
        self.assertEqual(times, sorted(times))
        self.assertGreater(times[0], before)
        self.assertTrue(any(value % 1 for value in times[:-1]))

    def test_switches(self):
        self.train(**dict(MONITORED, log_tensorboard=False, log_norms_every_steps=0))
        self.assertFalse((self.dir / "run/tensorboard").exists())
        self.assertFalse(self.records(kind="norms"))

    def test_norms_are_the_same_in_every_stage(self):
        self.train(run_dir="one", **dict(MONITORED, train_total_batch_tokens=240, parallel_deterministic_reduce=True))
        expected = [record["grad_norms"] for record in self.records("one", kind="norms")]
        for stage in (0, 1, 2, 3):
            self.train("--nproc", "2", threads=1, run_dir=f"stage_{stage}",
                       **dict(MONITORED, train_total_batch_tokens=240, parallel_deterministic_reduce=True,
                              parallel_zero_stage=stage))
            found = self.records(f"stage_{stage}", kind="norms")
            self.assertEqual([record["grad_norms"] for record in found], expected)


class Recipes(TrainerTest):
    def follow(self, script, module, *arguments):
        """Runs a recipe in this process, with a stand-in for the package that it logs to."""
        name = script.removeprefix("follow_").removesuffix(".py")
        with mock.patch.dict(sys.modules, {name: module}), contextlib.redirect_stdout(io.StringIO()), \
                mock.patch.object(sys, "argv", [script, *map(str, arguments)]), mock.patch("time.sleep", self.asleep):
            runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")

    def asleep(self, _):
        """Advances the run while the recipe sleeps."""
        if self.happenings:
            self.happenings.pop(0)()
        else:
            raise KeyboardInterrupt

    def setUp(self):
        super().setUp()
        self.train(**MONITORED)
        self.run = self.dir / "run"
        self.lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
        self.happenings = []

    def grow(self, text, replace=False):
        def happen():
            if replace:  # as a resumed run does
                (self.run / "new").write_text(text)
                os.replace(self.run / "new", self.run / "metrics.jsonl")
            else:
                with (self.run / "metrics.jsonl").open("a") as file:
                    file.write(text)
        return happen

    def live(self):
        """Replays the run for a follower: half a line, the rest, a resume from step 5, and the end."""
        early = [line for line in self.lines if json.loads(line)["step"] <= 5]
        later = self.lines[len(early):]
        (self.run / "metrics.jsonl").write_text("".join(self.lines[:2]) + self.lines[2][:30])
        self.happenings = [self.grow(self.lines[2][30:]), self.grow("".join(self.lines[3:])),
                           self.grow("".join(early), replace=True), self.grow(later[0][:5]),
                           self.grow(later[0][5:] + "".join(later[1:]))]

    def expected(self):
        """Returns (step, key) of every number."""
        return sorted((record["step"], f"{record['kind']}/{key}") for record in map(json.loads, self.lines)
                      for key, value in record.items()
                      if isinstance(value, (int, float)) and key not in ("step", "time"))

    def test_wandb(self):
        logged, started = [], {}
        module = types.ModuleType("wandb")
        module.init = lambda **options: started.update(options)
        module.log = lambda values, step: logged.extend((step, key) for key in values)
        self.live()
        with contextlib.suppress(KeyboardInterrupt):
            self.follow("follow_wandb.py", module, self.run)
        self.assertEqual(sorted(logged), self.expected())
        self.assertEqual([step for step, _ in logged], sorted(step for step, _ in logged))  # wandb drops earlier steps
        self.assertEqual(started["config"]["train"]["max_steps"], 10)

    def test_mlflow(self):
        logged, parameters = [], {}
        module = types.ModuleType("mlflow")
        module.start_run = lambda **options: contextlib.nullcontext()
        module.log_params = parameters.update
        module.log_metrics = lambda values, step: logged.extend((step, key) for key in values)
        self.live()
        with contextlib.suppress(KeyboardInterrupt):
            self.follow("follow_mlflow.py", module, self.run)
        self.assertEqual(sorted(logged), self.expected())
        self.assertEqual(parameters["train.max_steps"], 10)

    def test_they_are_short(self):
        for name in ("follow_wandb.py", "follow_mlflow.py"):
            self.assertLessEqual(len(Path(ROOT, "scripts", name).read_text().splitlines()), 20, name)

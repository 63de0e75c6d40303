"""Loss spikes, gradients that stay non-finite, and ranks whose weights differ."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import unittest
from pathlib import Path

from test_ranks import MPI_ENVIRONMENT, mpirun
from trainer import TrainerTest, generated_text, trainers_in, wait_until

# One sequence per step, so that an unusual one is a spike.
SHORT = {"train_max_steps": 160, "train_batch_size": 1, "train_seq_len": 20, "train_total_batch_tokens": 20,
         "schedule_name": "constant", "checkpoint_every_steps": 20, "checkpoint_keep": 30,
         "optim_learning_rate": 3e-3, "data_val": ""}


def strange_text(count, seed=3):
    """Returns text whose characters do not occur in the other text."""
    draw = random.Random(seed)
    return "".join(draw.choices("#%&*@{}[]<>~^|\\", k=count))


class StrangeData(TrainerTest):
    def prepare(self, strange_windows):
        """Prepares data with `strange_windows` evenly spaced windows of another kind of text."""
        lines = generated_text(150).splitlines(keepends=True)
        for i in range(strange_windows):
            lines.insert((i + 1) * len(lines) // (strange_windows + 1), strange_text(40) + "\n")
        (self.dir / "text.txt").write_text("".join(lines))
        shutil.rmtree(self.dir / "data")
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", 0, "text.txt", "--out", "data")

    def cut(self, to, step):
        shutil.copytree(self.dir / "run", self.dir / to)
        for directory in (self.dir / to / "checkpoints").iterdir():
            if not directory.name.startswith("step_") or int(directory.name[5:]) > step:
                shutil.rmtree(directory)


class Divergence(StrangeData):
    def test_a_spike_is_reported_and_its_checkpoint_is_not_healthy(self):
        self.prepare(2)
        said = self.train(**SHORT)
        spikes = [int(step) for step in re.findall(r"warning: step (\d+): loss spike: [\d.]+ is above", said)]
        self.assertGreaterEqual(len(spikes), 1, said)
        for step in range(20, 161, 20):
            healthy = not any(step - 20 < spike <= step for spike in spikes)
            self.assertEqual(self.manifest(step)["healthy"], healthy, (step, spikes))
        self.train(run_dir="blind", train_spike_deviations=1e6, **SHORT)
        self.assertEqual(self.records("blind"), self.records())

    def test_a_run_that_stops_at_a_spike_can_continue_from_it(self):
        self.prepare(2)
        said = self.train(expect=79, train_on_spike="stop", **SHORT)
        step = int(re.search(r"train_gpt: step (\d+): loss spike: ", said)[1])
        self.assertRegex(said.splitlines()[-1], r"--resume-step \d+ continues from the last healthy checkpoint")
        self.assertFalse(self.manifest(step)["healthy"])
        self.train("--resume", "--accept-changes", train_on_spike="warn", **SHORT)
        self.train(run_dir="warned", **SHORT)
        self.assertEqual(self.records(), self.records("warned"))

    def test_a_rollback_skips_data_and_a_resume_repeats_it(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback")
        said = self.train(**changes)
        back = [tuple(map(int, found)) for found in
                re.findall(r"step (\d+) \| rolling back to the checkpoint of step (\d+), skipping (\d+) samples", said)]
        self.assertGreaterEqual(len(back), 1, said)
        records = self.records()
        self.assertEqual([r["step"] for r in records if r["kind"] == "train"], list(range(1, 161)))
        logged = [(r["from_step"], r["step"] - 1, r["skipped_samples"]) for r in records if r["kind"] == "rollback"]
        self.assertEqual(logged, back)
        for from_step, to_step, samples in back:
            self.assertEqual(to_step % 20, 0)
            self.assertLess(to_step, from_step)
            self.assertEqual(samples, from_step - to_step)
        end = self.manifest(160)["state"]
        self.assertEqual(end["cursor"], 160 + sum(samples for _, _, samples in back))
        self.assertEqual([(r["from_step"], r["to_step"], r["skipped_samples"]) for r in end["divergence"]["rollbacks"]],
                         back)
        # Resume before and after the rollback.
        for step in sorted({back[0][1], back[-1][1] + 20, 140}):
            with self.subTest(step=step):
                self.cut(f"cut_{step}", step)
                self.train("--resume", run_dir=f"cut_{step}", **changes)
                self.assertEqual(self.records(f"cut_{step}"), records)
                self.assertEqual(self.weights(160, f"cut_{step}"), self.weights(160))

    def test_a_rollback_equals_a_start_from_that_checkpoint_at_later_data(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback", train_precision="bf16", optim_learning_rate=1e-2)
        self.train(**changes)
        back = [record for record in self.records() if record["kind"] == "rollback"]
        self.assertTrue(back)
        to_step = back[-1]["step"] - 1
        self.cut("started", to_step)
        cursor = to_step + sum(record["skipped_samples"] for record in back)
        self.change_manifest(to_step, lambda manifest: manifest["state"].update(cursor=cursor), "started")
        self.train("--resume", run_dir="started", **changes)
        self.assertEqual(self.records("started", "train"), self.records("run", "train"))
        self.assertEqual(self.weights(160, "started"), self.weights(160))

    def test_a_rollback_keeps_the_configuration_and_time_of_the_last_start(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback", train_max_minutes=100)
        said = self.train(run_dir="first", **changes)
        from_step, to_step = map(int, re.search(r"step (\d+) \| rolling back to the checkpoint of step (\d+)",
                                                said).groups())
        stop = (to_step + from_step) // 2  # a rollback ignores it
        self.assertNotEqual(stop % 20, 0)
        self.train("--auto", **dict(changes, train_max_steps=stop))
        before = self.manifest(stop)
        # The time trained before the change is kept.
        changes.update(train_max_minutes=0, optim_grad_clip=0.9)
        said = self.train("--resume", "--accept-changes", **changes)
        self.assertIn(f"rolling back to the checkpoint of step {to_step}", said)
        end = self.manifest(160)
        self.assertEqual(json.loads(end["config"])["optim"]["grad_clip"], 0.9)
        self.assertNotEqual(end["config_digest"], before["config_digest"])
        self.assertGreater(before["state"]["trained_s"], self.manifest(to_step)["state"]["trained_s"])
        self.assertEqual(end["state"]["trained_s"], before["state"]["trained_s"])
        self.train("--resume", **changes)  # the digest matches the configuration

    def test_a_rollback_ignores_a_checkpoint_of_another_run(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback")
        said = self.train(run_dir="first", **changes)
        from_step, to_step = map(int, re.search(r"step (\d+) \| rolling back to the checkpoint of step (\d+)",
                                                said).groups())
        self.assertGreater(to_step, 20)
        self.train(**dict(changes, train_max_steps=from_step - 1))
        shutil.rmtree(self.step_dir(to_step))
        shutil.copytree(self.step_dir(to_step, "first"), self.step_dir(to_step))  # with another run's identity
        said = self.train("--resume", "--accept-changes", **changes)
        self.assertIn(f"step {from_step} | rolling back to the checkpoint of step {to_step - 20}, ", said)

    def test_a_rollback_ignores_checkpoints_saved_by_a_stop(self):
        """So the result does not depend on when a run was stopped."""
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback", checkpoint_keep=1)
        said = self.train(**changes)
        from_step, to_step = map(int, re.search(r"step (\d+) \| rolling back to the checkpoint of step (\d+)",
                                                said).groups())
        # Healthy checkpoints between the rollback's target and the spike, as stops leave them.
        for step in range(to_step + 1, from_step, max(1, (from_step - to_step) // 3)):
            self.train("--auto", "--accept-changes", run_dir="stopped", **dict(changes, train_max_steps=step))
        self.train("--resume", "--accept-changes", run_dir="stopped", **changes)
        self.assertEqual(self.records("stopped"), self.records())
        self.assertEqual(self.weights(160, "stopped"), self.weights(160))

    def test_a_fourth_rollback_within_1000_steps_ends_the_run(self):
        self.prepare(14)
        said = self.train(expect=79, train_on_spike="rollback", train_spike_deviations=3, **dict(
            SHORT, train_max_steps=400))
        self.assertEqual(len(re.findall("rolling back to the checkpoint", said)), 3)
        self.assertIn("the run has already rolled back 3 times within 1000 steps", said)

    def test_gradients_that_stay_non_finite(self):
        # Weight decay multiplies the weights by -67,000, -133,000 and so on: they overflow at the same step everywhere.
        changes = dict(train_max_steps=30, checkpoint_every_steps=2, checkpoint_keep=30, loss_scale_max_skipped_steps=3,
                       schedule_name="constant", optim_learning_rate=1000.0,
                       schedule_warmup_steps=15, optim_grad_clip=0.0, optim_name="sgd", optim_momentum=0.0,
                       optim_weight_decay=1e3)
        said = self.train(expect=79, **changes)
        self.assertRegex(said, r"the gradient was not finite in 4 consecutive steps")
        healthy = int(re.search(r"--resume-step (\d+) continues from the last healthy checkpoint", said)[1])
        skipped = [r["step"] for r in self.records(kind="train") if "skipped" in r]
        self.assertLess(healthy, skipped[0])
        said = self.train("--resume-step", healthy, "--accept-changes", run_dir="run", **dict(
            changes, optim_learning_rate=0.0))
        self.assertIn("superseded" if self.step_dir(healthy + 2).exists() else "", said)
        self.assertEqual([r["step"] for r in self.records(kind="train")], list(range(1, 31)))

        said = self.train(expect=79, run_dir="back", train_on_nonfinite="rollback", **changes)
        self.assertEqual(len(re.findall("rolling back to the checkpoint", said)), 3)
        self.assertIn("the run has already rolled back 3 times within 1000 steps", said)

    def test_a_rollback_needs_checkpoints(self):
        for key in ("train_on_spike", "train_on_nonfinite"):
            self.assertIn("checkpoint.every_steps is 0", self.train(expect=78, **{key: "rollback"}))
        said = self.train(expect=79, train_on_nonfinite="rollback", checkpoint_every_steps=10, optim_name="sgd",
                          optim_learning_rate=1000.0, loss_scale_max_skipped_steps=2, optim_grad_clip=0.0)
        self.assertIn("there is no healthy checkpoint to roll back to", said)


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Ranks(StrangeData):
    def test_several_ranks_roll_back_together(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback", train_total_batch_tokens=40, train_max_steps=120,
                       parallel_deterministic_reduce=True, train_spike_deviations=4, log_norms_every_steps=0)
        self.train(**changes)
        expected = self.records()
        self.assertTrue(any(r["kind"] == "rollback" for r in expected))
        for stage in (0, 2, 3):
            config = self.write_config(run_dir=f"two_{stage}", parallel_zero_stage=stage, **changes)
            subprocess.run(mpirun(2, config), cwd=self.dir, check=True, env=MPI_ENVIRONMENT, timeout=120,
                           stdout=subprocess.DEVNULL)
            self.assertEqual(self.records(f"two_{stage}"), expected)

    def test_several_ranks_roll_back_across_a_batch_ramp(self):
        self.prepare(2)
        changes = dict(SHORT, train_on_spike="rollback", train_total_batch_tokens=40, train_max_steps=120,
                       parallel_deterministic_reduce=True, train_spike_deviations=4, log_norms_every_steps=0)
        changes.update(checkpoint_every_steps=30, train_max_steps=104)
        said = self.train(run_dir="constant", **changes)
        from_step, to_step = map(int, re.search(r"step (\d+) \| rolling back to the checkpoint of step (\d+)",
                                                said).groups())
        # The step of the spike is the first with twice as many samples.
        changes.update(train_total_batch_tokens=80,
                       train_batch_ramp=[{"until_step": from_step - 1, "total_batch_tokens": 40}])
        self.assertLess(to_step, from_step - 1)
        said = self.train(**changes)
        self.assertIn(f"step {from_step} | rolling back to the checkpoint of step {to_step}, "
                      f"skipping {2 * (from_step - 1 - to_step) + 4} samples", said)
        config = self.write_config(run_dir="two", **changes)
        subprocess.run(mpirun(2, config), cwd=self.dir, check=True, env=MPI_ENVIRONMENT, timeout=120,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(self.records("two"), self.records())

    def flip_in_memory(self, pid, needle):
        """Flips a bit in each occurrence of these bytes in a process's memory; returns the number of occurrences."""
        found = 0
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                addresses, mode, *_ = line.split()
                begin, end = (int(address, 16) for address in addresses.split("-"))
                if not mode.startswith("rw") or end - begin > 1 << 28:
                    continue
                try:
                    memory.seek(begin)
                    content = memory.read(end - begin)
                except OSError:
                    continue
                at = content.find(needle)
                while at >= 0:
                    memory.seek(begin + at + 5)
                    memory.write(bytes([needle[5] ^ 1]))
                    found += 1
                    at = content.find(needle, at + 1)
        return found

    def test_a_rank_whose_weights_have_changed_is_reported(self):
        # The last bytes of the position embedding (5.8 MB) and the first of the token embedding.
        majority = "the weights of rank 1 differ from those of the other ranks"
        both = "the weights of ranks 0, 1 differ from each other"
        for size, precision, tensor, named, grid in (
                (3, "fp32", "wpe", majority, {}), (3, "bf16", "wte", majority, {}), (2, "fp32", "wte", both, {}),
                (6, "fp32", "wpe", majority, {"parallel_pipeline": 2}),
                (4, "fp32", "wpe", both, {"parallel_pipeline": 2, "parallel_tensor": 2, "model_n_head": 4})):
            with self.subTest(size=size, precision=precision):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                # The weights do not change, so that their bytes are known.
                config = self.write_config(
                    train_max_steps=100000, train_total_batch_tokens=60 * size, train_check_replicas_every=10,
                    optim_learning_rate=0.0, train_precision=precision, checkpoint_every_steps=5,
                    model_n_positions=30000 if tensor == "wpe" else 24, **grid)
                process = subprocess.Popen(mpirun(size, config), cwd=self.dir, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.PIPE, text=True, env=MPI_ENVIRONMENT)
                self.addCleanup(process.kill)
                wait_until(lambda: self.step_dir(10).exists(), "no checkpoint")
                values = self.tensor_bytes(10, f"master.{tensor}")
                values = values[-64:] if tensor == "wpe" else values[:64]
                ranks = {int(re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1]):
                         pid for pid in trainers_in(self.dir)}
                if not os.access(f"/proc/{ranks[1]}/mem", os.W_OK):
                    self.skipTest("the memory of another process may not be written here")
                os.kill(ranks[1], signal.SIGSTOP)
                self.assertGreater(self.flip_in_memory(ranks[1], values), 0)
                os.kill(ranks[1], signal.SIGCONT)
                said = process.communicate(timeout=60)[1]
                self.assertEqual(process.returncode, 81, said)
                self.assertRegex(said, rf"step \d+0: {named}")

    def tensor_bytes(self, step, name):
        manifest = json.loads((self.step_dir(step) / "MANIFEST.json").read_text())
        pieces = {piece["first"]: (shard["name"], piece) for shard in manifest["shards"] for piece in shard["pieces"]
                  if piece["tensor"] == name}
        return b"".join((self.step_dir(step) / file).read_bytes()[
            piece["file_offset"]:piece["file_offset"] + 4 * piece["count"]] for _, (file, piece) in
            sorted(pieces.items()))

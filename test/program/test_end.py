"""Conditions that end a run: steps, epochs, minutes, or a validation loss that no longer falls."""
import json
import math
import re
import shutil
import signal
import subprocess
from pathlib import Path

from trainer import TRAINER, TrainerTest

SECONDS = {"train_max_steps": 0, "train_max_minutes": 0.04, "schedule_name": "wsd", "schedule_cooldown_fraction": 0.5,
           "schedule_final_lr_fraction": 0, "checkpoint_keep": 9}


class End(TrainerTest):
    def committed(self, run="run"):
        return sorted(int(step.name[5:]) for step in (self.dir / run / "checkpoints").glob("step_*"))

    def progress(self, step, run="run"):
        return json.loads((self.step_dir(step, run) / "MANIFEST.json").read_text())["state"]

    def check_time_limit(self, *flags):
        self.train(*flags, **SECONDS)
        steps = self.records(kind="train", without=())
        rates = [step["lr"] for step in steps]
        decision, end = self.committed()
        self.assertEqual(self.progress(decision)["course_by_time"], {"end_step": end, "cooldown_begin": decision})
        self.assertEqual(len(rates), end)
        self.assertEqual(set(rates[5:decision]), {0.01})
        self.assertLess(rates[decision], 0.01)
        self.assertEqual(rates[-1], 0)
        # A save after the decision and busy cores move the end. The test must only detect a run that ends at once or
        # ignores the time limit.
        trained_s = sum(step["step_ms"] for step in steps) / 1000
        self.assertGreater(trained_s, 0.8)
        self.assertLess(trained_s, 15)

    def test_a_complete_run_that_is_started_again_says_so(self):
        self.train(train_max_steps=4)
        said = self.train("--resume", train_max_steps=4)
        self.assertIn("run is complete: 4 steps are done\n", said)
        self.assertIn("trained  4 steps", said)
        self.assertNotIn("steps 5", said)

    def test_minutes_end_a_run_after_its_cooldown(self):
        self.check_time_limit()

    def test_a_run_with_a_time_limit_resumes_with_the_same_decision(self):
        self.check_time_limit()
        decision, end = self.committed()
        shutil.copytree(self.dir / "run", self.dir / "cut")
        shutil.rmtree(self.step_dir(end, "cut"))
        self.train("--resume", run_dir="cut", **SECONDS)
        self.assertEqual(self.records("cut"), self.records("run"))
        self.assertEqual(self.weights(end, "cut"), self.weights(end, "run"))

    def test_a_new_time_limit_changes_the_decision(self):
        self.train(**SECONDS)
        end = self.committed()[-1]
        self.train("--resume", "--accept-changes", **{**SECONDS, "train_max_minutes": 0.06})
        self.assertGreater(self.committed()[-1], end)

    def test_ranks_agree_on_the_end(self):
        self.check_time_limit("--nproc", "2")

    def test_epochs_end_a_run(self):
        said = self.train(train_max_steps=0, train_max_epochs=2.5)
        windows = int(said.split(" windows of 20")[0].split()[-1])
        self.assertEqual(len(self.losses()), math.ceil(2.5 * windows * 20 / 120))

    def test_a_loss_that_no_longer_falls_ends_a_run(self):
        # With a learning rate of 0, the first validation stays the best.
        still = {"optim_learning_rate": 0, "eval_every_steps": 2, "eval_patience": 2, "checkpoint_keep": 1,
                 "checkpoint_keep_best": True}
        said = self.train(**still)
        self.assertIn("step 6 | validation loss", said)
        self.assertIn("no lower validation loss since step 2", said)
        self.assertEqual(len(self.losses()), 6)
        self.assertEqual(self.committed(), [2, 6])
        before = self.records()
        self.train("--resume", **still)
        self.assertEqual(self.records(), before)
        self.train("--resume", "--accept-changes", **{**still, "eval_patience": 4})
        self.assertEqual(len(self.losses()), 10)
        self.assertEqual(self.committed(), [2, 10])

    def test_without_keep_best_no_checkpoint_is_special(self):
        self.train(optim_learning_rate=0, eval_every_steps=2, eval_patience=2, checkpoint_keep=1,
                   checkpoint_every_steps=1)
        self.assertEqual(self.committed(), [6])

    def summary(self, said):
        """Returns the lines from "trained" to the end."""
        lines = said.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("trained ")]
        self.assertEqual(len(starts), 1, said)
        return lines[starts[0]:]

    def check_speed(self, line, steps):
        """Requires the tokens, time and speed of all steps in metrics.jsonl."""
        match = re.fullmatch(rf"trained  {steps} steps, {120 * steps:,} tokens in (\d+) s, ([\d,]+) tokens/s", line)
        self.assertTrue(match, line)
        seconds = sum(record["step_ms"] for record in self.records(kind="train", without=())) / 1000
        self.assertAlmostEqual(int(match[1]), seconds, delta=0.51)
        self.assertAlmostEqual(int(match[2].replace(",", "")), 120 * steps / seconds, delta=1)

    def test_a_complete_run_ends_with_a_summary(self):
        said = self.train(train_max_steps=6)
        speed, loss, command = self.summary(said)
        self.check_speed(speed, 6)
        self.assertEqual(loss, f"loss     training {self.losses()[-1]:.4f} at step 6")
        self.assertRegex(command, r"^next: \S*train_gpt\S* sample run$")
        program, *args = command.removeprefix("next: ").split()
        self.assertEqual(Path(program).resolve(), TRAINER.resolve())
        self.run_trainer(*args, "--tokens", 3)

    def test_the_summary_has_the_lowest_validation_of_all_starts(self):
        # A high learning rate after the resume raises the loss.
        changes = {"train_max_steps": 4, "eval_every_steps": 2}
        self.train(**changes)
        said = self.train("--resume", "--accept-changes", "--nproc", "2",
                          **{**changes, "train_max_steps": 8, "optim_learning_rate": 10})
        speed, loss, _ = self.summary(said)
        self.check_speed(speed, 8)
        validations = {record["step"]: record["loss"] for record in self.records(kind="val")}
        lowest = min(validations, key=validations.get)
        self.assertLessEqual(lowest, 4)
        self.assertEqual(loss, f"loss     validation {validations[8]:.4f} at step 8, "
                               f"lowest {validations[lowest]:.4f} at step {lowest}")

    def test_the_summary_without_a_tokenizer_suggests_a_report(self):
        speed, loss, command = self.summary(self.train(train_max_steps=2, eval_every_steps=1, data_tokenizer=""))
        self.check_speed(speed, 2)
        self.assertRegex(loss, r"^loss     validation \d\.\d{4} at step 2, the lowest$")
        self.assertTrue(command.endswith(" report run"), command)

    def test_only_a_complete_run_has_a_summary(self):
        config = self.write_config(train_max_steps=1_000_000)
        run = subprocess.Popen([TRAINER, config], cwd=self.dir, stdout=subprocess.PIPE, text=True)
        self.wait_for_steps(run)
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[0]
        self.assertEqual(run.returncode, 75, said)
        self.assertNotIn("trained ", said)
        self.assertNotIn("next: ", said)

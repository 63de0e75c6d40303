"""Training on own text in three commands: prepare prints the next command, and no file is edited."""
import json
import re
import shlex
import shutil
import subprocess
import unittest

from trainer import ENVIRONMENT, TRAINER, TrainerTest, generated_text


class OwnText(TrainerTest):
    def setUp(self):
        super().setUp()
        (self.dir / "mine.txt").write_text(generated_text(400))

    def test_three_commands(self):
        said = self.run_trainer("prepare", "mine.txt", "--out", "sets/mine", "--minutes", "0.05")
        self.assertRegex(said, r"sets/mine/config.json: \d+ layers, \d+ channels")
        self.assertRegex(said, r"0\.05 minutes on this machine: about \d+ steps of \d+ tokens, [\d.]+ passes")
        command = shlex.split(re.search(r"^next: (.*)$", said, re.MULTILINE)[1])
        self.assertEqual(command, [str(TRAINER), "sets/mine/config.json"])
        done = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('settings run.dir="runs/mine"', done.stdout)
        self.assertNotIn("head_rows", done.stdout)
        self.assertGreater(len(self.records("runs/mine", "val")), 1)
        losses = [record["loss"] for record in self.records("runs/mine", "train")]  # a fast machine memorizes it
        self.assertLess(min(losses), losses[0] - 1)
        self.assertIn("The king", self.run_trainer("sample", "runs/mine", "--prompt", "The king", "--tokens", "5"))

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_the_configuration_also_runs_on_two_ranks_and_for_few_steps(self):
        self.run_trainer("prepare", "mine.txt", "--out", "mine", "--minutes", "0.5")
        run = ["mine/config.json", "--set", "train.max_steps=8", "--set", "run.dir=two"]
        self.run_trainer(*run, "--nproc", "2")
        config = json.loads((self.dir / "two/config.json").read_text())
        tokens = config["train"]["batch_size"] * config["train"]["seq_len"] * 2
        self.assertEqual(config["train"]["total_batch_tokens"] % tokens, 0)
        self.assertEqual(config["schedule"]["warmup_steps"], 0)
        self.assertEqual(len(self.records("two", "train")), 8)

    def test_the_program_is_named_as_the_user_types_it(self):
        (self.dir / "bin").mkdir()
        (self.dir / "bin/train").write_bytes(TRAINER.read_bytes())
        (self.dir / "bin/train").chmod(0o755)
        said = subprocess.run(["bin/train", "prepare", "mine.txt", "--out", "mine", "--minutes", "0.01"], cwd=self.dir,
                              capture_output=True, text=True, timeout=100, env=ENVIRONMENT).stdout
        self.assertIn("next: bin/train mine/config.json\n", said)

    def test_an_edited_configuration_is_not_lost(self):
        prepare = ["prepare", "mine.txt", "--out", "mine", "--minutes", "0.01"]
        self.run_trainer(*prepare)
        config = self.dir / "mine/config.json"
        edited = json.loads(config.read_text())
        edited["train"]["batch_size"] = 4
        config.write_text(json.dumps(edited))
        self.run_trainer(*prepare, "--force")
        self.assertEqual(json.loads((self.dir / "mine/config.json.old-1").read_text()), edited)
        self.assertEqual(json.loads(config.read_text())["train"]["batch_size"], 0)

    def test_no_configuration_for_a_text_that_is_too_short(self):
        (self.dir / "short.txt").write_text("A line.\n" * 30)
        said = self.run_trainer("prepare", "short.txt", "--tokenizer", "bytes", "--out", "short")
        self.assertIn("shorter than one batch", said)
        self.run_trainer("prepare", "mine.txt", "--out", "none", "--minutes", "0")
        self.assertEqual([*self.dir.glob("*/config.json")], [])

"""Invalid arguments, and commands under launchers, on terminals and for other users."""
import json
import os
import pty
import re
import shutil
import stat
import subprocess
import unittest

from test_ranks import MPI_ENVIRONMENT
from trainer import ENVIRONMENT, TRAINER, TrainerTest

USAGE, DATA, CONFIG = 64, 65, 78
COMMANDS = ("prepare", "export", "inspect", "plan", "report")


class Arguments(TrainerTest):
    def refused(self, *args, words, code=USAGE):
        """Requires the exit code and one short message with these words."""
        with self.subTest(" ".join(args)):
            said = self.run_trainer(*args, expect=code)
            for word in words:
                self.assertIn(word, said)
            self.assertRegex(said, r"\Atrain_gpt: [^\n]{10,200}\n\Z")

    def test_numbers(self):
        self.train(train_max_steps=1)
        unbounded = ("nan", "1e999", "-1", "9" * 400)
        fractions, counts = ("prepare", "text.txt", "--out", "out", "--tokenizer", "bytes"), ("eval", "run")
        for command, flag, bad, word in [
                (["sample", "run"], "--temperature", [*unbounded, "inf", "1001"], "finite number in [0, 1000]"),
                (["sample", "run"], "--top-p", [*unbounded, "-0.1", "1.01"], "finite number in [0, 1]"),
                (["sample", "run"], "--min-p", [*unbounded, "-0.1", "1.01"], "finite number in [0, 1]"),
                (["sample", "run"], "--tokens", [*unbounded, "0", "1.5"], "integer in [1, 16777216]"),
                (["sample", "run"], "--top-k", [*unbounded, "0x10"], "integer in [0, 16777216]"),
                (["sample", "run"], "--seed", [*unbounded, str(2**64)], "integer in [0, 18446744073709551615]"),
                (["eval", "run"], "--batches", unbounded, "integer in [0, 1000000000]"),
                (["eval", "run"], "--stride", unbounded, "integer in [0, 16777216]"),
                (["eval", "run"], "--nproc", [*unbounded, "0", "1025"], "integer in [1, 1024]"),
                (["config.json"], "--nproc", [*unbounded, "0", "1025"], "integer in [1, 1024]"),
                (["plan", "config.json"], "--gpus", [*unbounded, "0"], "integer in [1, 1048576]"),
                (["plan", "config.json", "--gpus", "8"], "--gpus-per-node", [*unbounded, "0"], "[1, 1048576]"),
                (["plan", "config.json", "--gpus", "8"], "--nvlink", unbounded, "rate"),
                (["plan", "config.json", "--gpus", "8"], "--net", unbounded, "rate"),
                ([*fractions], "--val-fraction", unbounded, "fraction"),
                ([*fractions], "--bpe-dropout", unbounded, "dropout"),
                ([*fractions], "--copies", unbounded, "copies"),
                ([*fractions], "--shard-tokens", unbounded, "shard"),
                ([*fractions], "--vocab-size", unbounded, "vocab")]:
            for text in bad:
                self.refused(*command, f"{flag}={text}", words=[word])
        self.assertFalse((self.dir / "out").exists())
        largest = self.run_trainer("sample", "run", "--seed", 2**64 - 1, "--tokens", 1)
        self.assertNotEqual(largest, self.run_trainer("sample", "run", "--seed", 1, "--tokens", 1, "--prompt", "x"))

    def test_training_options_with_another_command(self):
        self.train(train_max_steps=1)
        for flag in (["--set", "run.dir=x"], ["--resume"], ["--auto"], ["--fresh"], ["--debug-sync"],
                     ["--accept-changes"], ["--help-config"]):
            self.refused(*flag, "sample", "run", words=[flag[0], "sample"])
            self.refused("sample", "run", *flag, words=[flag[0], "sample"])
        self.refused("config.json", "sample", "run", words=['unexpected "config.json" before the command sample'])
        self.refused("--set", "run.dir=x", "plan", "config.json", words=["--set must come after the command: plan"])
        self.refused("--resume", "train", "config.json", words=["--resume must come after the command: train"])
        self.assertIn("parameters", self.run_trainer("plan", "config.json", "--set", "run.dir=x"))

    def test_commands_that_run_as_one_process(self):
        self.write_config()
        paths = {"prepare": ["text.txt", "--out", "out"], "export": ["--hf", "run", "out"], "plan": ["config.json"]}
        for command in COMMANDS:
            for args in (["--nproc", "2", command, *paths.get(command, ["run"])],
                         [command, *paths.get(command, ["run"]), "--nproc", "2"]):
                self.refused(*args, words=["--nproc", f"{command} runs as a single process"])
        self.assertFalse((self.dir / "out").exists())

    def test_misspelled_commands_and_options(self):
        self.refused("sampel", "run", words=['"sampel"', "did you mean sample?"])
        self.refused("sampel", "run", "--prompt", "x", words=["did you mean sample?"])
        self.refused("trian", words=["did you mean train?"])
        self.refused("sample", "run", "--temprature", "1", words=["--temprature", "did you mean --temperature?"])
        self.refused("config.json", "--resum", words=["--resum", "did you mean --resume?"])
        self.refused("xyzzy", words=['"xyzzy" is neither a command nor a file'])
        (self.dir / "sampel").write_text("{}")
        self.assertNotIn("did you mean", self.run_trainer("sampel", expect=66))  # a configuration with the defaults

    def test_train(self):
        config = self.write_config(train_max_steps=2)
        self.run_trainer(config)
        self.run_trainer("train", config, "--set", "run.dir=again")
        self.assertEqual(self.records("again"), self.records("run"))
        self.assertIn("run.dir again is not empty",
                      self.run_trainer("train", config, "--set", "run.dir=again", expect=USAGE))

    def test_keys_in_the_wrong_place(self):
        config = self.write_config()
        self.refused(config, "--set", "max_steps=5", words=['did you mean "train.max_steps"?'], code=CONFIG)
        for command, name in (([], "batch_size"), ([], "train.batch_size"), (["train"], "batch_size"),
                              (["plan"], "batch_size")):
            self.refused(*command, config, f"--{name}=4", words=[f"--{name} is not an option of ",
                                                                 "; use --set train.batch_size=4 (see --help)"])
        self.refused(config, "--batch_size", "4", words=["--batch_size is not", "; use --set train.batch_size=VALUE"])
        self.refused(config, "--every_steps=2", words=["--set eval.every_steps=2", "--set log.every_steps=2", " or "])
        self.refused(config, "--set", "train.batch_size", "4",
                     words=["--set: must be section.key=value, such as train.batch_size=4, is \"train.batch_size\""])
        self.assertNotIn("--set", self.run_trainer("sample", "run", "--batch_size=4", expect=USAGE))
        self.refused(config, "--set", "fsdp=5", words=["--help-config lists all keys"], code=CONFIG)
        for content, words in [({"run.dir": "x"}, ['in a file, keys are nested in sections: {"run":{"dir":"x"}}']),
                               ({"max_steps": 5}, ['"train.max_steps"', '{"train":{"max_steps":5}}']),
                               ({"model": {"max_steps": 5}}, ['"model.max_steps"; did you mean "train.max_steps"?'])]:
            (self.dir / "wrong.json").write_text(json.dumps(content))
            self.refused("wrong.json", words=["wrong.json", *words], code=CONFIG)


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Launched(TrainerTest):
    def mpirun(self, *args):
        return subprocess.run(["mpirun", "-q", "-np", "2", TRAINER, *args], cwd=self.dir, capture_output=True,
                              text=True, timeout=60, env=MPI_ENVIRONMENT)

    def test_ranks_share_an_evaluation(self):
        self.train(train_max_steps=3, parallel_zero_stage=2)
        for args in ([], ["--batches", "3", "--stride", "7"]):
            alone = self.run_trainer("eval", "run", *args)
            self.assertEqual(alone.count("loss"), 1)
            for ranks in (2, 3):
                self.assertEqual(self.run_trainer("eval", "run", *args, "--nproc", ranks), alone)
            self.assertEqual(self.run_trainer("--nproc", 2, "eval", "run", *args), alone)
            self.assertEqual(self.mpirun("eval", "run", *args).stdout, alone)

    def test_ranks_sum_a_validation_in_the_order_of_one_rank(self):
        self.train(train_max_steps=3)
        config = self.write_config(train_max_steps=1, model_init_from="run", optim_learning_rate=0, eval_every_steps=1,
                                   train_total_batch_tokens=360)
        self.run_trainer(config, "--set", "run.dir=on_1")
        for ranks in (2, 3):
            self.run_trainer("--nproc", ranks, config, "--set", f"run.dir=on_{ranks}")
            self.assertEqual(self.records(f"on_{ranks}", "val"), self.records("on_1", "val"))

    def test_single_process_commands_refuse_a_launcher(self):
        self.train(train_max_steps=1)
        for args in (["inspect", "run"], ["export", "--hf", "run", "out"]):
            result = self.mpirun(*args)
            self.assertEqual(result.returncode, USAGE)
            self.assertEqual(result.stdout, "")
            self.assertIn(f"{args[0]} runs as a single process, but Open MPI has started 2", result.stderr)
        self.assertFalse((self.dir / "out").exists())
        # Every process in a pod has the pod's variables.
        self.run_trainer("inspect", "run", RANK="0", WORLD_SIZE="2", MASTER_ADDR="pod-0", MASTER_PORT="29500")

    def test_the_error_is_the_last_line(self):
        config = self.write_config(data_train="nothing_*.bin")
        for args, code in (([config], 66), (["eval", "nowhere"], 66)):
            said = self.run_trainer("--nproc", 2, *args, expect=code)
            self.assertRegex(said, r"\A(train_gpt: [^\n]*\n)+\Z")


class Text(TrainerTest):
    def on_terminal(self, *args):
        """Returns what the trainer writes to a terminal."""
        ours, its = pty.openpty()
        process = subprocess.Popen([TRAINER, *args], cwd=self.dir, stdout=its, env=ENVIRONMENT)
        os.close(its)
        written = b""
        try:
            while block := os.read(ours, 4096):
                written += block
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        self.assertEqual(process.wait(), 0)
        return written.replace(b"\r\n", b"\n")

    def to_pipe(self, *args):
        return subprocess.run([TRAINER, *args], cwd=self.dir, capture_output=True, check=True, env=ENVIRONMENT).stdout

    def test_samples_are_utf8_and_terminals_get_no_control_characters(self):
        self.train(train_max_steps=1, optim_learning_rate=1e-9)  # an untrained model may generate any byte
        prompt = "tab\tnew\nline é € \U0001f600 \x1b[31m\x07\r\x7f\u0085\u009b".encode()
        # Invalid UTF-8: truncated, not a lead byte, overlong, a surrogate, beyond Unicode.
        cut = b"\xe2\x82 \xf0\x9f\x98 \xff \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80"
        sample = ["sample", "run", "--tokens", "200", "--prompt", prompt + cut]
        written = self.to_pipe(*sample)
        self.assertTrue(written.startswith(prompt + cut.decode(errors="replace").encode()), written)
        text = written.decode()
        self.assertGreater(text.count("\ufffd"), 30)
        self.assertRegex(text.replace(prompt.decode(), ""), "[\x00-\x08]")  # generated by the model
        escaped = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda control: f"\\x{ord(control[0]):02x}", text)
        self.assertEqual(self.on_terminal(*sample).decode(), escaped)

        config = self.write_config(run_dir="shows", train_max_steps=1, sample_every_steps=1, sample_tokens=200,
                                   optim_learning_rate=1e-9)
        self.assertIn("\ufffd", self.to_pipe(config).decode())
        shown = self.on_terminal(config, "--fresh").decode()
        self.assertNotRegex(shown, "[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Permissions(TrainerTest):
    def test_files_follow_the_umask_and_locks_do_not(self):
        for mask in (0o022, 0o002, 0o077):
            with self.subTest(oct(mask)):
                out = self.dir / oct(mask)
                out.mkdir()
                config = self.write_config(run_dir=f"{out}/run", train_max_steps=1, eval_every_steps=1)
                for args in (["prepare", "text.txt", "--tokenizer", "bytes", "--out", f"{out}/data"], [config],
                             ["export", "--hf", f"{out}/run", f"{out}/hf"],
                             ["report", f"{out}/run", "--out", f"{out}/report.html"]):
                    subprocess.run([TRAINER, *args], cwd=self.dir, check=True, stdout=subprocess.DEVNULL,
                                   env=ENVIRONMENT, umask=mask)
                modes = {path: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
                self.assertGreater(len(modes), 20)
                for path, mode in modes.items():
                    expected = 0o777 & ~mask if path.is_dir() else 0o600 if path.name == "lock" else 0o666 & ~mask
                    self.assertEqual(oct(mode), oct(expected), path)

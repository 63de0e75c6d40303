"""Packaging: versions, installation, completion, the manual page and the schema."""
import json
import os
import pty
import re
import select
import subprocess
import time
import unittest

import jsonschema
from trainer import ENVIRONMENT, ROOT, TRAINER, TrainerTest


def printed(*args):
    return subprocess.run([TRAINER, *args], capture_output=True, text=True, check=True).stdout


class Version(unittest.TestCase):
    def test_the_number_is_the_changelogs(self):
        number, revision = re.match(r"train_gpt (\d+\.\d+\.\d+) \((\w+)(?:-dirty)?(?:, [\d-]{10})?\)\n",
                                    printed("--version")).groups()
        newest = re.search(r"^## \[(\d[\d.]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
        self.assertEqual(number, newest)
        self.assertRegex(revision, r"^([0-9a-f]{7,}|unknown)$")

    def test_a_new_revision_compiles_one_file(self):
        """Checks what make would do after a commit if all objects exist."""
        build = os.path.relpath(TRAINER.parent, ROOT)
        said = subprocess.run(["make", "-n", f"BUILD={build}", "REVISION=0123456789ab", f"{build}/train_gpt_cpu"],
                              cwd=ROOT, capture_output=True, text=True, check=True).stdout
        self.assertEqual(re.findall(r" (\S+\.(?:cpp|cu))$", said, re.M), ["train_gpt.cu"], said)


class Schema(TrainerTest):
    schema = json.loads(printed("--config-schema"))
    validator = jsonschema.Draft202012Validator(schema)
    keys = {f"{section}.{key}": value for section, rows in schema["properties"].items()
            for key, value in rows.get("properties", {}).items()}

    def refused(self, config, name="config.json"):
        """Returns the program's message about the file's values, or an empty string if it accepts each of them."""
        (self.dir / name).write_text(json.dumps(config))
        said = self.run_trainer("plan", name, "--set", "no.such=key", expect=78)
        return "" if 'unknown key "no.such"' in said else said

    def both(self, config, accept):
        """Requires that the schema and the program both accept or both refuse the configuration."""
        said = self.refused(config)
        self.assertEqual(not said, accept, f"the program: {config}: {said}")
        self.assertEqual(self.validator.is_valid(config), accept, f"the schema: {config}")

    def nested(self, key, value):
        section, name = key.split(".")
        return {section: {name: value}}

    def test_it_is_a_schema_of_every_key(self):
        self.validator.check_schema(self.schema)
        table = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| .* \| (.*) \|$", printed("--markdown-config"), re.M)
        self.assertEqual([(key, json.loads(default), help) for key, default, help in table],
                         [(key, row["default"], row["description"]) for key, row in self.keys.items()])

    def test_the_included_configurations(self):
        for path in sorted((ROOT / "configs").glob("*.json")):
            with self.subTest(path.name):
                self.validator.validate(json.loads(path.read_text()))

    def test_the_ends_of_every_range(self):
        for end, bound in (("minimum", "minLength"), ("maximum", "maxLength")):
            config = {}
            for key, row in self.keys.items():
                section, name = key.split(".")
                value = row[end] if end in row else "x" * row[bound] if bound in row else row.get("enum", [True])[-1]
                config.setdefault(section, {})[name] = value
            self.both(config, True)

    def test_values_out_of_range(self):
        for key, row in self.keys.items():
            wrong = [row["minimum"] - 1, row["maximum"] + max(1, 1e-3 * row["maximum"])] if "minimum" in row else \
                ["x" * (row["maxLength"] + 1)] if "maxLength" in row else ["no such choice"]
            if row.get("minLength"):
                wrong.append("")
            if row.get("type") == "integer":
                wrong[1] = row["maximum"] + 1
            for value in wrong[-2:]:
                self.both(self.nested(key, value), False)

    def test_types_and_unknown_keys(self):
        for key, values in (("train.max_steps", [1.5, "5", None, [5], True]), ("optim.beta1", ["0.9", False, {}]),
                            ("run.dir", [5, None, ["runs"], "a\0b"]), ("device.tf32", [0, "true"]),
                            ("train.precision", ["fp64", "FP32", 32]), ("run.seed", [-1, 2**64])):
            for value in values:
                self.both(self.nested(key, value), False)
        for config, accept in (({"trian": {}}, False), ({"train": {"max_step": 5}}, False), ({"train": 5}, False),
                               ([], False), ({}, True), ({"train": {}}, True), ({"optim": {"beta1": 0}}, True),
                               ({"$schema": "train_gpt.schema.json", "run": {"dir": "ä"}}, True),
                               ({"$schema": 5}, False), ({"run": {"$schema": "x"}}, False)):
            self.both(config, accept)


class Completion(TrainerTest):
    def offered(self, *words):
        return [line.split("\t")[0] for line in printed("--complete", *words).splitlines()]

    def test_every_command_option_and_key(self):
        overview = printed("--help")
        commands = re.findall(r"^  (\w+) ", overview[overview.index("Subcommands:"):], re.M)
        self.assertGreater(len(commands), 6)
        self.assertEqual(self.offered(""), [*commands, ":files *.json"])
        for command in ([], *([name] for name in commands)):
            flags = re.findall(r"^  (?:-\w,)?(--[\w-]+)", printed(*command, "--help"), re.M)
            self.assertEqual(sorted(self.offered(*command, "-")), sorted(flags))
        keys = re.findall(r"^\| `([\w.]+)`", printed("--markdown-config"), re.M)
        for words in (["--set"], ["configs/x.json", "--set"], ["plan", "--set", "train.max_steps=5", "--set"]):
            self.assertEqual(self.offered(*words, ""), [key + "=" for key in keys])

    def test_the_value_of_an_option(self):
        for words, expected in (
                (["--set", "train.precision="], [f"train.precision={name}" for name in ("fp32", "bf16", "fp16")]),
                (["--set=device.tf32=t"], ["--set=device.tf32=true"]),
                (["--set", "device.tf32=t"], ["device.tf32=true"]),
                (["--set", "train.max_steps="], []), (["--set", "no.such="], []),
                (["--set", "data.val=x"], [":files *"]),
                (["--completion", "f"], ["fish"]), (["--completion=z"], ["--completion=zsh"]),
                (["--nproc", ""], []), (["--nproc", "2", "sa"], ["sample", ":files *.json"]),
                (["sample", ""], [":files *"]), (["sample", "run", ""], []), (["sample", "run", "--seed", ""], []),
                (["report", "a", "b", ""], [":files *"]), (["plan", ""], [":files *.json"]),
                (["prepare", "--tokenizer", "b"], ["bytes", "bpe", ":files *"])):
            with self.subTest(words):
                self.assertEqual(self.offered(*words), expected)

    def test_tab_in_bash(self):
        (self.dir / "nested").mkdir()
        for name in ("made.json", "made.txt", "nested/other.json"):
            (self.dir / name).touch()
        (self.dir / "train_gpt_cpu").symlink_to(TRAINER)
        (self.dir / "rc").write_text(printed("--completion", "bash") + "PS1='READY '\nbind 'set bell-style none'\n")
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.dir)
            os.environ.update(PATH=f"{self.dir}:{os.environ['PATH']}", TERM="dumb", COLUMNS="200")
            os.execvp("bash", ["bash", "--noprofile", "--rcfile", "rc", "-i"])
        self.addCleanup(os.waitpid, pid, 0)
        self.addCleanup(os.close, terminal)

        def read_until(text):
            seen, deadline = "", time.monotonic() + 20
            while text not in seen:
                ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
                self.assertTrue(ready, f"no {text!r} in {seen!r}")
                seen += os.read(terminal, 4096).decode(errors="replace")
            return seen

        read_until("READY ")
        for typed, expected in (
                ("train_gpt_cpu sam", "train_gpt_cpu sample"), ("train_gpt_cpu --aut", "train_gpt_cpu --auto"),
                ("./train_gpt_cpu ma", "./train_gpt_cpu made.json"),
                ("train_gpt_cpu plan nes", "train_gpt_cpu plan nested/"),
                ("train_gpt_cpu plan nested/", "train_gpt_cpu plan nested/other.json"),
                ("train_gpt_cpu --set train.recomp", "train_gpt_cpu --set train.recompute="),
                ("train_gpt_cpu --set train.recompute=bl", "train_gpt_cpu --set train.recompute=block"),
                ("train_gpt_cpu --set=train.precision=bf", "train_gpt_cpu --set=train.precision=bf16"),
                ("train_gpt_cpu made.json --set run.dir=nes", "train_gpt_cpu made.json --set run.dir=nested/"),
                ("train_gpt_cpu sample --prompt 'a b' --temp", "train_gpt_cpu sample --prompt a b --temperature")):
            with self.subTest(typed):
                # Insert "echo" at the line's beginning, and append text that appears only in echo's output.
                os.write(terminal, f"{typed}\t\x01echo \x05 $((6 * 7))\n".encode())
                self.assertIn(f"\n{expected} 42\r", read_until(" 42\r").replace("  42", " 42"))
        os.write(terminal, b"exit\n")


class ManPage(unittest.TestCase):
    def test_it_is_complete_and_well_formed(self):
        page = printed("--man-page")
        checked = subprocess.run(["mandoc", "-T", "lint", "-W", "warning"], input=page, capture_output=True, text=True)
        self.assertEqual((checked.returncode, checked.stdout), (0, ""))
        text = subprocess.run(["mandoc", "-T", "ascii", "-O", "width=500"], input=page, capture_output=True, text=True,
                              check=True).stdout
        text = re.sub(r".\x08", "", text)
        overview = printed("--help")
        for flag in re.findall(r"--[\w-]+", overview):
            self.assertIn(flag, text)
        for key in re.findall(r"^\| `([\w.]+)`", printed("--markdown-config"), re.M):
            self.assertRegex(text, rf"(?m)^ +{re.escape(key)}\b")
        for line in printed("--exit-codes").splitlines():
            code, _, policy, meaning = line.split(" ", 3)
            self.assertRegex(text, rf"(?m)^ +{code} +{re.escape(meaning)} \({policy}\)$")
        self.assertIn(re.match(r"train_gpt (\S+)", printed("--version"))[0], text)


class Installation(TrainerTest):
    def make(self, target, **variables):
        settings = [f"{name}={value}" for name, value in variables.items()]
        return subprocess.run(["make", "-s", target, *settings], cwd=ROOT, capture_output=True, text=True)

    def test_install_use_and_uninstall(self):
        (self.dir / "build").mkdir()
        (self.dir / "build/train_gpt_cpu").symlink_to(TRAINER)
        where = {"BUILD": self.dir / "build", "PREFIX": "/opt/gpt", "DESTDIR": self.dir / "root"}
        result = self.make("install", **where)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        top = self.dir / "root/opt/gpt"
        for name in ("bin/train_gpt_cpu", "share/man/man1/train_gpt.1", "share/train_gpt/config.schema.json",
                     "share/bash-completion/completions/train_gpt_cpu", "share/zsh/site-functions/_train_gpt",
                     "share/fish/vendor_completions.d/train_gpt.fish", "share/doc/train_gpt/docs/installation.md",
                     "share/train_gpt/configs/quickstart.json", "share/doc/train_gpt/LICENSE"):
            self.assertTrue((top / name).resolve(strict=True).is_file(), name)
        for path in top.rglob("*"):
            executable = path.is_dir() or path.parent.name == "bin" or path.suffix in (".sh", ".slurm")
            self.assertEqual(path.stat().st_mode & 0o777, 0o755 if executable else 0o644, path)

        # As a user who has only the installed files.
        def run(*command, expect=0):
            result = subprocess.run(list(map(str, command)), cwd=self.dir, capture_output=True, text=True, timeout=60,
                                    env={**ENVIRONMENT, "OMP_NUM_THREADS": "2"})
            self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
            return result.stdout + result.stderr
        program = top / "bin/train_gpt_cpu"
        run(program, "prepare", "--tokenizer", "gpt2", "text.txt", "--out", "gpt2")
        self.assertIn("50257 tokens", run(program, "inspect", "gpt2/tokenizer.json"))
        run(program, "plan", top / "share/train_gpt/configs/gpt2_124M.json")
        run(program, "--supervise", self.write_config(), "--auto")
        self.assertEqual(len(self.records()), 20)
        self.assertIn("usage", run(top / "bin/train_gpt-hosts", expect=64))
        self.assertIn("fineweb10B", run(top / "bin/train_gpt-get"))
        self.assertIn(f": {top.relative_to(self.dir)}/share/train_gpt/get.sh fineweb10B\n",
                      run(program, top / "share/train_gpt/configs/gpt2_124M.json", "--set", "run.dir=other", expect=66))

        (top / "share/train_gpt/mine.txt").touch()  # must be kept
        self.assertEqual(self.make("uninstall", **where).returncode, 0)
        self.assertEqual([path for path in top.rglob("*") if not path.is_dir()], [top / "share/train_gpt/mine.txt"])
        self.assertFalse((top / "share/doc/train_gpt").exists())
        result = self.make("uninstall", **where)
        self.assertIn("does not exist: no installation found", result.stderr)

    def test_nothing_was_built(self):
        result = self.make("install", BUILD=self.dir / "empty", DESTDIR=self.dir / "root")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("has neither train_gpt_cpu nor train_gpt", result.stderr)
        self.assertFalse((self.dir / "root").exists())

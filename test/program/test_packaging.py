"""Packaging: versions, installation and completion."""
import os
import pty
import re
import select
import subprocess
import time
import unittest

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


class Completion(TrainerTest):
    script = ROOT / "scripts/completion.bash"

    def setUp(self):
        super().setUp()
        (self.dir / "train_gpt_cpu").symlink_to(TRAINER)

    def offered(self, words, breaks=""):
        """The words that may follow, where `breaks` separate the words that bash replaces."""
        complete = 'source "$1"; compopt() { :; }; COMP_WORDBREAKS=$2 COMP_LINE=$3 COMP_POINT=${#3}; _train_gpt; ' \
                   'printf "%s\n" "${COMPREPLY[@]}"'
        return subprocess.run(["bash", "-c", complete, "bash", self.script, breaks, f"./train_gpt_cpu {words}"],
                              cwd=self.dir, capture_output=True, text=True, check=True).stdout.split()

    def test_every_command_option_and_key(self):
        overview = printed("--help")
        commands = re.findall(r"^  ([\w-]+) ", overview[overview.index("Subcommands:"):], re.M)
        self.assertGreater(len(commands), 6)
        self.assertEqual(self.offered(""), commands)
        for command in ("", *(f"{name} " for name in commands)):
            flags = re.findall(r"^  (?:-\w,)?(--[\w-]+)", printed(*command.split(), "--help"), re.M)
            self.assertEqual(self.offered(command + "-"), flags)
        keys = re.findall(r"^\| `([\w.]+)`", printed("--markdown-config"), re.M)
        for words in ("--set ", "configs/x.json --set ", "plan --set train.max_steps=5 --set "):
            self.assertEqual(self.offered(words), [key + "=" for key in keys])

    def test_every_value(self):
        for key, allowed in re.findall(r"^(\S+) .*\n.*, (.*)$", printed("--help-config"), re.M):
            values = allowed.split("|") if "|" in allowed else ["true", "false"] if allowed == "true or false" else []
            self.assertEqual(self.offered(f"plan --set {key}="), [f"{key}={value}" for value in values])

    def test_what_fits(self):
        for words, expected in (
                ("--set train.precision=f", [f"train.precision=fp{bits}" for bits in (32, 16, 8)]),
                ("--set=device.tf32=t", ["--set=device.tf32=true"]), ("--set=device.tf", ["--set=device.tf32="]),
                ("--set no.such=", []), ("--set data.val=x", []), ("--nproc 2 sa", ["sample"]),
                ("sample ", []), ("sample --seed ", []), ("plan sa", []), ("prepare sample --forc", ["--force"]),
                ("sample  --prompt 'a b'   --temp", ["--temperature"])):
            with self.subTest(words):
                self.assertEqual(self.offered(words), expected)
        for words, expected in (("--set train.precision=b", ["bf16"]), ("--set=device.tf", ["device.tf32="]),
                                ("--set=device.tf32=t", ["true"]), ("--set device.tf", ["device.tf32="])):
            with self.subTest(f"replaced after =: {words}"):
                self.assertEqual(self.offered(words, breaks="=:"), expected)

    def test_tab_in_bash(self):
        (self.dir / "nested").mkdir()
        for name in ("made.json", "made.txt", "nested/other.json"):
            (self.dir / name).touch()
        (self.dir / "rc").write_text(f"source '{self.script}'\nPS1='READY '\nbind 'set bell-style none'\n")
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
                ("./train_gpt_cpu made.j", "./train_gpt_cpu made.json"),
                ("train_gpt_cpu plan nes", "train_gpt_cpu plan nested/"),
                ("train_gpt_cpu plan nested/", "train_gpt_cpu plan nested/other.json"),
                ("train_gpt_cpu --set train.recomp", "train_gpt_cpu --set train.recompute="),
                ("train_gpt_cpu --set train.recomp\tbl", "train_gpt_cpu --set train.recompute=block"),
                ("train_gpt_cpu --set=train.precision=bf", "train_gpt_cpu --set=train.precision=bf16"),
                ("train_gpt_cpu made.json --set run.dir=nes", "train_gpt_cpu made.json --set run.dir=nested/"),
                ("train_gpt_cpu sample --prompt 'a b' --temp", "train_gpt_cpu sample --prompt a b --temperature")):
            with self.subTest(typed):
                # Insert "echo" at the line's beginning, and append text that appears only in echo's output.
                os.write(terminal, f"{typed}\t\x01echo \x05 $((6 * 7))\n".encode())
                self.assertIn(f"\n{expected} 42\r", read_until(" 42\r").replace("  42", " 42"))
        os.write(terminal, b"exit\n")


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
        for name in ("bin/train_gpt_cpu", "share/bash-completion/completions/train_gpt_cpu",
                     "share/doc/train_gpt/docs/installation.md", "share/train_gpt/configs/quickstart.json",
                     "share/doc/train_gpt/LICENSE"):
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
        self.assertIn(f"run {top.relative_to(self.dir)}/share/train_gpt/get.sh fineweb10B\n",
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

"""dev/contest.py times entries, sees what is wrong with a score, and hides the held-out text from training."""
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, ROOT, TRAINER, generated_text

MARK = "Selah hidden from training."
UNIFORM = 'echo "$(stat -c %s "$3") $(stat -c %s "$3" | awk \'{ printf "%.9f", $1 * log(256) }\')"'


class Contest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        self.text = generated_text(1000) + MARK + "\n"
        (self.dir / "text.txt").write_text(self.text)

    def entry(self, name, train=":", score=UNIFORM):
        """Writes an entry of two scripts; $2 and $3 are the first arguments of a subcommand."""
        path = self.dir / name
        path.write_text(f'#!/bin/bash\nif [ "$1" = train ]; then\n{train}\nelse\n{score}\nfi\n')
        path.chmod(0o755)
        return path

    def contest(self, *args, expect=0, **environment):
        """Returns the records of the entries' results, and the output. The result of xz goes to self.xz."""
        done = subprocess.run([ROOT / "dev/contest.py", *map(str, args), "--text", "text.txt", "--out", "out"],
                              cwd=self.dir, capture_output=True, text=True, timeout=400,
                              env={**ENVIRONMENT, **environment})
        said = done.stdout + done.stderr
        self.assertEqual(done.returncode, expect, said)
        records = [json.loads(line) for line in (self.dir / "out/results.jsonl").read_text().splitlines()]
        if "--tune" not in args:
            self.xz = records.pop()
            self.assertEqual(self.xz["entry"], "xz -9e")
        return records, said

    def reason(self, *args):
        """Returns the reason for the disqualification of the only entry."""
        (record,), said = self.contest(*args, expect=1)
        self.assertNotIn("bits_per_byte", record)
        self.assertIn(f"disqualified: {record['disqualified']} |", said)
        (self.dir / "out/results.jsonl").unlink()
        return record["disqualified"]

    def test_a_uniform_model_has_8_bits_per_byte(self):
        pieces = 'n=$(stat -c %s "$3"); yes "1 5.545177444479562" | head -n $((n - 7)); echo "7 38.816242111356935"'
        records, said = self.contest(self.entry("whole"), self.entry("pieces", score=pieces), "--seconds", "60")
        for record in records:
            self.assertAlmostEqual(record["bits_per_byte"], 8, places=5)
            self.assertEqual(record["text_sha256"], hashlib.sha256(self.text.encode()).hexdigest())
        self.assertRegex(said, r"\| pieces \| \d+\.\d \| \d+\.\d \| 8\.0000 \|\n\| xz -9e \|  \|  \| \d\.\d{4} \|\n$")

    @unittest.skipUnless(shutil.which("xz"), "there is no xz")
    def test_the_result_of_xz(self):
        (record,), _ = self.contest(self.entry("any"), "--seconds", "60")
        train = self.text[:len(self.text) - record["held_out_bytes"]]
        sizes = [len(subprocess.run(["xz", "-9ec"], input=text.encode(), capture_output=True, check=True).stdout)
                 for text in (train, self.text)]
        self.assertAlmostEqual(self.xz["bits_per_byte"], 8 * (sizes[1] - sizes[0]) / record["held_out_bytes"], 9)

    def test_the_example_of_the_page(self):
        example = re.search(r"```python\n(.*?)```", (ROOT / "docs/contest.md").read_text(), re.DOTALL)[1]
        (self.dir / "mine.py").write_text(example)
        (record,), _ = self.contest("python3 mine.py", "--seconds", "100")
        held_out = self.text[-record["held_out_bytes"]:]
        order_0 = -sum(math.log2(held_out.count(letter) / len(held_out)) for letter in held_out) / len(held_out)
        self.assertLess(record["bits_per_byte"], order_0 - 0.5)
        self.assertGreater(record["bits_per_byte"], 1.5)  # log2(300) bits for 5.5 bytes, the mean length of a word

    def test_late_entries_are_ended_and_disqualified(self):
        sleep = 'sleep 1000 & echo $! >> "$0.pids"; wait'
        for late in ("train", "score"):
            with self.subTest(late):
                begin = time.monotonic()
                reason = self.reason(self.entry("late", **{late: sleep}), "--seconds", "3")
                self.assertEqual(reason, f"{late} took more than 3.03 s")
                self.assertLess(time.monotonic() - begin, 100)
        # A process that outlives training would use the time of scoring.
        self.contest(self.entry("late", 'sleep 1000 & echo $! >> "$0.pids"'), "--seconds", "60")
        pids = (self.dir / "late.pids").read_text().split()
        self.assertEqual(len(pids), 3)
        for pid in pids:
            self.assertFalse(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes(), pid)

    def test_wrong_scores_are_refused(self):
        size = 'n=$(stat -c %s "$3"); '
        for score, reason in (("echo $((n - 1)) 1", "have"), ("echo $((n + 1)) 1", "have"), ("echo $n 1; echo 1 1",
                              "have"), ("true", "have 0 bytes"), ("echo $n -1", "line 1"), ("echo 1 1; echo $n nan",
                              "line 2"), ("echo $n inf", "line 1"), ("echo $((n + 1)) 1; echo -1 1", "line 2"),
                              ("echo $n", "line 1"), ("echo $n 1 1", "line 1"), ("echo bits 1", "line 1")):
            with self.subTest(score):
                self.assertIn(reason, self.reason(self.entry("wrong", score=size + score), "--seconds", "60"))

    def test_failures_are_disqualified(self):
        self.assertIn("train failed with exit code 3, see ",
                      self.reason(self.entry("failing", train="exit 3"), "--seconds", "60"))
        self.assertIn("score failed with exit code 4, see ",
                      self.reason(self.entry("failing", score=f"{UNIFORM}; exit 4"), "--seconds", "60"))
        self.assertIn("No such file", self.reason("./missing", "--seconds", "60"))
        done = self.contest(self.entry("failing", train="exit 3"), self.entry("good"), "--seconds", "60", expect=1)
        self.assertAlmostEqual(done[0][1]["bits_per_byte"], 8, places=5)  # others still have a result

    def test_training_never_sees_the_held_out_text(self):
        search = f'grep -rlF "{MARK}" "$(dirname "$0")/out" | grep -c held_out >> "$0.$1"'
        train = f'{search}; cp "$2" "$0.seen"; ls -A "$3" "$TMPDIR" | wc -w >> "$0.files"; touch "$TMPDIR/cache"'
        train += '; echo "$CONTEST_SEED" >> "$0.seeds"'
        score = f'{search}; (cd "$(dirname "$3")"; echo *.txt) >> "$0.texts"; {UNIFORM}'
        entries = [self.entry(name, train, score) for name in ("first", "second")]
        records, said = self.contest(*entries, "--seeds", "2", "--seconds", "60")
        self.assertEqual([record["seed"] for record in records], [1, 1, 2, 2])
        self.assertIn("| 8.0000 (8.0000 to 8.0000, 2 seeds) |", said)
        subprocess.run([TRAINER, "prepare", "--tokenizer", "bytes", "--minutes", "0", "text.txt", "--out", "data"],
                       cwd=self.dir, check=True, capture_output=True, env=ENVIRONMENT)
        begin = json.loads((self.dir / "data/dataset.json").read_text())["val_begin"]
        for name in ("first", "second"):
            self.assertEqual((self.dir / f"{name}.train").read_text(), "0\n0\n")
            self.assertEqual((self.dir / f"{name}.score").read_text(), "1\n1\n")  # the search finds it
            self.assertEqual((self.dir / f"{name}.seen").read_text(), self.text[:begin])
            self.assertEqual((self.dir / f"{name}.seeds").read_text(), "1\n2\n")
            self.assertEqual((self.dir / f"{name}.texts").read_text(), "held_out.txt\n" * 2)
        self.assertEqual((self.dir / "first.files").read_text().split(), ["2", "2"])  # the headings of ls

    def test_tuning_never_sees_it_at_all(self):
        entry = self.entry("tuned", 'cp "$2" "$0.seen"', f'cp "$3" "$0.held_out"; {UNIFORM}')
        (whole,), _ = self.contest(entry, "--seconds", "60")
        (self.dir / "out/results.jsonl").unlink()
        (record,), _ = self.contest(entry, "--tune", "--seconds", "60")
        self.assertTrue(record["tuning"])
        self.assertEqual((self.dir / "tuned.seen").read_text() + (self.dir / "tuned.held_out").read_text(),
                         self.text[:-whole["held_out_bytes"]])

    def test_what_an_entry_is_given(self):
        say = 'echo "$CONTEST_SEED $OMP_NUM_THREADS $(env -u OMP_NUM_THREADS nproc) $@" >> "$0.said"'
        self.contest(self.entry("any", say, f"{say}; {UNIFORM}"), "--threads", "1", "--seconds", "60.5")
        out = self.dir.resolve() / "out"
        self.assertEqual((self.dir / "any.said").read_text(),
                         f"1 1 1 train {out}/train.txt {out}/any_1/out 60.5 1\n"
                         f"1 1 1 score {out}/any_1/out {out}/held_out.txt 1\n")

    def test_our_entry(self):
        settings = "prepare.vocab_size=300 prepare.copies=2 model.n_layer=1 model.n_embd=64 train.max_steps=80 " \
                   "schedule.warmup_steps=10"
        (record,), _ = self.contest(ROOT / "dev/contest_train_gpt.py", "--seconds", "300", CONTEST_SETTINGS=settings)
        self.assertEqual(record["settings"], settings)
        config = json.loads((self.dir / "out/contest_train_gpt_1/out/run/config.json").read_text())
        model = config["model"]
        self.assertEqual((model["n_layer"], model["vocab_size"], config["run"]["seed"]), (1, 300, 1))
        (self.dir / "held_out.txt").write_text(self.text[-record["held_out_bytes"]:])
        said = subprocess.run([TRAINER, "eval", "out/contest_train_gpt_1/out/run", "--text", "held_out.txt"], text=True,
                              cwd=self.dir, check=True, capture_output=True, env=ENVIRONMENT).stdout
        self.assertAlmostEqual(record["bits_per_byte"], float(re.search(r"([\d.]+) bits per byte", said)[1]), 4)
        self.assertLess(record["bits_per_byte"], 4.5)
        self.assertGreater(record["bits_per_byte"], 1.5)

    def test_our_entry_ends_a_run_that_is_late(self):
        stand_in = self.dir / "trainer"
        stand_in.write_text('#!/bin/bash\necho "$@" >> "$0.calls"\n[ "$1" != prepare ] || exit 0\n'
                            'if [ "$1" = eval ]; then echo "text: 100 tokens, loss 2.5, perplexity"; exit; fi\n'
                            "trap 'exit 75' TERM; sleep 1000 & wait\n")
        stand_in.chmod(0o755)
        (record,), _ = self.contest(ROOT / "dev/contest_train_gpt.py", "--seconds", "10", TRAINER=str(stand_in))
        self.assertAlmostEqual(record["nats"], 250)
        minutes = float(re.search(r"train\.max_minutes=([\d.]+)", (self.dir / "trainer.calls").read_text())[1])
        self.assertLess(minutes * 60, 8)
        self.assertGreater(minutes * 60, 4)

    def search(self, *args, **environment):
        """Runs a search with an entry that adds X and Y in its settings; returns its results: bits and settings."""
        score = 'n=$(stat -c %s "$3"); eval "$CONTEST_SETTINGS"; echo "$X$Y" >> "$0.calls"; ' \
                'awk "BEGIN { printf \\"%d %.6f\\", $n, $n * ($X + $Y) * log(2) }"'
        done = subprocess.run([ROOT / "dev/contest_search.py", self.entry("sum", score=score), "--text", "text.txt",
                               "--out", "out", "--seconds", "60", *args], cwd=self.dir, capture_output=True, text=True,
                              timeout=400, env={**ENVIRONMENT, **environment})
        self.assertEqual(done.returncode, 0, done.stderr)
        return [tuple(line.split("  ")) for line in done.stdout.splitlines() if "  " in line]

    def test_search(self):
        choices = ["--try", "X", "1", "2", "--try", "Y", "4", "-9", "3"]
        self.assertEqual(self.search("--trials", "9", *choices, CONTEST_SETTINGS="Z=0"), [
            ("4.0000", "Z=0 X=1 Y=3"), ("5.0000", "Z=0 X=1 Y=4"), ("5.0000", "Z=0 X=2 Y=3"), ("6.0000", "Z=0 X=2 Y=4"),
            ("inf", "Z=0 X=1 Y=-9"), ("inf", "Z=0 X=2 Y=-9")])  # negative NATS are disqualified
        calls = (self.dir / "sum.calls").read_text().split()
        self.assertEqual(sorted(calls), ["1-9", "13", "14", "2-9", "23", "24"])
        found = self.search("--trials", "2", *choices, CONTEST_SETTINGS="Z=0")  # nothing runs twice
        self.assertEqual((len(found), (self.dir / "sum.calls").read_text().split()), (2, calls))
        records = [json.loads(line) for line in (self.dir / "out/results.jsonl").read_text().splitlines()]
        self.assertTrue(all(record["tuning"] for record in records))

    def test_wrong_usage(self):
        (self.dir / "line.txt").write_text("a line\n")
        for args, reason in ((["--text", "none.txt"], "none.txt"), (["--text", "line.txt"], "cannot be split"),
                             (["--threads", "1000"], "CPUs"), (["--seeds", "0"], "must be positive")):
            done = subprocess.run([ROOT / "dev/contest.py", "any", "--out", "out", *args], cwd=self.dir, text=True,
                                  capture_output=True, env=ENVIRONMENT)
            self.assertEqual(done.returncode, 2, args)
            self.assertIn(reason, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

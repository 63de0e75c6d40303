"""prepare as users run it: interrupted and repeated, twice at once, from standard input, with JSON and CSV files."""
import json
import os
import re
import signal
import subprocess

from trainer import ENVIRONMENT, FROM_TERMINAL, TRAINER, TrainerTest, generated_text, wait_until

AGAIN, CANNOT_CREATE, DATA = 75, 73, 65


class Prepare(TrainerTest):
    def setUp(self):
        super().setUp()
        (self.dir / "book.txt").write_text(generated_text(8000))

    # BPE-dropout and copies turn half a megabyte into a few seconds of work.
    SLOW = ["prepare", "book.txt", "--minutes", "0", "--copies", "8", "--bpe-dropout", "0.1", "--vocab-size", "600",
            "--threads", "2"]

    def start(self, *args):
        process = subprocess.Popen([TRAINER, *self.SLOW, *args], cwd=self.dir, env=ENVIRONMENT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **FROM_TERMINAL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertRegex(process.stdout.readline(), "trained|resuming")  # signal handlers are installed
        shard = self.dir / "out" / "prepare.unfinished" / "train_000000.bin"
        wait_until(lambda: shard.exists() and shard.stat().st_size > 1024, "no shard was begun")
        return process

    def test_interrupted_and_repeated(self):
        self.run_trainer(*self.SLOW, "--out", "whole")
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start("--out", "out")
            process.send_signal(number)
            said = process.communicate(timeout=60)[0]
            self.assertEqual(process.returncode, AGAIN, said)
            self.assertIn("run the same command again to resume", said)
        said = self.run_trainer(*self.SLOW[:-4], "--vocab-size", "601", "--out", "out", expect=CANNOT_CREATE)
        self.assertIn("--force", said)
        self.assertIn("resuming an unfinished prepare", self.run_trainer(*self.SLOW, "--out", "out"))
        whole, out = self.contents("whole"), self.contents("out")
        self.assertEqual(list(out.values()), list(whole.values()))

    def test_simultaneous_and_successive_calls(self):
        process = self.start("--out", "out")
        said = self.run_trainer("prepare", "text.txt", "--out", "out", expect=CANNOT_CREATE)
        self.assertIn("in use", said)
        self.assertIn(f"pid {process.pid}", said)
        process.kill()
        process.wait()
        said = self.run_trainer("prepare", "text.txt", "--out", "out", expect=CANNOT_CREATE)
        self.assertIn("--force", said)
        self.run_trainer("prepare", "text.txt", "--out", "out", "--force")
        self.assertEqual(sorted(os.listdir(self.dir / "out")),
                         ["config.json", "dataset.json", "tokenizer.json", "tokenizer_config.json", "train_000000.bin",
                          "val_000000.bin"])
        before = self.contents("out")
        self.assertIn("--force", self.run_trainer("prepare", "book.txt", "--out", "out", expect=CANNOT_CREATE))
        self.assertEqual(self.contents("out"), before)

    def test_no_option_is_needed(self):
        said = self.run_trainer("prepare", "book.txt", "--out", "out")
        self.assertRegex(said, r"tokenizer of \d+ tokens \(default for this amount of text; ")

    def test_json_and_csv_are_not_trained_on_as_text(self):
        texts = [f"text number {i}\nwith two lines" for i in range(100)]
        (self.dir / "array.json").write_text(json.dumps(texts))
        (self.dir / "lines.json").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
        (self.dir / "rows.csv").write_text("id,body\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)))
        size = sum(map(len, texts))
        command = ["prepare", "--tokenizer", "bytes", "--val-fraction", "0", "--force", "--out", "out"]
        for name in ("array.json", "rows.csv"):
            self.assertIn("convert the file to JSONL or Parquet", self.run_trainer(*command, name, expect=DATA))
        self.assertIn('choose one with --field: "body"', self.run_trainer(*command, "lines.json", expect=DATA))
        self.assertIn(f"train: {size} bytes of text in 100 documents, {size + 100} tokens in 1 shard\n",
                      self.run_trainer(*command, "lines.json", "--field", "body"))

    def test_standard_input(self):
        command = [TRAINER, "prepare", "--tokenizer", "bytes", "--val-fraction", "0", "-", "--out", "piped"]
        with open(self.dir / "text.txt", "rb") as text:
            cat = subprocess.Popen(["cat"], stdin=text, stdout=subprocess.PIPE)
            said = subprocess.run(command, cwd=self.dir, stdin=cat.stdout, capture_output=True, text=True, check=True,
                                  env=ENVIRONMENT).stdout
            cat.stdout.close()
            cat.wait()
        size = int(re.search(r"train: (\d+) bytes", said)[1])
        self.assertEqual(size, (self.dir / "text.txt").stat().st_size)
        self.assertEqual(json.loads((self.dir / "piped" / "dataset.json").read_text())["sources"][0]["path"], "-")

"""`eval` and eval.questions compared with results of lm-evaluation-harness in test/recorded/lm_eval."""
import gzip
import json
import math
import re
import shutil
import unittest

import event_file
import llmc_file
from ordered_pairs import as_lines, ordered_pairs
from trainer import ROOT, TrainerTest

REFERENCE = ROOT / "test/recorded/lm_eval"
EXPECTED = json.loads((REFERENCE / "expected.json").read_text())
ACCURACIES = ("acc", "acc_norm")
QUESTIONS = [{"context": "etaoin shr", "choices": ["dlu", "eta oin", "x"], "label": 0},
             {"question": "The ", "choices": ["shrdlu", "et"], "gold": 1},
             {"query": "", "endings": ["Oin.", "aaaa", "Lu dlu eat"], "label": "2"},
             {"context": "a long context beyond the twenty tokens of the model", "choices": ["one", "b"], "label": 0}]


def accuracies_in(said):
    """Returns {name: (accuracy, standard error)} of each file, in order."""
    files = re.split(r"^.* questions\n", said, flags=re.MULTILINE)[1:]
    number = r" +([\d.]+) \+/- ([\d.]+)"
    return [{name: (float(share), float(error)) for name, share, error in re.findall(r"  (\w+)" + number, file)}
            for file in files]


class Reference(TrainerTest):
    """The recorded model, a Hugging Face directory."""

    def setUp(self):
        super().setUp()
        shutil.copytree(REFERENCE, self.dir / "hf")

        self.pairs = [pair for name in ("hellaswag", "general")
                      for line, scores in zip((self.dir / f"hf/{name}.jsonl").read_text().splitlines(),
                                              EXPECTED[name]["log_likelihoods"], strict=True)
                      for pair in ordered_pairs(json.loads(line), scores)]
        (self.dir / "pairs.jsonl").write_text(as_lines(self.pairs))

    def test_questions(self):
        """test/training/test_answers.cpp compares each log-likelihood."""
        said = self.run_trainer("eval", "hf", "--questions", "hf/hellaswag.jsonl", "--questions", "hf/general.jsonl")
        for name, shares in zip(("hellaswag", "general"), accuracies_in(said), strict=True):
            self.assertEqual(tuple(shares), ACCURACIES)
            for accuracy, (share, error) in shares.items():
                self.assertAlmostEqual(share, EXPECTED[name][accuracy], delta=5e-5)
                self.assertAlmostEqual(error, EXPECTED[name][accuracy + "_stderr"], delta=5e-5)
        for name, truncated, of in (("hellaswag", 15, 20), ("general", 2, 16)):
            self.assertIn(f"  {truncated} of {of} completions have a truncated context", said)

    def test_the_result_does_not_depend_on_the_batch_or_the_ranks(self):
        args = ("eval", "hf", "--questions", "hf/hellaswag.jsonl", "--questions", "hf/general.jsonl", "--questions",
                "pairs.jsonl", "--text", "hf/text.txt")
        alone = self.run_trainer(*args)
        self.assertRegex(alone, rf"pairs.jsonl: {len(self.pairs)} questions\n  acc +1\.0000 ")
        for more in (["--batch", 2], ["--batch", 5], ["--batch", 64], ["--nproc", 2], ["--nproc", 3, "--batch", 2]):
            with self.subTest(more):
                said = self.run_trainer(*args, *more)
                # Sums over batches differ in the last bits.
                self.assertEqual(re.sub(r"(\d\.\d{4})\d+", r"\1", said), re.sub(r"(\d\.\d{4})\d+", r"\1", alone))
                if "--batch" not in more:
                    self.assertEqual(said, alone)

    def test_a_part_of_the_questions(self):
        said = self.run_trainer("eval", "hf", "--questions", "hf/general.jsonl", "--limit", 1)
        self.assertRegex(said, r"hf/general.jsonl: 1 questions\n  acc +[01]\.0000\n")  # no standard error for one

    def test_text(self):
        for name in ("text.txt", "text.txt.gz", "text.jsonl"):
            (self.dir / "text.txt.gz").write_bytes(gzip.compress((self.dir / "hf/text.txt").read_bytes()))
            (self.dir / "text.txt").write_bytes((self.dir / "hf/text.txt").read_bytes())
            (self.dir / "text.jsonl").write_text(json.dumps({"text": (self.dir / "text.txt").read_bytes().decode()}))
            said = self.run_trainer("eval", "hf", "--text", name)
            pattern = r"(\d+) tokens, loss (\S+), perplexity (\S+), (\S+) bits per byte\n"
            tokens, loss, perplexity, bits = map(float, re.search(pattern, said).groups())
            size = len((self.dir / "text.txt").read_bytes())
            self.assertAlmostEqual(bits, EXPECTED["text"]["bits_per_byte"], delta=2e-6)
            self.assertAlmostEqual(loss * tokens / size, math.log(EXPECTED["text"]["byte_perplexity"]), delta=2e-6)
            self.assertAlmostEqual(perplexity / math.exp(loss), 1, delta=1e-5)

    def test_overlapping_windows(self):
        for stride, expected in EXPECTED["text"]["loss_with_stride"].items():
            said = self.run_trainer("eval", "hf", "--text", "hf/text.txt", "--stride", stride)
            self.assertAlmostEqual(float(re.search(r"370 tokens, loss (\S+),", said)[1]), expected, delta=2e-6)

    def test_several_documents(self):
        """Each document starts with an empty context, so two equal ones have the loss of one."""
        line = json.dumps({"text": (self.dir / "hf/text.txt").read_bytes().decode()}) + "\n"
        (self.dir / "twice.jsonl").write_text(line * 2)
        once, twice = (self.run_trainer("eval", "hf", "--text", name).partition(": ")[2]
                       for name in ("hf/text.txt", "twice.jsonl"))
        self.assertEqual(twice.replace("740 tokens", "370 tokens"), once)

    def test_invalid_options(self):
        for args, code, words in (
                ([], 64, "add --data, --text or --questions"),
                (["--text", "hf/text.txt", "--stride", 49], 64, "at most the model's sequence length, 48"),
                (["--limit", 3], 64, "--questions"), (["--text", "nothing.txt"], 66, "nothing.txt"),
                (["--tokenizer", "gpt2", "--text", "hf/text.txt"], 78, "50257 tokens"),
                (["--questions", "nothing.jsonl"], 66, "nothing.jsonl")):
            with self.subTest(args):
                self.assertIn(words, self.run_trainer("eval", "hf", *args, expect=code))
        (self.dir / "empty.txt").write_text("")
        self.run_trainer("eval", "hf", "--text", "empty.txt", expect=65)
        (self.dir / "hf/tokenizer.json").unlink()
        for flag, file in (("--text", "hf/text.txt"), ("--questions", "hf/general.jsonl")):
            self.assertIn("tokenizer", self.run_trainer("eval", "hf", flag, file, expect=66))
        self.run_trainer("eval", "hf", "--text", "hf/text.txt", "--tokenizer", REFERENCE / "tokenizer.json")

    def test_malformed_questions(self):
        good = {"context": "a", "choices": ["b", "c"], "label": 0}
        swag = {"activity_label": "x", "ctx_a": "a", "ctx_b": "b", "endings": ["c", "d"], "label": 1}
        for line, words in (
                ("{", "line 2 of q.jsonl"), ("[1]", "line 2 must be an object"),
                ({**good, "context": None}, '"context" must be text, but is null'),
                ({"choices": ["a", "b"], "label": 0}, 'line 2 has no "context" or "question" or "query"'),
                ({**good, "query": "a"}, 'both "context" and "query"'),
                ({**good, "gold": 0}, 'both "label" and "gold"'),
                ({"context": "a", "label": 0}, 'no "choices" or "endings"'),
                ({"context": "a", "choices": ["b", "c"]}, 'no "label" or "gold"'),
                ({**good, "choices": ["b"]}, "a list of at least two texts"),
                ({**good, "choices": ["b", 5]}, "a list of at least two texts"),
                ({**good, "choices": "bc"}, "a list of at least two texts"),
                ({**good, "label": 2}, '"label" must be an integer from 0 to 1, but is 2'),
                ({**good, "label": "A"}, '"label" must be an integer from 0 to 1'), ({**good, "label": -1}, "is -1"),
                ({**swag, "ctx_b": 5}, '"ctx_b" must be text, but is 5'),
                ({key: value for key, value in swag.items() if key != "ctx_b"}, 'has no "ctx_b"'),
                ({key: value for key, value in swag.items() if key != "activity_label"}, 'has no "activity_label"'),
                ({key: value for key, value in swag.items() if key != "endings"}, 'has no "endings"'),
                ({key: value for key, value in swag.items() if key != "label"}, 'has no "label"')):
            with self.subTest(line):
                text = line if isinstance(line, str) else json.dumps(line)
                (self.dir / "q.jsonl").write_text(json.dumps(good) + "\n" + text + "\n")
                said = self.run_trainer("eval", "hf", "--questions", "q.jsonl", "--limit", 1, expect=65)
                self.assertIn(words, said)
                self.assertIn("q.jsonl", said)
                self.assertIn("line 2", said)
        (self.dir / "q.jsonl").write_text("\n \n")
        self.assertIn("no question", self.run_trainer("eval", "hf", "--questions", "q.jsonl", expect=65))
        (self.dir / "q.jsonl").write_text(json.dumps({**good, "choices": ["b", "q" * 60]}))
        self.assertIn("has 61 tokens, but the model's sequences have 48",
                      self.run_trainer("eval", "hf", "--questions", "q.jsonl", expect=65))


class Run(TrainerTest):
    """A run with the bytes tokenizer, and questions for it."""

    def setUp(self):
        super().setUp()
        (self.dir / "small.jsonl").write_text(as_lines(QUESTIONS))
        (self.dir / "small_c.jsonl").write_text(as_lines(QUESTIONS))

    def test_one_model_in_three_formats(self):
        self.train(train_max_steps=3)
        self.run_trainer("export", "--hf", "run", "hf")
        llmc_file.write_model(self.dir / "hf", self.dir / "model.bin")
        args = ("--questions", "small.jsonl", "--text", "text.txt", "--data", "data/val_*.bin", "--batch", 3)
        # The run uses windows of 20 tokens; a model without a configuration uses all positions.
        self.run_trainer("import", "hf", "again")
        of_hf = self.run_trainer("eval", "hf", *args)
        self.assertEqual(self.run_trainer("eval", "again", *args), of_hf)
        tokenizer = ("--tokenizer", "run/tokenizer.json")
        self.assertEqual(self.run_trainer("eval", "model.bin", *args, *tokenizer), of_hf)
        self.assertNotEqual(self.run_trainer("eval", "run", *args), of_hf)
        prompt = ("--prompt", "The", "--tokens", 12, "--temperature", 0)
        said = self.run_trainer("sample", "run", *prompt)
        for source in (["hf"], ["model.bin", *tokenizer]):
            self.assertEqual(self.run_trainer("sample", *source, *prompt), said)
        self.assertIn("--tokenizer", self.run_trainer("sample", "model.bin", expect=66))

    def test_questions_during_training(self):
        changes = dict(eval_every_steps=4, train_max_steps=10, checkpoint_every_steps=4, checkpoint_keep=9)
        self.train(run_dir="without", **changes)
        asked = dict(changes, eval_questions="small*")
        said = self.train(**asked)
        self.assertEqual(self.weights(10), self.weights(10, "without"))
        self.assertEqual(self.records(kind="train"), self.records("without", "train"))
        self.assertEqual(self.records(kind="val"), self.records("without", "val"))
        records = self.records(kind="questions")
        self.assertEqual([record["step"] for record in records], [4, 8, 10])
        last = records[-1]
        self.assertEqual(len({last[f"small/{accuracy}"] for accuracy in ACCURACIES}), 2)  # distinguishable
        shares = accuracies_in(self.run_trainer("eval", "run", "--questions", "small.jsonl", "--questions",
                                                "small_c.jsonl"))
        for name, of in zip(("small", "small_c"), shares):
            self.assertEqual(last[f"{name}/questions"], 4)
            for accuracy in ACCURACIES:
                self.assertAlmostEqual(last[f"{name}/{accuracy}"], of[accuracy][0], delta=5e-5)
                self.assertAlmostEqual(last[f"{name}/{accuracy}_stderr"], of[accuracy][1], delta=5e-5)
        self.assertIn(f"step 10 | small, 4 questions | acc {last['small/acc']:.4f} | acc_norm", said)
        self.assertIn(f"s:10 eval:{last['small/acc_norm']:.4f}\n", (self.dir / "run/main.log").read_text())
        values, _ = event_file.read(next((self.dir / "run/tensorboard").iterdir()))
        tags = {value.tag: value.value for value in values if value.step == 10}
        self.assertAlmostEqual(tags["questions/small/acc_norm"], last["small/acc_norm"], places=6)

        # Resume, also on more ranks and with sharded parameters.
        whole = self.records()
        shutil.rmtree(self.step_dir(10))
        self.train("--resume", **asked)
        self.assertEqual(self.records(), whole)
        config = self.write_config(**dict(asked, train_total_batch_tokens=360, optim_learning_rate=0))
        self.run_trainer(config, "--set", "run.dir=on_1")
        for ranks, stage in ((2, 0), (3, 3)):
            self.run_trainer("--nproc", ranks, config, "--set", f"run.dir=on_{ranks}", "--set",
                             f"parallel.zero_stage={stage}")
            self.assertEqual(self.records(f"on_{ranks}", "questions"), self.records("on_1", "questions"))

    def test_questions_without_validation(self):
        self.train(train_max_steps=2, eval_every_steps=1, data_val="", eval_questions="small.jsonl",
                   eval_max_questions=3)
        self.assertEqual([record["small/questions"] for record in self.records(kind="questions")], [3, 3])
        self.assertEqual(self.records(kind="val"), [])
        self.assertIn("add --data, --text or --questions", self.run_trainer("eval", "run", expect=64))

    def test_questions_are_read_before_anything_is_written(self):
        (self.dir / "long.jsonl").write_text(as_lines([{"context": "a", "choices": ["b", "c" * 30], "label": 0}]))
        (self.dir / "bad.jsonl").write_text("{}")
        shutil.copy(self.dir / "small.jsonl", self.dir / "small.txt")
        for changes, code, words in (
                ({"eval_questions": "none_*"}, 66, "eval.questions: no file matches"),
                ({"eval_questions": "bad.jsonl"}, 65, "bad.jsonl: line 1 has no"),
                ({"eval_questions": "long.jsonl"}, 65, "has 31 tokens, but the model's sequences have 20"),
                ({"eval_questions": "small.*"}, 78, "eval.questions"),
                ({"eval_questions": "small.jsonl", "data_tokenizer": ""}, 66,
                "small.jsonl has text, which requires"),
                ({"eval_questions": "small.jsonl", "eval_every_steps": 0}, 78, "eval.every_steps")):
            with self.subTest(changes):
                said = self.train(**{"train_max_steps": 1, "eval_every_steps": 1, **changes}, expect=code)
                self.assertIn(words, said)
                self.assertFalse((self.dir / "run").exists())


if __name__ == "__main__":
    unittest.main()

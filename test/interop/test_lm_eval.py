"""lm-evaluation-harness on an exported model gives the metrics and the order of log-likelihoods of `eval`."""
import sys
import unittest

from ordered_pairs import as_lines, ordered_pairs
from trainer import ROOT, TrainerTest, generated_text

sys.path.insert(0, str(ROOT / "test/recorded/lm_eval"))
import make_lm_eval_reference as reference  # noqa: E402

REQUIREMENTS = [["lm-eval[hf]==0.4.13", "torch"]]


class Export(TrainerTest):
    def setUp(self):
        super().setUp()
        text = generated_text(200) + reference.TEXT * 3
        (self.dir / "book.txt").write_bytes(text.encode())
        self.run_trainer("prepare", "book.txt", "--tokenizer", "bpe", "--vocab-size", 320, "--val-fraction", 0,
                         "--out", "book")
        self.train(data_train="book/train_*.bin", data_val="", data_tokenizer="book/tokenizer.json",
                   model_vocab_size=320, model_n_positions=40, train_seq_len=40, train_total_batch_tokens=240,
                   train_max_steps=200)
        self.run_trainer("export", "--hf", "run", "hf")

    def test_the_figures_are_the_same(self):
        lines = generated_text(40, seed=2).splitlines()
        general = [{"context": first[:30], "choices": [first[31:], second[31:], third], "label": len(third) % 3}
                   for first, second, third in zip(lines, lines[1:], lines[2:])] + reference.GENERAL
        for name, documents in (("general", general), ("hellaswag", reference.HELLASWAG)):
            (self.dir / f"{name}.jsonl").write_text(as_lines(documents))
        text = generated_text(30, seed=3) + reference.TEXT
        (self.dir / "text.txt").write_bytes(text.encode())
        theirs = reference.evaluate(self.dir / "hf", general, reference.HELLASWAG, text)

        pairs = [pair for name, documents in (("general", general), ("hellaswag", reference.HELLASWAG))
                 for document, scores in zip(documents, theirs[name]["log_likelihoods"], strict=True)
                 for pair in ordered_pairs(document, scores)]
        (self.dir / "pairs.jsonl").write_text(as_lines(pairs))
        args = ("--questions", "general.jsonl", "--questions", "hellaswag.jsonl", "--questions", "pairs.jsonl",
                "--text", "text.txt")
        said = self.run_trainer("eval", "hf", *args)
        self.assertEqual(said, self.run_trainer("eval", "run", *args))
        print(f"\n{said}lm-eval:")
        for name, of in theirs.items():
            print(f"  {name} {({key: value for key, value in of.items() if not isinstance(value, list)})}")
        self.assertRegex(said, rf"pairs.jsonl: {len(pairs)} questions\n  acc +1\.0000 ")
        for name, begin in (("general", said.index("general.jsonl")), ("hellaswag", said.index("hellaswag.jsonl"))):
            words = said[begin:].split()
            for accuracy in ("acc", "acc_norm"):
                at = words.index(accuracy)
                self.assertAlmostEqual(float(words[at + 1]), theirs[name][accuracy], delta=5e-5)
                self.assertAlmostEqual(float(words[at + 3]), theirs[name][accuracy + "_stderr"], delta=5e-5)
        words = said[said.index("text.txt"):].replace(",", "").split()
        self.assertAlmostEqual(float(words[words.index("bits") - 1]), theirs["text"]["bits_per_byte"], delta=2e-6)


if __name__ == "__main__":
    unittest.main()

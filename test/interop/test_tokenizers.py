"""prepare with the tokenizers of model families, compared with Hugging Face's library on random and long texts"""
import array
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt_cpu"
sys.path.insert(0, str(ROOT / "test/recorded/tokenizers"))
import make_tokenizer_families as families  # noqa: E402

REQUIREMENTS = [["tokenizers"]]
PARTS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", "'ſ", "don't", "Hello", "HTTPServer", "camelCase", "1234",
         "7", "½", "é", "e\u0301", "\u0301", "中文", "。", "「", "한국", "\u1112\u1161\u11ab", "हिन्दी", "עברית",
         "العربية", "!?", "...", "/", "//", "😀", "👩‍👩‍👧", "\u00a0", "\u3000", "\u200b", "<|endoftext|>", "<tool_call>",
         "ℵ", "ि", "x = y;\n", "#!", "▁", "\x01"]


class Tokenizers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        choose = random.Random(1)
        corpus = [(families.DATA / "tokenizer_corpus.txt").read_text("utf-8"), *families.texts(), *families.SCRIPTS,
                  *("".join(choose.choices(PARTS, k=40)) for _ in range(300))]
        cls.families = families.families(corpus, 1500)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)

    def prepared(self, tokenizer, path):
        file = self.dir / "tokenizer.json"
        tokenizer.save(str(file))
        subprocess.run([TRAINER, "prepare", "--tokenizer", file, "--val-fraction", "0", "--minutes", "0", "--force",
                        path, "--out", self.dir / "out"], check=True, stdout=subprocess.DEVNULL)
        ids = array.array("H")
        ids.frombytes((self.dir / "out/train_000000.bin").read_bytes()[1024:])
        return ids.tolist()

    def expected(self, tokenizer, texts):
        ids = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
        end = next(ids[name] for name in ("<|endoftext|>", "<|end_of_text|>", "</s>") if name in ids)
        start = [ids[name] for name in ("<|begin_of_text|>", "<s>") if name in ids]
        return [id for text in texts for id in [end, *start, *families.ids_of(tokenizer, text, False)]]

    def test_random_documents(self):
        choose = random.Random(2)
        texts = ["".join(choose.choices(PARTS, k=choose.randint(0, 40))) for _ in range(3000)]
        texts += [families.random_text(200, seed) for seed in range(30)]
        path = self.dir / "x.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for name, tokenizer in self.families.items():
            with self.subTest(name):
                self.assertEqual(self.prepared(tokenizer, path), self.expected(tokenizer, texts))

    def test_a_document_of_several_blocks(self):
        choose = random.Random(3)
        text = "a" + "".join(choose.choices(PARTS, k=600_000))
        path = self.dir / "x.txt"
        path.write_bytes(text.encode())
        for name, tokenizer in self.families.items():
            with self.subTest(name):
                self.assertEqual(self.prepared(tokenizer, path), self.expected(tokenizer, [text]))


if __name__ == "__main__":
    unittest.main()

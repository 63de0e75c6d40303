"""prepare compared with pyarrow and tiktoken on the same data"""
import array
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pyarrow
import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt_cpu"
sys.path.insert(0, str(ROOT / "dev"))
from bench_prepare import gpt2_encoding  # noqa: E402

REQUIREMENTS = [["pyarrow", "tiktoken"]]


class Prepare(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)

    def tokens(self, path, tokenizer, *options):
        """Returns the tokens of the single shard that prepare makes from a file."""
        subprocess.run([TRAINER, "prepare", "--tokenizer", tokenizer, "--val-fraction", "0", "--force", *options, path,
                        "--out", self.dir / "out"], check=True, stdout=subprocess.DEVNULL)
        ids = array.array("H")
        ids.frombytes((self.dir / "out/train_000000.bin").read_bytes()[1024:])
        return ids.tolist()

    def test_parquet_files_of_every_kind(self):
        for seed in range(60):
            choose = random.Random(seed)
            alphabet = choose.choice(["ab", "abcdefgh \n", "aé中\U0001f600"])
            texts = ["".join(choose.choices(alphabet, k=choose.choice([0, 1, 7, 300])))
                     for _ in range(choose.choice([1, 9, 50]))]
            rows = [choose.choice([None, *texts]) if choose.random() < 0.3 else choose.choice(texts)
                    for _ in range(choose.choice([1, 8, 9, 1000, 5000]))] + ["end"]  # not all null
            kind = choose.choice([pyarrow.string(), pyarrow.large_string()])
            table = pyarrow.table({"n": list(range(len(rows))), "body": pyarrow.array(rows, kind)})
            options = {"compression": choose.choice(["none", "snappy", "gzip", "zstd"]),
                       "use_dictionary": choose.random() < 0.6, "data_page_version": choose.choice(["1.0", "2.0"]),
                       "data_page_size": choose.choice([100, 5000, 1 << 20]),
                       "row_group_size": choose.choice([7, 999, 10**6]),
                       "dictionary_pagesize_limit": choose.choice([50, 1 << 20]),
                       "write_page_checksum": choose.random() < 0.5}
            with self.subTest(seed=seed, **options):
                path = self.dir / "x.parquet"
                pyarrow.parquet.write_table(table, path, **options)
                expected = [id for row in rows if row is not None for id in (256, *row.encode())]
                self.assertEqual(self.tokens(path, "bytes", "--field", "body"), expected)

    def test_the_tokens_of_tiktoken(self):
        encoding = gpt2_encoding()
        choose = random.Random(3)
        parts = [" ", "  ", "\n", "\n\n", "\t", "'s", "'LL", "don't", "Hello", "world", "1234", "½", "é", "中文", "!?",
                 "\U0001f600", "...", "\u00a0", "\u3000", "<|endoftext|>", "ℵ", "ि", "\u200b"]
        texts = ["".join(choose.choices(parts, k=choose.randint(0, 40))) for _ in range(5000)]
        path = self.dir / "x.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        expected = [id for text in texts for id in (50256, *encoding.encode_ordinary(text))]
        self.assertEqual(self.tokens(path, "gpt2"), expected)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Writes texts and their ids by Hugging Face's tokenizers library with GPT-2's vocabulary from data/gpt2.
test/data/tokenizer/test_tokenizer.cpp and test/program/test_commands.py expect these ids.

    pip install tokenizers tiktoken && python3 test/recorded/tokenizers/make_gpt2_reference.py [TEXT...]

data/gpt2_reference.json    texts and their ids

tiktoken, an independent implementation, must give the same ids; otherwise the script fails and writes nothing. For each
file TEXT, both libraries must also agree. The script does not store these ids but prints their number and the SHA-256
of the ids as little-endian uint16. A shard of `train_gpt prepare --tokenizer gpt2 --val-fraction 0`, without its header
and first token, has the same SHA-256.
"""
import array
import hashlib
import json
import pathlib
import sys

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import ByteLevelBPETokenizer

from make_tokenizer_reference import reference_texts

ROOT = pathlib.Path(__file__).resolve().parents[3]
VOCAB, MERGES = str(ROOT / "data/gpt2/vocab.json"), str(ROOT / "data/gpt2/merges.txt")
HASHES = {VOCAB: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
          MERGES: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"}
# The pattern of OpenAI's encoder.py.
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CODE = '#include <cstdio>\nint main() {\n\tfor (int i = 0; i < 10; i++) printf("%d\\n", i);\n        return 0;\n}\n'


def read_tokenizers():
    for path, expected in HASHES.items():
        assert hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() == expected, path
    ranks = data_gym_to_mergeable_bpe_ranks(MERGES, VOCAB)
    reference = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, explicit_n_vocab=50257,
                                  special_tokens={"<|endoftext|>": 50256})
    return ByteLevelBPETokenizer(VOCAB, MERGES), reference


def main():
    tokenizer, reference = read_tokenizers()

    def ids(text):
        result = tokenizer.encode(text).ids
        assert result == reference.encode_ordinary(text), text[:100]
        return result

    texts = reference_texts() + [CODE, "<|endoftext", " SolidGoldMagikarp petertodd"]
    cases = [{"text": text, "ids": ids(text)} for text in texts]
    (ROOT / "test/recorded/tokenizers/gpt2_reference.json").write_text(
        "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n", encoding="utf-8")
    for path in sys.argv[1:]:
        shard = array.array("H", ids(pathlib.Path(path).read_bytes().decode()))
        print(path, len(shard), hashlib.sha256(shard.tobytes()).hexdigest())


if __name__ == "__main__":
    main()

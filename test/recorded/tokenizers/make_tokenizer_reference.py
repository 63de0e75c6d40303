#!/usr/bin/env python3
"""Writes token ids by Hugging Face's tokenizers library. test/data/tokenizer/test_tokenizer.cpp expects them.

    pip install tokenizers && python3 test/recorded/tokenizers/make_tokenizer_reference.py

tokenizer_huggingface.json    a byte-level BPE of at most 600 tokens, trained on the corpus
tokenizer_reference.json      texts and their ids by that tokenizer
"""
import json
import pathlib
import random
import unicodedata

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = pathlib.Path(__file__).parent
SPACES = "\t\n\v\f\r   \x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000"
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", " 's", "''ve"]


def train(corpus):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([corpus], trainer)
    return tokenizer


def random_text(length):
    """Returns white space, ASCII, contractions, and all categories of Unicode 3.2, which all libraries support."""
    rng = random.Random(1)
    categories = {}
    for code in range(0x30000):
        category = unicodedata.ucd_3_2_0.category(chr(code))
        if category not in ("Cn", "Cs"):
            categories.setdefault(category, []).append(chr(code))
    kinds = [SPACES, [chr(c) for c in range(33, 127)], CONTRACTIONS] + list(categories.values())
    return "".join(rng.choice(rng.choice(kinds)) for _ in range(length))


def reference_texts():
    corpus = (DATA / "tokenizer_corpus.txt").read_text(encoding="utf-8")
    return [
        "", " ", "a", "\n\n\n", "   x   y", "In the beginning God created the heaven and the earth.",
        "it's they'll 'twas I'VE rock'n'roll ''s 'S", "x\u00a0\u3000 y\u2003\u2003z \u180e \u200b",
        "tabs\t\tand  spaces \r\n  at the end   ", "word" * 300, "1234567890 12 3,14 ¼ ² Ⅷ ٣",
        "naïve café — „Straße“ 😀👩‍👩‍👧 日本語 한국어 العربية हिन्दी", "".join(map(chr, range(1, 0x180))),
        corpus[1000:2000], random_text(3000)]


def main():
    tokenizer = train((DATA / "tokenizer_corpus.txt").read_text(encoding="utf-8"))
    cases = [{"text": text, "ids": tokenizer.encode(text).ids} for text in reference_texts()]
    tokenizer.save(str(DATA / "tokenizer_huggingface.json"))
    (DATA / "tokenizer_reference.json").write_text(
        "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Throughput of `prepare`, of Hugging Face's tokenizers and of tiktoken on the same texts and the same cores.

    dev/bench_tokenizers.py [--rounds N] [--threads N] [--trainer PROGRAM]     (pip install tokenizers tiktoken)

Vocabularies: GPT-2's (data/gpt2), and one of 32,000 tokens with Llama 3's pattern, trained on a part of the texts.
Texts: English prose (Debian's bible-kjv), source code (Python's standard library), and man pages in 20 languages
(/usr/share/man). Compares the whole command `prepare --threads N`, from reading a file to shards on disk, minus the
time of the same command for a text of one line, with encode_batch() and encode_ordinary_batch() with N threads on the
same text in memory, in parts of about 8 KiB. The three run in turn and must give the same tokens. Prints medians of the
wall time and of the processor time, which depends less on other programs on the same cores.
"""
import argparse
import array
import gzip
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_prepare import ROOT, gpt2_encoding  # noqa: E402

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
END = "<|endoftext|>"
MOST_BYTES = 8 << 20  # of a text


def texts():
    book = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    yield "English prose", book.stdout.decode()
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py")) + \
        sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    yield "source code", join(path.read_bytes() for path in library if "-packages" not in str(path))
    pages = sorted(path for path in Path("/usr/share/man").glob("*/man*/*.gz") if path.is_file())
    yield "manual pages", join(gzip.decompress(path.read_bytes()) for path in pages)


def join(files):
    text, size = [], 0
    for file in files:
        try:
            text.append(file.decode())
        except UnicodeDecodeError:
            continue
        size += len(file)
        if size > MOST_BYTES:
            break
    return "".join(text)


def parts_of(text):
    """The text in parts of about 8 KiB, cut before a single space."""
    parts, begin = [], 0
    for cut in re.finditer(r"(?<=\w)(?= \w)", text):
        if cut.start() - begin >= 1 << 13:
            parts.append(text[begin:cut.start()])
            begin = cut.start()
    return [*parts, text[begin:]]


def gpt2_tokenizer():
    tokenizer = Tokenizer(models.BPE.from_file(str(ROOT / "data/gpt2/vocab.json"), str(ROOT / "data/gpt2/merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def train_llama3(parts):
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=31999, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    return tokenizer


def tiktoken_of(tokenizer):
    """tiktoken with the same vocabulary. Uses ids as merge ranks, which holds for a vocabulary as trained."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet += [byte for byte in range(256) if byte not in alphabet]
    bytes_of = {chr(byte if i < 188 else 68 + i): byte for i, byte in enumerate(alphabet)}
    ranks = {bytes(bytes_of[c] for c in token): rank for token, rank in vocabulary.items()}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


def timed(work):
    """Returns wall and processor seconds, of this process and its children, and the result."""
    def processor():
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    begin, busy = time.perf_counter(), processor()
    result = work()
    return time.perf_counter() - begin, processor() - busy, result


def prepare(options, tokenizer, path, out):
    subprocess.run([options.trainer, "prepare", "--tokenizer", tokenizer, "--val-fraction", "0", "--minutes", "0",
                    "--threads", str(options.threads), "--force", path, "--out", out], check=True,
                   stdout=subprocess.DEVNULL)


def tokens_of(out):
    tokens = array.array("H")
    for shard in sorted(Path(out).glob("train_*.bin")):
        tokens.frombytes(shard.read_bytes()[1024:])
    return tokens.tolist()[1:]


def measure(options, folder, name, ours, huggingface, tiktoken_encoding, text):
    path, line, out = Path(folder, "text.txt"), Path(folder, "line.txt"), Path(folder, "out")
    path.write_text(text, encoding="utf-8")
    line.write_text("a line\n")
    size, parts, rows = path.stat().st_size, parts_of(text), []
    for _ in range(options.rounds):
        start = timed(lambda: prepare(options, ours, line, out))
        whole = timed(lambda: prepare(options, ours, path, out))
        *hf, encodings = timed(lambda: huggingface.encode_batch(parts, add_special_tokens=False))
        *tt, ids = timed(lambda: tiktoken_encoding.encode_ordinary_batch(parts, num_threads=options.threads))
        rows.append([(whole[i] - start[i], hf[i], tt[i]) for i in range(2)])
    expected = [id for one in ids for id in one]
    if tokens_of(out) != expected or [id for one in encodings for id in one.ids] != expected:
        sys.exit(f"{name}: the tokens differ")
    for i, time_of in enumerate(("wall", "processor")):
        ours_s, hf_s, tt_s = (statistics.median(column) for column in zip(*(row[i] for row in rows)))
        print(f"| {name} | {size / 1e6:.1f} | {len(expected)} | {time_of} | {size / ours_s / 1e6:.1f} | "
              f"{size / hf_s / 1e6:.1f} | {size / tt_s / 1e6:.1f} | "
              f"{statistics.median(row[i][1] / row[i][0] for row in rows):.1f} | "
              f"{statistics.median(row[i][2] / row[i][0] for row in rows):.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trainer", default=ROOT / "build/train_gpt_cpu")
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    all_texts = dict(texts())
    print("| vocabulary, text | MB | tokens | time | prepare, MB/s | tokenizers, MB/s | tiktoken, MB/s | "
          "times tokenizers | times tiktoken |\n|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        llama3 = train_llama3([part for text in all_texts.values() for part in parts_of(text)[::8]])
        llama3.save(f"{folder}/llama3.json")
        for name, ours, huggingface, encoding in (
                ("GPT-2", "gpt2", gpt2_tokenizer(), gpt2_encoding()),
                ("Llama 3's pattern", f"{folder}/llama3.json", llama3, tiktoken_of(llama3))):
            for kind, text in all_texts.items():
                measure(options, folder, f"{name}, {kind}", ours, huggingface, encoding, text)


if __name__ == "__main__":
    main()

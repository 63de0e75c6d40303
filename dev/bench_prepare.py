#!/usr/bin/env python3
"""Speed of `prepare --tokenizer gpt2` and of tiktoken with the same vocabulary, on one core and the same text.

    dev/bench_prepare.py [--text FILE] [--times N] [--trainer PROGRAM]     (pip install tiktoken)

The default text is ten copies of the King James text (Debian's bible-kjv). Compares processor time, as other programs
may run: of the whole command `prepare --threads 1`, from reading the text to shards on disk, minus the time of the same
command for a text of one line (it reads the vocabulary); and of tiktoken's encode_ordinary() on texts of a megabyte in
memory. The two run in turn and must give the same tokens. The result is the median of the ratios.
"""
import argparse
import json
import re
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiktoken

ROOT = Path(__file__).resolve().parents[1]
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def gpt2_encoding():
    """tiktoken's GPT-2, from the repository's vocabulary instead of a download."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = json.loads((ROOT / "data/gpt2/vocab.json").read_text("utf-8"))
    ranks = {bytes(bytes_of[c] for c in token): rank for token, rank in vocabulary.items() if token != "<|endoftext|>"}
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def default_text(folder):
    path = Path(folder, "kjv.txt")
    book = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    path.write_bytes(book.stdout * 10)
    return path


def pieces(text):
    """The text in parts of about a megabyte, cut at line ends without adjacent white space."""
    begin = 0
    for cut in re.finditer(r"(?<=\S\n)(?=\S)", text):
        if cut.start() - begin >= 1 << 20:
            yield text[begin:cut.start()]
            begin = cut.start()
    yield text[begin:]


def prepare_seconds(trainer, path, out):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([trainer, "prepare", "--tokenizer", "gpt2", "--val-fraction", "0", "--threads", "1", "--force", path,
                    "--out", out], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tokens_of(out):
    shards = sorted(Path(out).glob("train_*.bin"))
    return [token for shard in shards for token, in struct.iter_unpack("<H", shard.read_bytes()[1024:])][1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--trainer", default=ROOT / "build/train_gpt_cpu")
    options = parser.parse_args()
    encoding = gpt2_encoding()
    with tempfile.TemporaryDirectory() as folder:
        path = options.text or default_text(folder)
        text = path.read_text("utf-8", errors="strict")
        size = path.stat().st_size
        parts = list(pieces(text))
        line = Path(folder, "line.txt")
        line.write_text("a line\n")
        ratios = []
        for _ in range(options.times):
            start_up = prepare_seconds(options.trainer, line, f"{folder}/line")
            ours = prepare_seconds(options.trainer, path, f"{folder}/out") - start_up
            begin = time.process_time()
            theirs_tokens = [encoding.encode_ordinary(part) for part in parts]
            theirs = time.process_time() - begin
            ratios.append(theirs / ours)
            print(f"prepare {size / ours / 1e6:.1f} MB/s ({start_up:.2f} s to start), tiktoken "
                  f"{size / theirs / 1e6:.1f} MB/s: {ratios[-1]:.2f} times")
        expected = [token for part in theirs_tokens for token in part]
        if tokens_of(f"{folder}/out") != expected:
            sys.exit("the tokens differ")
        print(f"{size} bytes, {len(expected)} tokens, the same from both; median {statistics.median(ratios):.2f} times")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes the seeds in test/fuzz/corpus/: a few small valid inputs per parser, from which the fuzzer starts.

    test/fuzz/make_seeds.py
"""
import gzip
import json
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "test/recorded"
CORPUS = ROOT / "test/fuzz/corpus"


def write(parser, name, content):
    folder = CORPUS / parser
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed_{name}").write_bytes(content.encode() if isinstance(content, str) else content)


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def manifest():
    """Returns the manifest of a checkpoint with a matrix and a vector in one shard file of 28 bytes."""
    state = {"updates": 2, "cursor": 24, "loss_scale": {
        "scale": 0.5, "good_steps": 2, "hysteresis_left": 1, "skipped_in_a_row": 0, "total_skipped": 1,
        "last_good_step": 3}, "device_choices": "x", "trained_s": 1.5,
        "course_by_time": {"end_step": 9, "cooldown_begin": 4},
        "best_validation": {"loss": 2.5, "step": 2, "worse_since": 1}, "energy": {"joules": 3.5, "steps": 2}}
    tensors = [{"name": "a", "dtype": "fp32", "shape": [2, 3]}, {"name": "b", "dtype": "bf16", "shape": [2]}]
    pieces = [{"tensor": "a", "file_offset": 0, "first": 0, "count": 6},
              {"tensor": "b", "file_offset": 24, "first": 0, "count": 2}]
    shard = {"name": "shard_0000.bin", "bytes": 28, "xxh3_128": "0" * 32, "crc32c_of_each_mib": "0" * 8,
             "finite": True, "pieces": pieces}
    return {"format": "train_gpt checkpoint", "version": 1, "step": 3, "parent_step": 1, "run_id": "ab",
            "config": "{}", "config_digest": "c0", "dataset_digest": "da", "healthy": True, "state": state,
            "world_size": 1, "tensors": tensors, "shards": [shard]}


def two_shards():
    whole = manifest()
    first = whole["shards"][0]
    first["bytes"], first["pieces"][0]["count"], first["pieces"] = 8, 2, first["pieces"][:1]
    whole["shards"].append({**first, "name": "shard_0001.bin", "bytes": 20, "pieces": [
        {"tensor": "a", "file_offset": 0, "first": 2, "count": 4},
        {"tensor": "b", "file_offset": 16, "first": 0, "count": 2}]})
    whole["world_size"] = 2
    return whole


def two_boxes():
    """The same shard file with the matrix divided into columns."""
    whole = manifest()
    whole["shards"][0]["pieces"][:1] = [
        {"tensor": "a", "file_offset": 8 * col, "first": 0, "count": 2 * cols,
         "box": {"row": 0, "rows": 2, "col": col, "cols": cols}} for col, cols in ((0, 1), (1, 2))]
    return {**whole, "version": 2}


def runtime_seeds():
    write("config", "small", compact({"model": {"family": "llama", "n_layer": 2, "n_head": 4, "n_embd": 64},
                                      "train": {"max_steps": 10, "batch_size": 2, "seq_len": 32,
                                                "total_batch_tokens": 64, "precision": "bf16"},
                                      "schedule": {"warmup_steps": 2},
                                      "data": {"train": [{"path": "a_*.bin", "weight": 0.5},
                                                         {"path": "b_*.bin", "weight": 2}]}})
          + "\0optim.learning_rate=1e-3\nmodel.n_kv_head=2")
    write("config", "quickstart", (ROOT / "configs/quickstart.json").read_bytes())
    write("manifest", "one_shard", compact(manifest()))
    write("manifest", "two_shards", compact(two_shards()))
    write("manifest", "two_boxes", compact(two_boxes()))
    write("shard_record", "small", compact(manifest()["shards"][0]))
    write("checkpoint", "small", compact(manifest()) + "\0" + "0123456789abcdef0123456789ab")
    write("checkpoint", "two_boxes", compact(two_boxes()) + "\0" + "0123456789abcdef0123456789ab")
    header = compact({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                      "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
                      "c": {"dtype": "I64", "shape": [], "data_offsets": [12, 20]}}).encode()
    write("safetensors", "small", struct.pack("<Q", len(header)) + header + bytes(range(20)))
    write("safetensors", "python", (RECORDED / "safetensors/from_python.safetensors").read_bytes())
    write("safetensors_index", "small", compact({"metadata": {"total_size": 8},
                                                 "weight_map": {"a": "model.safetensors"}}))

    def message(kind, *fields):
        packed = b"".join(struct.pack("<Q", field) if isinstance(field, int) else struct.pack("<Q", len(field)) + field
                          for field in fields)
        return struct.pack("<QQ", kind, len(packed)) + packed
    hello = struct.pack("<QQQ", 1, 2, 4) + b"host" + struct.pack("<QQ", 77, 5) + b"nonce"
    write("messages", "rendezvous", message(1, 3, b"nonce") + message(2, hello, b"mac") + message(4, b"host", 12))
    write("messages", "run", message(5, 1, 7, 9, 3, b"all_reduce") + message(6, 1, b"digest", b"abc") +
          message(7, 0, b"text") + message(8, 65, b"why") + message(9, 1, 76, b"why", 1))


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def thrift(fields):
    """Encodes {id: value} in Thrift's compact protocol. Values: int64, text, lists of one type, structs."""
    def value_of(value):
        if isinstance(value, int):
            return 6, varint(value << 1)
        if isinstance(value, str):
            return 8, varint(len(value)) + value.encode()
        if isinstance(value, dict):
            return 12, thrift(value)
        parts = [value_of(part) for part in value]
        return 9, bytes([len(parts) << 4 | parts[0][0]]) + b"".join(part for _, part in parts)
    content, before = b"", 0
    for number, value in fields.items():
        kind, written = value_of(value)
        content += bytes([number - before << 4 | kind]) + written
        before = number
    return content + b"\0"


def uncompressed_parquet():
    """Returns a Parquet file with a plain and a dictionary page, uncompressed so that mutations leave them readable."""
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"one", b"two two"))
    levels = struct.pack("<I", 2) + bytes([3, 0b101])  # bit-packed group: value, null, value
    plain = thrift({1: 0, 2: len(levels + texts), 3: len(levels + texts), 5: {1: 3, 2: 0, 3: 3, 4: 3}}) + levels + texts
    indices = bytes([1, 3, 0b10])  # 1 bit each: 0 and 1
    dictionary = thrift({1: 2, 2: len(texts), 3: len(texts), 7: {1: 2, 2: 0}}) + texts
    indexed = thrift({1: 0, 2: len(levels + indices), 3: len(levels + indices), 5: {1: 3, 2: 8, 3: 3, 4: 3}})
    indexed += levels + indices
    begin = 4 + len(plain)
    chunks = [{1: 6, 2: [0], 3: ["text"], 4: 0, 5: 3, 6: len(plain), 7: len(plain), 9: 4},
              {1: 6, 2: [8], 3: ["text"], 4: 0, 5: 3, 6: len(dictionary + indexed), 7: len(dictionary + indexed),
               9: begin + len(dictionary), 11: begin}]
    schema = [{4: "schema", 5: 1}, {1: 6, 3: 1, 4: "text"}]
    metadata = thrift({1: 1, 2: schema, 3: 6, 4: [{1: [{2: 4, 3: chunk}], 2: 50, 3: 3} for chunk in chunks]})
    return b"PAR1" + plain + dictionary + indexed + metadata + struct.pack("<I", len(metadata)) + b"PAR1"


def data_seeds():
    tokens = struct.pack("<6H", 1, 2, 3, 50256, 5, 6)
    for name, words in (("gpt2", (20240520, 1, 6)), ("nemo", (278895051, 1, 6, 2))):
        write("token_shard", name, struct.pack(f"<{len(words)}i", *words).ljust(1024, b"\0") + tokens)
    ids = struct.pack("<4i", 1, 2, 3, 4)
    write("token_shard", "llama3", struct.pack("<3i", 20240801, 7, 4).ljust(1024, b"\0") + ids)
    masked = b"BIN.TOK\n" + struct.pack("<5i", 2, 4, 4, 300, 1)
    write("token_shard", "llmq", masked.ljust(1024, b"\0") + ids + b"\x0f")
    split = {"tokens": 4, "text_bytes": 9, "documents": 1, "shards": ["train_000000.bin"]}
    dataset = {"format": "train_gpt data set 1", "tokenizer": {"kind": "bpe", "xxh3": "0" * 32, "vocab_size": 257},
               "sources": [{"path": "a.txt", "bytes": 5, "format": "csv", "field": "text"}], "val_fraction": 0.1,
               "copies": 1, "bpe_dropout": 0, "val_begin": 7, "splits": {"train": split}}
    write("dataset", "earlier", compact(dataset))
    split["crc32c_of_each_64_kib"] = [f"{crc32c(struct.pack('<4H', 1, 2, 3, 4)):08x}"]  # sound_shard()
    write("dataset", "small", compact(dataset))
    texts = '{"text":"a b"}\n{"text":"c\\u00e9\\n"}\n'
    write("texts", "plain", b"\0" + "one\ntwo \u00e9\n\nthree".encode())
    write("texts", "json_lines", b"\1" + texts.encode())
    write("texts", "gzip", b"\3" + gzip.compress(texts.encode(), mtime=0))
    zstd = bytes.fromhex("28b52ffd00582100006f6e650a")  # a raw block of "one\n"
    write("texts", "zstd", b"\0" + zstd)
    write("parquet", "uncompressed", uncompressed_parquet())
    write("parquet", "gzip", (RECORDED / "parquet/required_gzip.parquet").read_bytes())
    for name in ("brotli", "nested"):
        write("parquet", name, (RECORDED / f"parquet/refused_{name}.parquet").read_bytes())
    write("parquet", "dictionary", (RECORDED / "parquet/dictionary_v2_zstd.parquet").read_bytes())
    write("questions", "general", '{"context":"a","choices":["b","c"],"label":1}\n{"query":"x","endings":["y","zz"],'
          '"gold":"0"}\n')
    write("questions", "hellaswag", compact({"activity_label": "Run", "ctx_a": "A man runs.", "ctx_b": "he",
                                             "endings": ["stops.", "[title] goes on."], "label": "1"}) + "\n")


def printable_bytes():
    """Returns GPT-2's character for each byte."""
    prints = [*range(33, 127), *range(0xa1, 0xad), *range(0xae, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return {**{byte: chr(byte) for byte in prints}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def tokenizer_seeds():
    vocabulary = {text: number for number, text in enumerate(printable_bytes().values())}
    vocabulary |= {"th": 256, "the": 257, "\u0120t": 258}
    merges = ["t h", "th e", "\u0120 t"]
    eot = {"id": 259, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocabulary, "merges": merges}
    file = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [eot], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
    write("tokenizer", "bytes", compact(file))
    pattern = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {
        "Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                 "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, {**level, "use_regex": False}]}
    file["normalizer"] = {"type": "NFC"}
    model["merges"] = [merge.split(" ") for merge in merges]
    write("tokenizer", "qwen", compact(file))
    spaced = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "t", "h", "th", "\u2581th"]
    special = [{**eot, "id": number, "content": spaced[number]} for number in range(3)]
    prepend = [{"type": "Prepend", "prepend": "\u2581"},
               {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    decoders = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    model |= {"vocab": {text: number for number, text in enumerate(spaced)}, "merges": ["t h", "\u2581 th"],
              "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    file |= {"added_tokens": special, "normalizer": {"type": "Sequence", "normalizers": prepend},
             "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": decoders}}
    write("tokenizer", "llama2", compact(file))
    tokens = [bytes([byte]) for byte in printable_bytes()] + [b"th", b"the", b"<|endoftext|>"]
    content = b"".join(bytes([len(token)]) + token for token in tokens)
    header = struct.pack("<4i", 20240328, 2, len(tokens), len(tokens) - 1)
    write("tokenizer", "llmc", header.ljust(1024, b"\0") + content)
    write("vocabulary", "small", json.dumps({**vocabulary, "<|endoftext|>": 259}, ensure_ascii=False) +
          "\0#version: 0.2\n" + "\n".join(merges) + "\n")


def command_seeds():
    sizes = (4, 2, 1, 1, 2, 128)  # positions, vocabulary, layers, heads, channels, padded vocabulary
    c, layers, positions, padded = sizes[4], sizes[2], sizes[0], sizes[5]
    elements = padded * c + positions * c + layers * (12 * c * c + 13 * c) + 2 * c
    write("llmc_model", "fp32", struct.pack("<8i", 20240326, 3, *sizes).ljust(1024, b"\0") + bytes(4 * elements))
    write("llmc_model", "bf16", struct.pack("<8i", 20240326, 5, *sizes).ljust(1024, b"\0") + bytes(2 * elements))
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8,
            "n_positions": 16, "vocab_size": 100, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    write("hf_config", "gpt2", compact(gpt2))
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96,
             "max_position_embeddings": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 100,
             "rope_theta": 1e4, "tie_word_embeddings": False, "rope_scaling": {
                 "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}}
    write("hf_config", "llama", compact(llama))
    qwen = {**llama, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
            "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    qwen["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    write("hf_config", "qwen", compact(qwen))
    train = [{"kind": "train", "step": step, "time": 1e9 + step, "loss": 3.5 / step, "norm": "nan", "tokens": 64 * step,
              "tokens_per_s": 1000.0, "skipped": ""} for step in (1, 2, 3)]
    metrics = "\n".join(map(compact, [*train, {"kind": "val", "step": 2, "loss": 3.25, "bits_per_byte": None}])) + "\n"
    samples = compact({"step": 2, "time": 1e9, "prompt": "a", "text": "b </script>"}) + "\n"
    starts = compact({"starts": [{"step": 0, "time": 1, "revision": "x", "memory_bytes": {"weights": 5}}]})
    write("run_records", "small", "\0".join([metrics, samples, starts, compact({"model": {"n_layer": 2}})]))


if __name__ == "__main__":
    runtime_seeds()
    data_seeds()
    tokenizer_seeds()
    command_seeds()

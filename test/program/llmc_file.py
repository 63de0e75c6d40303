"""Writes llm.c's files from exported ones, as llm.c's train_gpt2.py does from a model of transformers."""
import array
import json
import struct

HEADER_BYTES = 1024
# llm.c's order, by the ends of the names in a Hugging Face directory. True: stored there as (in, out).
TENSORS = [("wte.weight", False), ("wpe.weight", False), ("ln_1.weight", False), ("ln_1.bias", False),
           ("attn.c_attn.weight", True), ("attn.c_attn.bias", False), ("attn.c_proj.weight", True),
           ("attn.c_proj.bias", False), ("ln_2.weight", False), ("ln_2.bias", False), ("mlp.c_fc.weight", True),
           ("mlp.c_fc.bias", False), ("mlp.c_proj.weight", True), ("mlp.c_proj.bias", False), ("ln_f.weight", False),
           ("ln_f.bias", False)]


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def transposed(values, rows, cols):
    return array.array(values.typecode, (values[row * cols + col] for col in range(cols) for row in range(rows)))


def write_model(directory, path):
    """The model of a Hugging Face directory with fp32 or bf16 weights, as llm.c's file of version 3 or 5."""
    config = json.loads((directory / "config.json").read_text())
    content = (directory / "model.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    tensors = json.loads(content[8:begin])
    is_bf16 = tensors[next(name for name in tensors if name.endswith("wte.weight"))]["dtype"] == "BF16"
    vocab, layers = config["vocab_size"], config["n_layer"]
    padded = -(-vocab // 128) * 128
    data = header(20240326, 5 if is_bf16 else 3, config["n_positions"], vocab, layers, config["n_head"],
                  config["n_embd"], padded)
    for ending, is_transposed in TENSORS:
        is_layered = not ending.startswith(("wte", "wpe", "ln_f"))
        for layer in range(layers if is_layered else 1):
            wanted = f"h.{layer}.{ending}" if is_layered else ending
            tensor, = (tensor for name, tensor in tensors.items() if name.endswith(wanted))
            first, last = tensor["data_offsets"]
            values = array.array("H" if is_bf16 else "I", content[begin + first:begin + last])
            data += (transposed(values, *tensor["shape"]) if is_transposed else values).tobytes()
            if ending == "wte.weight":
                data += bytes((padded - vocab) * config["n_embd"] * values.itemsize)
    path.write_bytes(data)


def write_byte_tokenizer(path):
    """The tokenizer of bytes as llm.c's gpt2_tokenizer.bin."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<|endoftext|>"]
    path.write_bytes(header(20240328, 2, len(tokens), len(tokens) - 1) +
                     b"".join(bytes([len(token)]) + token for token in tokens))

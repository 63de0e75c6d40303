#!/usr/bin/env python3
"""Writes small files in llm.c's formats, with a model and results computed by PyTorch. test_llmc_files.cpp and
program/test_llmc.py read them. Uses no code of train_gpt.

    pip install torch transformers && python3 test/recorded/llmc/make_llmc_files.py [FOLDER]

test/recorded/llmc/model.bin         a GPT-2 model of transformers with random weights, version 3 (fp32)
test/recorded/llmc/model_bf16.bin    the same weights, rounded by PyTorch, version 5
test/recorded/llmc/debug_state.bin   two sequences, their targets, and the fp32 model's logits, loss and gradients
test/recorded/llmc/tokenizer.bin     269 tokens: the bytes in GPT-2's order, 12 merges, <|endoftext|>

The weights are larger than GPT-2's initial weights, and norms and biases are random too, so that small or equal numbers
hide no mistake: attention is far from uniform, and GELU far from linear.
"""
import struct
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, PADDED, LAYERS, HEADS, CHANNELS, POSITIONS = 269, 384, 2, 3, 12, 10
BATCH, LENGTH = 2, 7
# llm.c's order, with names of transformers. True: the layout is (in, out) in transformers, (out, in) in llm.c.
TENSORS = [
    ("wte.weight", False), ("wpe.weight", False),
    ("h.{}.ln_1.weight", False), ("h.{}.ln_1.bias", False),
    ("h.{}.attn.c_attn.weight", True), ("h.{}.attn.c_attn.bias", False),
    ("h.{}.attn.c_proj.weight", True), ("h.{}.attn.c_proj.bias", False),
    ("h.{}.ln_2.weight", False), ("h.{}.ln_2.bias", False),
    ("h.{}.mlp.c_fc.weight", True), ("h.{}.mlp.c_fc.bias", False),
    ("h.{}.mlp.c_proj.weight", True), ("h.{}.mlp.c_proj.bias", False),
    ("ln_f.weight", False), ("ln_f.bias", False),
]
MERGES = ["th", "the", "in", "er", "an", "re", " t", " the", "on", " a", "ing", " an"]


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def random_model():
    torch.manual_seed(20240326)
    config = GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=CHANNELS, n_layer=LAYERS, n_head=HEADS,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = "ln_" in name and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape) * 0.4 + (1 if is_norm_weight else 0))
    return model


def tensor_bytes(values, dtype):
    """Returns all tensors in turn, each with all its layers."""
    data = b""
    for name, is_transposed in TENSORS:
        for layer in range(LAYERS if "{}" in name else 1):
            tensor = values["transformer." + name.format(layer)].detach()
            tensor = tensor.t() if is_transposed else tensor
            if name == "wte.weight":
                tensor = torch.cat([tensor, torch.zeros(PADDED - VOCAB, CHANNELS)])
            tensor = tensor.contiguous().to(dtype)
            data += (tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor).numpy().tobytes()
    return data


def model_file(model, version, dtype):
    sizes = (POSITIONS, VOCAB, LAYERS, HEADS, CHANNELS, PADDED)
    return header(20240326, version, *sizes) + tensor_bytes(dict(model.named_parameters()), dtype)


def debug_state_file(model):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = model(x).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    whole = [x.int(), y.int(), logits.detach(), loss.detach()]
    return (header(20240327, 2, BATCH, LENGTH) + b"".join(part.contiguous().numpy().tobytes() for part in whole) +
            tensor_bytes(gradients, torch.float32))


def tokenizer_file():
    printing = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xad), *range(0xae, 0x100)]
    tokens = [bytes([byte]) for byte in printing + [byte for byte in range(256) if byte not in printing]]
    tokens += [merge.encode() for merge in MERGES] + [b"<|endoftext|>"]
    assert len(tokens) == VOCAB
    return header(20240328, 2, VOCAB, VOCAB - 1) + b"".join(bytes([len(token)]) + token for token in tokens)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent)
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model()
    files = {"model.bin": model_file(model, 3, torch.float32), "model_bf16.bin": model_file(model, 5, torch.bfloat16),
             "debug_state.bin": debug_state_file(model), "tokenizer.bin": tokenizer_file()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        print(f"{folder / name}: {len(content)} bytes")


if __name__ == "__main__":
    main()

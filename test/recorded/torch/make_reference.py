#!/usr/bin/env python3
"""Writes test/recorded/torch/*: PyTorch's results for three small GPT-2 models.

    python3 test/recorded/torch/make_reference.py            (Debian 12: apt install python3-torch python3-numpy)

A directory per shape:
    config.json, model.safetensors  the initial weights as Hugging Face stores GPT-2: Conv1D weights are (in, out)
    outputs.safetensors             everything else, see outputs()

The model is implemented here in double precision, so that the committed files are the exact results rounded to FP32.
The seeds determine everything: running the script again changes no file.
"""
import json
import math
import os
import struct
from dataclasses import dataclass

import numpy as np
import torch

STEPS = 5
GRAD_CLIP = 1.0
WEIGHT_DECAY = 0.1  # for matrices only
OPTIMIZERS = {  # by group of outputs.safetensors; all but AdamW for the first shape only
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}
DROPOUT_RATE, DROPOUT_SEED, DROPOUT_STEP = 0.2, 5, 1  # for the group "dropout"; steps count from 0


@dataclass
class Shape:
    name: str
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    n_positions: int
    seq_len: int
    batch_size: int
    micro_steps: int
    gradient_stride: int  # of the kept elements of logits and gradients, see outputs()
    other_stride: int  # of the kept elements of trained parameters
    seed: int


SHAPES = [
    Shape("heads_4x16", 2, 4, 64, 257, 40, 33, 3, 1, gradient_stride=1, other_stride=31, seed=1),
    Shape("heads_2x64", 2, 2, 128, 500, 52, 48, 2, 1, gradient_stride=31, other_stride=31, seed=2),
    Shape("micro_steps_3", 3, 3, 48, 131, 24, 21, 2, 3, gradient_stride=1, other_stride=5, seed=3),
]


def initial_weights(s):
    """Returns weights larger than GPT-2's initialization, with nonzero biases, so that every term affects outputs."""
    generator = torch.Generator().manual_seed(s.seed)

    def normal(*shape, mean=0.0, deviation):
        return mean + deviation * torch.randn(*shape, generator=generator, dtype=torch.float32)

    def linear(n_in, n_out):
        return normal(n_in, n_out, deviation=0.8 / math.sqrt(n_in)), normal(n_out, deviation=0.1)

    def norm():
        return normal(s.n_embd, mean=1.0, deviation=0.2), normal(s.n_embd, deviation=0.1)

    weights = {
        "wte.weight": normal(s.vocab_size, s.n_embd, deviation=0.15),
        "wpe.weight": normal(s.n_positions, s.n_embd, deviation=0.1),
    }
    for layer in range(s.n_layer):
        for name, (weight, bias) in {
            "ln_1": norm(),
            "attn.c_attn": linear(s.n_embd, 3 * s.n_embd),
            "attn.c_proj": linear(s.n_embd, s.n_embd),
            "ln_2": norm(),
            "mlp.c_fc": linear(s.n_embd, 4 * s.n_embd),
            "mlp.c_proj": linear(4 * s.n_embd, s.n_embd),
        }.items():
            weights[f"h.{layer}.{name}.weight"] = weight
            weights[f"h.{layer}.{name}.bias"] = bias
    weights["ln_f.weight"], weights["ln_f.bias"] = norm()
    return weights


def philox(key, counter_high, counter_low):
    """Philox4x32-10 (Salmon et al., SC 2011). Returns four arrays of 32-bit words."""
    low = np.asarray(counter_low, dtype=np.uint64)
    high = np.full_like(low, counter_high)
    c = [low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, high >> 32]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> 32) ^ c[1] ^ np.uint64(k0), p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ np.uint64(k1), p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


class Dropout:
    """The masks described in docs/numerics.md, for samples starting with number first_sample."""

    PURPOSE = 5 << 32
    THRESHOLD = round(DROPOUT_RATE * 65536)

    def __init__(self, batch, first_sample):
        self.keys = []
        for sample in range(first_sample, first_sample + batch):
            words = philox(DROPOUT_SEED, self.PURPOSE, [sample])
            self.keys.append(int(words[1][0]) << 32 | int(words[0][0]))

    def factors(self, words, word, half):
        """Returns 0 or 1 / (1 - rate), computed from the chosen halves of words."""
        bits = np.choose(word, words) >> (16 * half).astype(np.uint64) & 0xFFFF
        return torch.from_numpy((bits >= self.THRESHOLD) / (1 - self.THRESHOLD / 65536))

    def elements(self, x, site):
        e = np.arange(x[0].numel())
        masks = [self.factors(philox(key, self.PURPOSE | site << 16, e // 8), e % 8 // 2, e % 2) for key in self.keys]
        return x * torch.stack(masks).view(x.shape)

    def probabilities(self, p, site):
        query, key = np.indices(p.shape[2:])
        counter = (key // 16 * 4 + key % 8 // 2 << 32) + query // 16 * 8 + query % 8
        word = 2 * (query // 8 % 2) + key // 8 % 2
        return p * torch.stack([
            torch.stack([self.factors(philox(sample_key, self.PURPOSE | site << 16 | head, counter), word, key % 2)
                         for head in range(p.shape[1])]) for sample_key in self.keys])


class NoDropout:
    def elements(self, x, site):
        return x

    def probabilities(self, p, site):
        return p


def gpt2(s, w, tokens, dropout=NoDropout()):
    """Returns logits (batch, seq_len, vocab_size) of GPT-2: pre-norm blocks, tanh GELU, the head tied to wte."""
    batch, seq_len = tokens.shape
    future = torch.triu(torch.ones(seq_len, seq_len, dtype=torch.bool), diagonal=1)

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * w[name + ".weight"] + w[name + ".bias"]

    def linear(name, x):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attention(name, x, site):
        query, key, value = (
            part.view(batch, seq_len, s.n_head, -1).transpose(1, 2) for part in linear(name + ".c_attn", x).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(s.n_embd // s.n_head)
        probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
        probabilities = dropout.probabilities(probabilities, site)
        return linear(name + ".c_proj", (probabilities @ value).transpose(1, 2).reshape(batch, seq_len, -1))

    x = dropout.elements(w["wte.weight"][tokens] + w["wpe.weight"][:seq_len], 0)
    for layer in range(s.n_layer):
        h, site = f"h.{layer}.", 3 * layer + 1
        x = x + dropout.elements(attention(h + "attn", norm(h + "ln_1", x), site), site + 1)
        x = x + dropout.elements(linear(h + "mlp.c_proj", gelu(linear(h + "mlp.c_fc", norm(h + "ln_2", x)))), site + 2)
    return norm("ln_f", x) @ w["wte.weight"].T


def mean_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accumulate_gradients(s, parameters, tokens, targets, dropouts=None):
    """Adds gradients of the mean loss over all micro-steps; returns that loss."""
    total = 0.0
    for micro_tokens, micro_targets, dropout in zip(tokens, targets, dropouts or [NoDropout()] * s.micro_steps):
        loss = mean_loss(gpt2(s, parameters, micro_tokens, dropout), micro_targets) / s.micro_steps
        loss.backward()
        total += loss.item()
    return total


def train(s, weights, tokens, targets, make_optimizer):
    """Runs STEPS optimizer steps. Returns losses, gradient norms before clipping, and the final parameters."""
    parameters = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    matrices = [p for p in parameters.values() if p.dim() == 2]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    optimizer = make_optimizer([dict(params=matrices, weight_decay=WEIGHT_DECAY),
                                dict(params=vectors, weight_decay=0.0)])
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(accumulate_gradients(s, parameters, tokens[step], targets[step]))
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), GRAD_CLIP).item())
        optimizer.step()
    return torch.tensor(losses), torch.tensor(norms), parameters


def outputs(s, weights):
    """Returns the arrays of outputs.safetensors:
    tokens, targets     (STEPS, micro_steps, batch_size, seq_len), I32
    GROUP/stride        (1), I32: of each flattened tensor of the group, elements 0, stride, 2 stride ... are kept
    first/logits        of the first micro-batch with the initial weights; first/loss (1): of the first step
    gradient/NAME       after the first step's micro-steps, before clipping; norm/gradient/NAME (1): of the whole tensor
    adamw/loss, adamw/grad_norm     (STEPS): the loss before each update, the gradient's norm before clipping
    adamw/NAME          after STEPS updates; norm/adamw/NAME (1): of the whole tensor
    adam/... and others the same for the other OPTIMIZERS, for the first shape only
    dropout/loss (1), dropout/NAME  for the shape with several micro-steps: loss and gradients of step DROPOUT_STEP
                        with the initial weights; sample numbers count over steps, micro-steps and rows
    """
    generator = torch.Generator().manual_seed(1000 + s.seed)
    windows = torch.randint(
        s.vocab_size, (STEPS, s.micro_steps, s.batch_size, s.seq_len + 1), generator=generator
    )
    tokens, targets = windows[..., :-1].contiguous(), windows[..., 1:].contiguous()
    result = {"tokens": tokens, "targets": targets}

    def keep(group, stride, tensors):
        result[f"{group}/stride"] = torch.tensor([stride])
        for name, tensor in tensors.items():
            result[f"{group}/{name}"] = tensor.detach().flatten()[::stride]
            result[f"norm/{group}/{name}"] = tensor.detach().norm().view(1)

    parameters = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    keep("first", s.gradient_stride, {"logits": gpt2(s, parameters, tokens[0, 0])})
    result["first/loss"] = torch.tensor([accumulate_gradients(s, parameters, tokens[0], targets[0])])
    keep("gradient", s.gradient_stride, {name: p.grad for name, p in parameters.items()})

    if s.micro_steps > 1:
        first = DROPOUT_STEP * s.micro_steps * s.batch_size
        dropouts = [Dropout(s.batch_size, first + micro * s.batch_size) for micro in range(s.micro_steps)]
        parameters = {name: weight.double().requires_grad_() for name, weight in weights.items()}
        step = tokens[DROPOUT_STEP], targets[DROPOUT_STEP]
        result["dropout/loss"] = torch.tensor([accumulate_gradients(s, parameters, *step, dropouts)])
        keep("dropout", s.other_stride, {name: p.grad for name, p in parameters.items()})

    for group, make_optimizer in OPTIMIZERS.items():
        if group != "adamw" and s is not SHAPES[0]:
            continue
        losses, norms, parameters = train(s, weights, tokens, targets, make_optimizer)
        keep(group, s.other_stride, parameters)
        result[f"{group}/loss"], result[f"{group}/grad_norm"] = losses, norms
        print(f"{s.name} {group}: losses {losses.numpy().round(4)}, gradient norms {norms.numpy().round(4)}")
    return result


def write_safetensors(path, tensors):
    """Writes 8 bytes of header length, a JSON header padded with spaces to a multiple of 8, and the tensors' bytes."""
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in tensors.items():
        dtype = "F32" if tensor.is_floating_point() else "I32"
        array = tensor.numpy().astype("<f4" if dtype == "F32" else "<i4")
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        blobs.append(array.tobytes())
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def write_config(path, s):
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": s.n_embd,
        "n_head": s.n_head,
        "n_layer": s.n_layer,
        "n_positions": s.n_positions,
        "n_ctx": s.n_positions,
        "vocab_size": s.vocab_size,
        "tie_word_embeddings": True,
    }
    with open(path, "w") as file:
        file.write(json.dumps(config, indent=2) + "\n")


def main():
    torch.set_num_threads(1)  # sums in one order
    root = os.path.dirname(os.path.abspath(__file__))
    for s in SHAPES:
        directory = os.path.join(root, s.name)
        os.makedirs(directory, exist_ok=True)
        weights = initial_weights(s)
        write_config(os.path.join(directory, "config.json"), s)
        write_safetensors(os.path.join(directory, "model.safetensors"), weights)
        write_safetensors(os.path.join(directory, "outputs.safetensors"), outputs(s, weights))


if __name__ == "__main__":
    main()

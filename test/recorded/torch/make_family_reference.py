#!/usr/bin/env python3
"""Writes families/*: the outputs of Hugging Face's transformers for small random models of each family, and PyTorch's
outputs for models that combine features of several families.

    pip install torch transformers==5.* && python3 test/recorded/torch/make_family_reference.py
    pip install torch transformers==4.* && python3 test/recorded/torch/make_family_reference.py --check

A directory per model:
    config.json          as transformers 5 writes it; config_4.json: as version 4 does. Models "custom_*" have no
                         transformers class; their config.json is the section "model" of a train_gpt configuration
    model.safetensors    the initial weights; "custom_*": under train_gpt's names
    outputs.safetensors  see outputs()

Models compute in double precision except where transformers' code casts to float; outputs are written in FP32. The
seeds determine everything. --check writes only config_4.json and fails if the outputs differ from version 5's.
"""
import argparse
import json
import pathlib
import struct
import tempfile

import torch

HERE = pathlib.Path(__file__).resolve().parent / "families"
STEPS, BATCH = 5, 2
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY, GRAD_CLIP = 0.1, 1.0
GRADIENT_STRIDE = 5  # keeps every fifth gradient element, for small files
DOCUMENT_TOKEN = 3

LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16, rope_theta=500.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1000.0)
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)

# class, seq_len, arguments of the configuration
MODELS = {
    # 3 query heads per key head, heads wider than n_embd / n_head, odd sizes
    "llama_3to1": ("Llama", 37, dict(vocab_size=131, hidden_size=42, intermediate_size=74, num_hidden_layers=3,
                                     num_attention_heads=6, num_key_value_heads=2, head_dim=12, rope=LLAMA3,
                                     max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False)),
    # a single key head, tied, with all biases
    "llama_mqa_tied": ("Llama", 21, dict(vocab_size=97, hidden_size=36, intermediate_size=50, num_hidden_layers=2,
                                         num_attention_heads=6, num_key_value_heads=1, rope=LINEAR,
                                         max_position_embeddings=32, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                         attention_bias=True, mlp_bias=True)),
    # windows in some layers, narrow heads
    "qwen2_windows": ("Qwen2", 29, dict(vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
                                        num_attention_heads=4, num_key_value_heads=2,
                                        max_position_embeddings=32, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                        use_sliding_window=True, sliding_window=7, max_window_layers=1,
                                        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                                        rope=dict(rope_type="default", rope_theta=10000.0))),
    "qwen3_yarn": ("Qwen3", 33, dict(vocab_size=111, hidden_size=40, intermediate_size=60, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope=YARN,
                                     max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False)),
    "gpt2_untied": ("GPT2", 19, dict(vocab_size=90, n_embd=32, n_inner=50, n_layer=2, n_head=4, n_positions=24,
                                     activation_function="silu", layer_norm_epsilon=1e-6, tie_word_embeddings=False,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
}

SPEEDRUN = dict(family="custom", n_layer=3, n_head=4, n_embd=40, n_positions=32, vocab_size=101, activation="relu2",
                norm="rmsnorm", norm_weight=False, norm_bias=False, position="rope", rope_theta=1024.0,
                attention_bias="none", mlp_bias=False, qk_norm="unit", attention_scale=0.12, final_softcap=3.0,
                tie_embeddings=False, embedding_norm=True, sliding_window=9, window_pattern="SSL", z_loss=0.01)
MIXED = dict(family="custom", n_layer=2, n_head=5, n_kv_head=1, n_embd=36, head_size=8, hidden_size_mlp=52,
             n_positions=32, vocab_size=77, activation="gelu_new", gated_mlp=True, norm="layernorm", norm_eps=1e-4,
             norm_bias=False, position="rope", rope_theta=100.0, rope_fraction=0.5, attention_bias="qkv",
             mlp_bias=True, qk_norm="weight", attention_softcap=1.5, tie_embeddings=True)
CUSTOM = {"custom_speedrun": (SPEEDRUN, 31, True), "custom_mixed": (MIXED, 27, False)}  # ..., document mask


# ---- the custom models, in plain PyTorch ----------------------------------------------------------------------------

class Custom:
    """A model with train_gpt's configuration, implemented from the keys' definitions; weights: name -> tensor."""

    def __init__(self, config, has_documents):
        self.c, self.has_documents = config, has_documents
        self.kv_heads = config.get("n_kv_head", config["n_head"])
        self.head_size = config.get("head_size", config["n_embd"] // config["n_head"])
        self.hidden = config.get("hidden_size_mlp", 4 * config["n_embd"])

    def shapes(self):
        c, h, width = self.c, self.head_size, self.c["n_embd"]
        padded, qkv = (c["vocab_size"] + 127) // 128 * 128, (c["n_head"] + 2 * self.kv_heads) * self.head_size
        fc = self.hidden * (2 if c.get("gated_mlp") else 1)
        shapes = {"wte": (padded, width)}

        def norm(name, size=width):
            if c.get("norm_weight", True):
                shapes[name + ".weight"] = (size,)
            if c.get("norm_bias", True) and size == width:
                shapes[name + ".bias"] = (size,)

        if c.get("embedding_norm"):
            norm("norm_e")
        norm("norm_f")
        for i in range(c["n_layer"]):
            at = f"h.{i}."
            norm(at + "norm1")
            shapes[at + "qkv.weight"] = (qkv, width)
            if c["attention_bias"] != "none":
                shapes[at + "qkv.bias"] = (qkv,)
            if c["qk_norm"] == "weight":
                shapes[at + "q_norm.weight"] = shapes[at + "k_norm.weight"] = (h,)
            shapes[at + "attn_proj.weight"] = (width, c["n_head"] * h)
            norm(at + "norm2")
            shapes[at + "fc.weight"], shapes[at + "fc_proj.weight"] = (fc, width), (width, self.hidden)
            if c["mlp_bias"]:
                shapes[at + "fc.bias"], shapes[at + "fc_proj.bias"] = (fc,), (width,)
        if not c["tie_embeddings"]:
            shapes["head.weight"] = (padded, width)
        return shapes

    def norm(self, w, name, x):
        if self.c["norm"] == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c.get("norm_eps", 1e-5))
        return x * w.get(name + ".weight", 1.0) + w.get(name + ".bias", 0.0)

    def rotate(self, x):  # (B, heads, T, head size)
        rotary = int(self.head_size * self.c.get("rope_fraction", 1))
        frequencies = self.c["rope_theta"] ** (-torch.arange(0, rotary, 2, dtype=torch.double) / rotary)
        angles = torch.arange(x.shape[2], dtype=torch.double)[:, None] * frequencies
        first, second, rest = x[..., :rotary // 2], x[..., rotary // 2:rotary], x[..., rotary:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def mask(self, tokens, layer):
        T = tokens.shape[1]
        query, key = torch.arange(T)[:, None], torch.arange(T)[None, :]
        seen = (key <= query)[None].repeat(len(tokens), 1, 1)
        pattern = self.c.get("window_pattern", "S")
        if self.c.get("sliding_window") and pattern[layer % len(pattern)] == "S":
            seen &= key > query - self.c["sliding_window"]
        if self.has_documents:
            document = (tokens == DOCUMENT_TOKEN).cumsum(1)
            seen &= document[:, :, None] == document[:, None, :]
        return seen[:, None]

    def attention(self, w, at, x, tokens, layer):
        c, h, heads = self.c, self.head_size, self.c["n_head"]
        B, T, _ = x.shape
        qkv = x @ w[at + "qkv.weight"].T + w.get(at + "qkv.bias", 0.0)
        q, k, v = (part.view(B, T, -1, h).transpose(1, 2) for part in
                   qkv.split([heads * h, self.kv_heads * h, self.kv_heads * h], -1))
        if c["qk_norm"] != "none":
            q, k = (part * torch.rsqrt((part * part).mean(-1, keepdim=True) + c.get("norm_eps", 1e-5))
                    * w.get(at + name, 1.0) for part, name in ((q, "q_norm.weight"), (k, "k_norm.weight")))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (part.repeat_interleave(heads // self.kv_heads, 1) for part in (k, v))
        scores = q @ k.transpose(2, 3) * c.get("attention_scale", h ** -0.5)
        if c.get("attention_softcap"):
            scores = c["attention_softcap"] * torch.tanh(scores / c["attention_softcap"])
        scores = scores.masked_fill(~self.mask(tokens, layer), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, heads * h)
        return out @ w[at + "attn_proj.weight"].T + w.get(at + "attn_proj.bias", 0.0)

    def mlp(self, w, at, x):
        functions = {"relu2": lambda a: torch.relu(a) ** 2, "silu": torch.nn.functional.silu,
                     "gelu_new": lambda a: torch.nn.functional.gelu(a, approximate="tanh")}
        f = functions[self.c["activation"]]
        x = x @ w[at + "fc.weight"].T + w.get(at + "fc.bias", 0.0)
        x = f(x[..., :self.hidden]) * x[..., self.hidden:] if self.c.get("gated_mlp") else f(x)
        return x @ w[at + "fc_proj.weight"].T + w.get(at + "fc_proj.bias", 0.0)

    def logits(self, w, tokens):
        x = w["wte"][tokens]
        if self.c.get("embedding_norm"):
            x = self.norm(w, "norm_e", x)
        for i in range(self.c["n_layer"]):
            at = f"h.{i}."
            x = x + self.attention(w, at, self.norm(w, at + "norm1", x), tokens, i)
            x = x + self.mlp(w, at, self.norm(w, at + "norm2", x))
        x = self.norm(w, "norm_f", x) @ w["wte" if self.c["tie_embeddings"] else "head.weight"].T
        x = x[..., :self.c["vocab_size"]]
        cap = self.c.get("final_softcap")
        return cap * torch.tanh(x / cap) if cap else x


# ---- the files ------------------------------------------------------------------------------------------------------

def save(path, tensors):
    """Writes a safetensors file whose bytes depend only on the tensors."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        kind = "I32" if not tensor.is_floating_point() else "F32"
        part = tensor.detach().to(torch.int32 if kind == "I32" else torch.float32).contiguous().numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def random_weights(named_shapes, seed):
    """Returns larger weights than usual initial ones, with nontrivial biases and norms, so that every term matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in named_shapes:
        values = torch.randn(*shape, generator=generator, dtype=torch.float32)
        is_norm = name.endswith("weight") and len(shape) == 1
        weights[name] = 1 + 0.2 * values if is_norm else 0.2 * values if len(shape) == 1 else 0.15 * values
    return weights


def outputs(logits_of, parameters, vocab_size, seq_len, seed, z_loss):
    """Returns tokens, targets (STEPS, BATCH, seq_len); of the first step, logits (BATCH, seq_len, vocab_size) and
    gradients (gradient/NAME, every GRADIENT_STRIDE-th element, and their norms); of each AdamW step, loss and grad_norm
    (before clipping)."""
    generator = torch.Generator().manual_seed(seed + 1000)
    text = torch.randint(0, vocab_size, (STEPS, BATCH, seq_len + 1), generator=generator)
    text[torch.rand(text.shape, generator=generator) < 0.12] = DOCUMENT_TOKEN
    tokens, targets = text[..., :-1], text[..., 1:]
    result = {"tokens": tokens, "targets": targets}
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=WEIGHT_DECAY),
                                   dict(params=others, weight_decay=0.0)], **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        logits = logits_of(tokens[step])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab_size), targets[step].reshape(-1))
        minimised = loss + z_loss * (logits.logsumexp(-1) ** 2).mean()
        optimizer.zero_grad()
        minimised.backward()
        if step == 0:
            result["logits"] = logits
            for name, p in parameters.items():
                gradient = p.grad.flatten()
                result[f"gradient/{name}"] = gradient[::GRADIENT_STRIDE].clone()
                result[f"norm/{name}"] = gradient.norm()[None]
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(list(parameters.values()), GRAD_CLIP).item())
        optimizer.step()
    result["loss"], result["grad_norm"] = torch.tensor(losses), torch.tensor(norms)
    return result


def make_family(name, number):
    import transformers
    kind, seq_len, arguments = MODELS[name]
    arguments = dict(arguments)
    rope = arguments.pop("rope", None)
    if rope and transformers.__version__.startswith("5"):
        arguments["rope_parameters"] = rope
    elif rope:
        arguments["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            arguments["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = getattr(transformers, kind + "Config")(**arguments, attn_implementation="eager")
    model = getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))(config)
    own = dict(model.named_parameters())  # a tied head occurs once
    weights = random_weights([(key, tuple(value.shape)) for key, value in own.items()], number)
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(weights[key])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        text = (pathlib.Path(folder) / "config.json").read_text()
    model = model.double().eval()
    out = outputs(lambda tokens: model(input_ids=tokens, use_cache=False).logits, dict(model.named_parameters()),
                  config.vocab_size, seq_len, number, 0.0)
    return text, weights, out


def make_custom(name, number):
    config, seq_len, has_documents = CUSTOM[name]
    model = Custom(config, has_documents)
    weights = random_weights(model.shapes().items(), number)
    for key in ("wte", "head.weight"):  # pad the vocabulary
        if key in weights:
            weights[key][config["vocab_size"]:] = 0
    parameters = {key: value.double().requires_grad_() for key, value in weights.items()}
    out = outputs(lambda tokens: model.logits(parameters, tokens), parameters, config["vocab_size"], seq_len, number,
                  config.get("z_loss", 0.0))
    text = {"model": config}
    if has_documents:
        text["data"] = {"document_mask": True, "document_token": DOCUMENT_TOKEN}
    return json.dumps(text, indent=2) + "\n", weights, out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    for number, name in enumerate([*MODELS, *CUSTOM], 1):
        folder = HERE / name
        folder.mkdir(parents=True, exist_ok=True)
        if check and name in CUSTOM:
            continue
        text, weights, out = make_family(name, number) if name in MODELS else make_custom(name, number)
        if not check:
            (folder / "config.json").write_text(text)
            save(folder / "model.safetensors", weights)
            save(folder / "outputs.safetensors", out)
            continue
        (folder / "config_4.json").write_text(text)
        from safetensors.torch import load_file
        for key, kept in load_file(folder / "outputs.safetensors").items():
            error = (out[key].float() - kept.float()).norm() / kept.float().norm()
            assert error < 1e-6, f"{name}: {key} differs by {error}"
        print(name, "is the same")


if __name__ == "__main__":
    main()

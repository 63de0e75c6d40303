"""The models, the text and the settings of grids.json, without PyTorch: make_grid_reference.py and test_grid_torch.py
create the same weights and tokens from the same seeds."""
import json
import random
import struct

STEPS, SEQUENCES, SEQ_LEN = 20, 8, 128
VOCABULARY = 131  # no number of ranks divides it
# AdamW; only matrices have weight decay. With a smaller eps, rounding errors of small gradients turn the first updates.
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 1e-6, 0.1
GRAD_CLIP = 1.0  # clips the gradients of 6 to 8 steps
# Configurations of transformers. 4 ranks share 2 key/value heads.
GPT2 = dict(n_layer=4, n_head=4, n_embd=48, n_positions=SEQ_LEN, n_inner=None, activation_function="gelu_new",
            layer_norm_epsilon=1e-5, tie_word_embeddings=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=40,
             intermediate_size=72, max_position_embeddings=SEQ_LEN, rms_norm_eps=1e-5, hidden_act="silu",
             attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0))
QWEN3 = {**LLAMA, "hidden_size": 48, "intermediate_size": 88, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
         "rope_parameters": dict(rope_type="default", rope_theta=1000.0)}
MODELS = {"gpt2": ("GPT2LMHeadModel", GPT2), "llama": ("LlamaForCausalLM", LLAMA),
          "qwen3": ("Qwen3ForCausalLM", QWEN3)}


def config_of(name):
    """Returns the model's config.json."""
    kind, config = MODELS[name]
    return {"architectures": [kind], "model_type": name, "vocab_size": VOCABULARY, **config}


def keys_of(name):
    """Returns train_gpt's keys of the model that config.json does not leave at a default of its family."""
    c = MODELS[name][1]
    if name == "gpt2":
        return dict(n_layer=c["n_layer"], n_head=c["n_head"], n_embd=c["n_embd"])
    return dict(family=name, n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"],
                n_kv_head=c["num_key_value_heads"], head_size=c["head_dim"], n_embd=c["hidden_size"],
                hidden_size_mlp=c["intermediate_size"], norm_eps=c["rms_norm_eps"],
                rope_theta=c["rope_parameters"]["rope_theta"], tie_embeddings=c["tie_word_embeddings"])


def shapes_of(name):
    """Returns the shapes of the parameters by their names in transformers."""
    c = MODELS[name][1]
    if name == "gpt2":
        width = c["n_embd"]
        block = {"ln_1.weight": [width], "ln_1.bias": [width], "attn.c_attn.weight": [width, 3 * width],
                 "attn.c_attn.bias": [3 * width], "attn.c_proj.weight": [width, width], "attn.c_proj.bias": [width],
                 "ln_2.weight": [width], "ln_2.bias": [width], "mlp.c_fc.weight": [width, 4 * width],
                 "mlp.c_fc.bias": [4 * width], "mlp.c_proj.weight": [4 * width, width], "mlp.c_proj.bias": [width]}
        return {"transformer.wte.weight": [VOCABULARY, width], "transformer.wpe.weight": [c["n_positions"], width],
                **{f"transformer.h.{layer}.{key}": shape for layer in range(c["n_layer"])
                   for key, shape in block.items()},
                "transformer.ln_f.weight": [width], "transformer.ln_f.bias": [width]}
    width, size, hidden = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    queries, keys = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    norms = {"self_attn.q_norm.weight": [size], "self_attn.k_norm.weight": [size]} if name == "qwen3" else {}
    block = {"self_attn.q_proj.weight": [queries, width], "self_attn.k_proj.weight": [keys, width],
             "self_attn.v_proj.weight": [keys, width], "self_attn.o_proj.weight": [width, queries], **norms,
             "mlp.gate_proj.weight": [hidden, width], "mlp.up_proj.weight": [hidden, width],
             "mlp.down_proj.weight": [width, hidden], "input_layernorm.weight": [width],
             "post_attention_layernorm.weight": [width]}
    return {"model.embed_tokens.weight": [VOCABULARY, width],
            **{f"model.layers.{layer}.{key}": shape for layer in range(c["num_hidden_layers"])
               for key, shape in block.items()},
            "model.norm.weight": [width],
            **({} if c["tie_word_embeddings"] else {"lm_head.weight": [VOCABULARY, width]})}


def weights_of(name):
    """Returns the shape and the bytes in FP32 of each parameter. Larger values than usual, so that every term matters:
    norms' weights are from 0.8 to 1.2, matrices and biases from -0.15 to 0.15."""
    numbers, weights = random.Random(1), {}
    for key, shape in shapes_of(name).items():
        is_norm = len(shape) == 1 and key.endswith("weight")
        middle, half = (1.0, 0.2) if is_norm else (0.0, 0.15)
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [middle + half * (2 * numbers.random() - 1) for _ in range(count)]
        weights[key] = shape, struct.pack(f"<{count}f", *values)
    return weights


def text():
    """Returns SEQUENCES sequences of SEQ_LEN tokens and one token more; most tokens determine the next one."""
    numbers, tokens = random.Random(2), [5]
    for _ in range(SEQUENCES * SEQ_LEN):
        is_known = numbers.random() < 0.7
        tokens.append((tokens[-1] * 7 + 3) % VOCABULARY if is_known else int(numbers.random() * VOCABULARY))
    return tokens


def write_model(name, folder):
    """Writes a Hugging Face directory: config.json and model.safetensors in FP32."""
    header, data = {}, b""
    for key, (shape, values) in weights_of(name).items():
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(start)) + start + data)


def write_text(path):
    """Writes the text as a shard."""
    tokens = text()
    path.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) +
                     struct.pack(f"<{len(tokens)}H", *tokens))

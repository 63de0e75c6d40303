// The model in the format of Hugging Face's GPT-2: the same tensors under other names, some of them transposed, the
// vocabulary without padding. Reads and writes no files.
#pragma once

#include <nlohmann/json.hpp>

#include "model/gpt.h"

// The model's master weights under Hugging Face's names ("h.0.attn.c_attn.weight") and with its shapes, each exactly
// once: what this rank has of them. The vocabulary's padding is left out.
std::vector<NamedTensor> hf_tensors(const Gpt& gpt);

// Tensors that Hugging Face's files may hold besides those and that are ignored: causal masks.
bool is_hf_mask(const std::string& name);

// config.json of a GPT2LMHeadModel with this shape, trained with this dropout; `eot` is its end-of-text token.
nlohmann::ordered_json hf_config(const GptShape& shape, double dropout, int eot);

// tokenizer_config.json, without which transformers gives texts of any length to the model, and
// generation_config.json, which keeps it from generating past n_positions. `eot` is the end-of-text token and
// `eot_text` its name.
nlohmann::ordered_json hf_tokenizer_config(const GptShape& shape, int eot, const std::string& eot_text);
nlohmann::ordered_json hf_generation_config(const GptShape& shape, int eot);

// The sizes in such a config.json. Fails with Exit::config, naming `origin` and the key, if one is missing or is no
// positive number.
GptShape hf_shape(const nlohmann::ordered_json& config, const std::string& origin);

// Fails with Exit::config, naming `origin` and the key, if such a config.json describes another model than `shape`, or
// one that this program does not compute (another activation, an untied head, ...).
void check_hf_config(const nlohmann::ordered_json& config, const GptShape& shape, const std::string& origin);

// config.json and its companions of Hugging Face's transformers, versions 4 and 5, and the model that they describe:
// GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/config/config.h"

// The model in such a config.json. Fails with Exit::config, naming `origin` and the key, if the architecture is another
// one (with what sets it apart, where that is known), a size is missing or is no positive number, or a part is one that
// this program does not have.
Config::Model hf_model(const nlohmann::ordered_json& config, const std::string& origin);

// Fails with Exit::config, naming `origin` and each key that differs, if the config.json describes another model than
// `model`, and as hf_model() does.
void check_hf_model(const nlohmann::ordered_json& config, const Config::Model& model, const std::string& origin);

// The config.json of the architecture that computes this model; `eot` is its end-of-text token. Fails with
// Exit::config, naming the part, if none of them does.
nlohmann::ordered_json hf_config(const Config::Model& model, int eot, Dtype dtype);

// tokenizer_config.json, without which transformers gives texts of any length to the model, and
// generation_config.json, which keeps it from generating past n_positions. `eot_text` is the name of `eot`.
nlohmann::ordered_json hf_tokenizer_config(const Config::Model& model, int eot, const std::string& eot_text);
nlohmann::ordered_json hf_generation_config(const Config::Model& model, int eot);

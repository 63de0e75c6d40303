// Converts between Config::Model and config.json, tokenizer_config.json and generation_config.json of Hugging Face
// transformers, versions 4 and 5. Architectures: GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
#pragma once

#include <nlohmann/json.hpp>

#include "kernels/numeric.h"
#include "runtime/config/config.h"

// The model that a config.json describes. Fails with Exit::config, naming `origin` and the key, if the architecture is
// not supported, if a size is missing or not a positive integer, or if the model has an unsupported part.
Config::Model hf_model(const nlohmann::ordered_json& config, const std::string& origin);

// Fails with Exit::config, naming `origin` and each differing key, if the config.json does not describe `model`. Fails
// also as hf_model() does.
void check_hf_model(const nlohmann::ordered_json& config, const Config::Model& model, const std::string& origin);

// The config.json of the architecture that matches this model; `eot` is its end-of-text token. Fails with Exit::config,
// naming the differences to the nearest architecture, if none matches.
nlohmann::ordered_json hf_config(const Config::Model& model, int eot, Dtype dtype);

// tokenizer_config.json, which limits the length of texts to n_positions, and generation_config.json. `eot_text` is the
// text of the token `eot`.
nlohmann::ordered_json hf_tokenizer_config(const Config::Model& model, int eot, const std::string& eot_text);
nlohmann::ordered_json hf_generation_config(int eot);

// Converts between Config::Model and config.json, tokenizer_config.json and generation_config.json of Hugging Face
// transformers, versions 4 and 5. Architectures: GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
#pragma once

#include "kernels/numeric.h"
#include "runtime/config/config.h"

// Whether the text of a JSON file at `origin` is Hugging Face's config.json. Fails with Exit::data if it is not JSON.
bool is_hf_config(const std::string& text, const std::string& origin);

// The model that the text of a config.json describes. Fails with Exit::data if it is not JSON. Fails with Exit::config,
// naming `origin` and the key, if the architecture is not supported, if a size is missing or not a positive integer, or
// if the model has an unsupported part.
Config::Model hf_model(const std::string& config, const std::string& origin);

// Fails with Exit::config, naming `origin` and each differing key, if the config.json does not describe `model`. Fails
// also as hf_model() does.
void check_hf_model(const std::string& config, const Config::Model& model, const std::string& origin);

// The architecture that matches this model: "GPT2LMHeadModel". Fails with Exit::config, naming the differences to the
// nearest architecture, if none matches.
std::string hf_architecture(const Config::Model& model);

// The text of the config.json of this architecture; `eot` is the model's end-of-text token. Fails likewise.
std::string hf_config(const Config::Model& model, int eot, Dtype dtype);

// The texts of tokenizer_config.json, which limits the length of texts to n_positions, and generation_config.json.
// `eot_text` is the text of the token `eot`.
std::string hf_tokenizer_config(const Config::Model& model, int eot, const std::string& eot_text);
std::string hf_generation_config(int eot);

// The model as Hugging Face's GPT-2 stores it: the same tensors under other names, some of them transposed, the
// vocabulary without padding. Files are somebody else's business: this knows names, shapes and values.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/gpt.h"

struct HfTensor {
    std::string name;           // "h.0.attn.c_attn.weight"
    std::vector<size_t> shape;  // as Hugging Face has it
    StateTensor master;         // where it lives here
    bool transposed;
};

// Every tensor of the model, each exactly once.
std::vector<HfTensor> hf_tensors(const Gpt& gpt);

// Tensors that Hugging Face's files may hold beside those and that carry nothing: causal masks.
bool is_hf_mask(const std::string& name);

// Values in Hugging Face's order (`elements`: as many as the shape has) to the device, or as much as this rank
// owns, and back, which takes a whole model on one rank. Exact both ways.
void set_hf_values(const HfTensor& tensor, const std::vector<float>& values);
std::vector<float> hf_values(const HfTensor& tensor);

// config.json of a GPT2LMHeadModel with this shape; `eot` is its end-of-text token.
nlohmann::ordered_json hf_config(const GptShape& shape, int eot);

// Exit::config, naming `origin` and the key, where such a config.json describes another model than `shape`, or one that
// this program does not compute (another activation, an untied head, ...).
void check_hf_config(const nlohmann::ordered_json& config, const GptShape& shape, const std::string& origin);

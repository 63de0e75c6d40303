// The model's tensors under the names of Hugging Face's transformers: one table for GPT-2, one for Llama and the models
// that are named like it. Reads and writes no files.
#pragma once

#include <functional>

#include "model/gpt.h"

// The model's master weights under Hugging Face's names ("model.layers.0.self_attn.q_proj.weight") and with its shapes,
// each exactly once: what this rank has of them. The vocabulary's padding is left out. A model with learned positions
// is named like GPT-2, others like Llama. `has` is there to read a file and says whether it has a tensor of a name: the
// names are then those of that file, which may begin with or without the model's prefix, and may have queries, keys and
// values, or gate and up, joined in one tensor.
std::vector<NamedTensor> hf_tensors(const Gpt& gpt, const std::function<bool(const std::string& name)>& has = {});

// The same of other arrays, like gradients: `tensors` in the order of `layout`.
std::vector<NamedTensor> hf_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& tensors,
                                    const std::function<bool(const std::string& name)>& has = {});

// Tensors that Hugging Face's files may hold besides those and that are ignored: causal masks and RoPE's frequencies.
bool is_hf_buffer(const std::string& name);

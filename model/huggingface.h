// The model's tensors under the names of Hugging Face transformers: one table for GPT-2, one for Llama and the models
// that share its names. Reads and writes no files.
#pragma once

#include <functional>

#include "kernels/tensor.h"
#include "model/gpt.h"

// Returns this rank's part of the model's master weights under Hugging Face's names
// ("model.layers.0.self_attn.q_proj.weight") and with its shapes, each exactly once and without the vocabulary's
// padding. A model with learned positions uses GPT-2's names, others use Llama's. To read a file, pass `has`, which
// returns whether the file has a tensor of a name. The result then has that file's names, which may lack the model's
// prefix.
std::vector<NamedTensor> hf_tensors(const Gpt& gpt, const std::function<bool(const std::string& name)>& has = {});

// The same for other arrays, such as gradients: `tensors` in the order of `layout`.
std::vector<NamedTensor> hf_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& tensors,
                                    const std::function<bool(const std::string& name)>& has = {});

// Returns whether a tensor of Hugging Face's files is a buffer and ignored: causal masks and RoPE's frequencies.
bool is_hf_buffer(const std::string& name);

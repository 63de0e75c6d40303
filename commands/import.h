// Weights from elsewhere: Hugging Face directories and other runs' checkpoints.
#pragma once

#include <string>
#include <vector>

#include "model/gpt.h"
#include "model/huggingface.h"
#include "runtime/checkpoint/safetensors.h"

// The model's tensors under Hugging Face's names, each preceded by `prefix`, in Hugging Face's layout. They refer to
// gpt.
std::vector<FloatTensor> hf_float_tensors(const Gpt& gpt, const std::string& prefix);

// model.init_from: the weights of a Hugging Face GPT-2 directory, of a checkpoint, or of a run's newest checkpoint.
// Fails with Exit::data, naming file and tensor, unless it holds exactly this model's weights.
void load_initial_weights(Gpt& gpt, const std::string& path);

// Weights from elsewhere: Hugging Face directories and other runs' checkpoints.
#pragma once

#include <string>

#include "model/gpt.h"

// model.init_from: the weights of a Hugging Face GPT-2 directory, of a checkpoint, or of a run's newest checkpoint.
// Fails with Exit::data, naming file and tensor, unless it holds exactly this model's weights.
void load_initial_weights(Gpt& gpt, const std::string& path);

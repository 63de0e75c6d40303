// The names of a rank's state, as checkpoints and Hugging Face directories store it.
#pragma once

#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "model/state.h"

// Names the tensors of an owned array "PREFIX.NAME". `once`: only the elements that this rank saves.
std::vector<NamedTensor> name_tensors(const GptState& s, const std::string& prefix, View owned, bool once = false);

// Names the master weights, their average, and the optimizers' state, except what a matrix's owner keeps: see
// name_matrix_state().
std::vector<NamedTensor> name_state(const GptState& s, bool once);

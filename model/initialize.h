// The initial values of the tensors.
#pragma once

#include <cstdint>

#include "model/state.h"

// Writes GPT-2's initial values to an owned array. They depend only on the seed and the tensors' names.
void initialize_tensors(GptState& s, uint64_t seed, float* owned);

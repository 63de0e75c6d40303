// Measurements of a step on request: see StepSettings::measure and measure_first.
#pragma once

#include <vector>

#include "model/state.h"

// Writes the root mean square of a norm's input to element `place` of GptState::residual_rms. Waits for the device.
void measure_residual(GptState& s, const NormActivations& norm, size_t place);

// Returns the norm of each tensor's gradient, from the update's sums over all ranks. Waits for the device.
std::vector<double> tensor_norms(const GptState& s);

// Returns the squared norm of the gradients so far: of this rank's whole gradients, or of its part of the sums over
// ranks. Uses the places of the update's sums and clears them. Waits for the device.
double gradients_squared(GptState& s);

// `train_gpt plan CONFIG --measured RUN`: the stages of a pipeline balanced by the times that a run has measured.
#pragma once

#include <string>

#include "model/options.h"

// Returns the measured time of each stage and the layers per part that balance the stages, with no rank above
// `most_bytes` if that is possible: see balanced_layers().
//
// A layer takes its share of the model's arithmetic times the stages' total time; so does the head. A stage's remaining
// time, positive or negative, stays with the stage: the embeddings, passes that are slower than their arithmetic, a
// slow machine. So the prediction for the measured layers is exact, and a layer that moves takes the pipeline's mean
// time. Measure again after a large change.
//
// Fails with Exit::config if `options` have no pipeline, Exit::no_input if the run is missing, and Exit::data if it has
// no times of stages with the layers of `options`.
std::string measured_plan(const GptOptions& options, const std::string& run_dir, double most_bytes);

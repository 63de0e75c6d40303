// What connects the model to configurations, checkpoints, data and text: model/, runtime/ and data/ do not know each
// other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/loader.h"
#include "data/tokenizer.h"
#include "model/evaluate.h"
#include "model/gpt.h"
#include "runtime/config/config.h"

// The model that a configuration describes, as one of `ranks` ranks has it.
GptOptions gpt_options(const Config& config, int rank = 0, int ranks = 1);

// Floating-point operations of forward and backward, per token.
double flops_of_token(const GptOptions& options);

// A model for inference from a checkpoint, and the configuration that made it.
struct LoadedModel {
    Config config;
    Gpt gpt;
    std::string tokenizer_path;  // of the run; may not exist
};

// `path` as in open_checkpoint(), with its errors. `batch` sequences at a time; 0: as many as the run trained on.
LoadedModel load_model(const std::string& path, int batch);

// The loss over the first pass of a loader with order `once`; bits per byte too if there is a tokenizer.
Validation evaluate_pass(Gpt& gpt, Loader& loader, const std::optional<Tokenizer>& tokenizer);

// options.prompt and its continuation: a function of the weights, the options and the seed.
std::string sample_text(Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed);

// A configuration that fits a new data set and this machine.
#pragma once

#include <functional>

#include "runtime/config/config.h"

// What a configuration is suggested for.
struct SuggestionInputs {
    std::string directory;  // the data set's: shards, tokenizer.json
    int vocab_size = 0;
    uint64_t train_tokens = 0;  // all copies of the text together
    uint64_t text_bytes = 0;    // of the training text, once; 0: not known
    uint64_t val_tokens = 0;    // 0: no validation split
    bool has_tokenizer = true;  // else the tokens' text is not known
    double minutes = 0;         // of training
};

struct Suggestion {
    Config config;
    int64_t parameters = 0;
    double step_s = 0;  // as measured
    double steps() const { return config.train.max_minutes * 60 / step_s; }
    double tokens() const { return steps() * double(config.train.total_batch_tokens); }
};

// Seconds of one training step of a configuration on this machine.
using StepTime = std::function<double(const Config&)>;

// The largest model of a fixed series that is worth its time: within `minutes` it sees at least 10 tokens per
// parameter, and it has at most 1.5 parameters per byte of text. (Hoffmann et al., arXiv 2203.15556, find about 20
// tokens per parameter to be the best use of FLOPs; small models in short runs gain from being somewhat larger.) The
// smallest of the series is the answer if none is. `step_time` is asked for each model in turn, from the smallest on.
// Rates, intervals and the batch follow from the model and the number of steps that the time has. Nothing if the
// training text has fewer tokens than one batch of the smallest model.
std::optional<Suggestion> suggest_config(const SuggestionInputs& inputs, const StepTime& step_time);

// Trains the model of a configuration for a moment, on any tokens: the median of its steps, in seconds.
double measured_step_s(const Config& config);

// Suggests a configuration that fits a new data set and this machine.
#pragma once

#include <functional>

#include "runtime/config/config.h"

// The data set and the training time.
struct SuggestionInputs {
    std::string directory;  // of the data set: shards, tokenizer.json
    int vocab_size = 0;
    uint64_t train_tokens = 0;  // of all copies of the text
    int copies = 1;
    uint64_t text_bytes = 0;    // of one copy of the training text; 0: unknown
    uint64_t val_tokens = 0;    // 0: no validation split
    bool has_tokenizer = true;  // false: the tokens cannot be converted to text
    double minutes = 0;         // training time
};

struct Suggestion {
    Config config;
    int64_t parameters = 0;
    double step_s = 0;  // measured time per step
    double passes = 0;  // over the text
    double steps() const { return config.train.max_minutes * 60 / step_s; }
    double tokens() const { return steps() * double(config.train.total_batch_tokens); }
};

// Seconds of one training step of a configuration on this machine.
using StepTime = std::function<double(const Config&)>;

// Suggests the largest model of a fixed series that sees at least 1.5 tokens per parameter within `minutes` and has at
// most 1.5 parameters per byte of text. (Hoffmann et al., arXiv 2203.15556, find about 20 tokens per parameter to be
// compute-optimal with AdamW; in short runs with Muon, larger models are better: dev/results/2026-11-26-muon.md.)
// Suggests the smallest model if none qualifies. Calls `step_time` for each model, starting with the smallest. The
// learning rate, intervals and batch size follow from the model and the number of steps, the weight decay from the
// passes over the text (dev/results/2026-11-27-short-texts.md). Returns nullopt if the training split has fewer tokens
// than one batch of the smallest model.
std::optional<Suggestion> suggest_config(const SuggestionInputs& inputs, const StepTime& step_time);

// Trains the model of a configuration briefly on arbitrary tokens. Returns the median time of its steps in seconds.
double measured_step_s(const Config& config);

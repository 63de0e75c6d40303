// The prepare command: text in, tokenizer and token shards out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/shards.h"

struct PrepareOptions {
    std::string tokenizer = "bpe";  // "bytes", "bpe", or the path of a tokenizer that exists
    int vocab_size = 0;             // all tokens, kEndOfText included; needed for "bpe", otherwise 0 or what it is
    std::vector<std::string> inputs;
    std::string out_dir;
    double val_fraction = 0.05;  // of the input's bytes, at its end; in [0, 1)
    uint64_t shard_tokens = kDefaultShardTokens;
    // For a text that is too short for the training: the train part is written that many times, each time cut into
    // other tokens, so that what the model sees again is not what it has learned by heart. See Encoder.
    int copies = 1;
    double bpe_dropout = 0;  // probability, in [0, 1)
};

// One line of progress, without a newline.
using ProgressLine = std::function<void(const std::string&)>;

// Writes OUT/tokenizer.json, OUT/train_%06d.bin, OUT/val_%06d.bin and, last, OUT/dataset.json (counts, sources,
// digests). The tokenizer is trained on the train part only. Each document is preceded by kEndOfText, and so is the val
// part. OUT must be absent, empty, or made by an earlier prepare, whose files are replaced when everything else has
// succeeded. Exit::usage for options that make no sense, Exit::cannot_create for an OUT that holds something else.
void prepare(const PrepareOptions& options, const ProgressLine& progress);

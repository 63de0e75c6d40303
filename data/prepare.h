// The prepare command: text in, tokenizer and token shards out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/shards.h"

struct PrepareOptions {
    std::string tokenizer = "bpe";  // "bytes", "bpe", "gpt2", or the path of a tokenizer's file
    int vocab_size = 0;  // all tokens, kEndOfText included; required for "bpe", otherwise 0 or the exact size
    std::vector<std::string> inputs;
    std::string out_dir;
    double val_fraction = 0.05;  // of the input's bytes, at its end; in [0, 1)
    uint64_t shard_tokens = kDefaultShardTokens;
    // For a text that is too short for the training: the train part is written that many times, each time cut into
    // other tokens, so that what the model sees again is not what it has learned by heart. See Encoder.
    int copies = 1;
    double bpe_dropout = 0;                    // probability, in [0, 1)
    std::string gpt2_directory = "data/gpt2";  // vocab.json and merges.txt of the tokenizer "gpt2"
};

// One line of progress, without a newline.
using ProgressLine = std::function<void(const std::string&)>;

// Writes OUT/tokenizer.json, OUT/train_%06d.bin, OUT/val_%06d.bin and, last, OUT/dataset.json (counts, sources,
// digests). The tokenizer is trained on the train part only. Each document is preceded by kEndOfText, and so is the val
// part. OUT must be absent, empty, or made by an earlier prepare, whose files are replaced when everything else has
// succeeded. Fails with Exit::usage for options out of range, Exit::no_input for a missing input or tokenizer,
// Exit::data for an input that is not text, and Exit::cannot_create for an OUT that holds something else.
void prepare(const PrepareOptions& options, const ProgressLine& progress);

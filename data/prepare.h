// The prepare command: text in, tokenizer and token shards out.
#pragma once

#include <functional>

#include "data/shards.h"

struct PrepareOptions {
    std::string tokenizer = "bpe";  // "bytes", "bpe" (trained on the text), "gpt2", or the path of a tokenizer's file
    int vocab_size = 0;  // all tokens, kEndOfText included; required for "bpe", otherwise 0 or the exact size
    std::vector<std::string> inputs;
    std::string out_dir;
    double val_fraction = 0.05;  // of the input's bytes, at its end; in [0, 1)
    uint64_t shard_tokens = kDefaultShardTokens;
    // For a text that is short for the training: the train split is written this many times, each copy tokenized
    // differently by BPE-dropout, which makes it harder to memorize. See Encoder.
    int copies = 1;
    double bpe_dropout = 0;                    // probability, in [0, 1)
    std::string gpt2_directory = "data/gpt2";  // vocab.json and merges.txt of the tokenizer "gpt2"
};

// One line of progress, without a newline.
using ProgressLine = std::function<void(const std::string&)>;

// Writes OUT/tokenizer.json, OUT/train_%06d.bin, OUT/val_%06d.bin and, last, OUT/dataset.json (counts, sources,
// digests). The tokenizer is trained on the train split only. Each document is preceded by kEndOfText, and so is the
// val split. OUT must be absent, empty, or the output of an earlier prepare, whose files are replaced after everything
// else has succeeded. Fails with Exit::usage for options out of range, Exit::no_input for a missing input or tokenizer,
// Exit::data for an input that is not text, and Exit::cannot_create for an OUT with other content.
void prepare(const PrepareOptions& options, const ProgressLine& progress);

// The prepare command: text in, tokenizer and token shards out.
#pragma once

#include "data/prepare/pass_progress.h"
#include "data/shards/shards.h"
#include "kernels/base/check.h"

struct PrepareOptions {
    // "bytes", "bpe" (trained on the text), "chars" (the text's characters), "gpt2", or the path of a tokenizer file
    std::string tokenizer = "bpe";
    std::string end_of_text;  // a special token of the tokenizer file; "": the default of Tokenizer::load()
    // Number of tokens, including kEndOfText. 0: default_vocab_size() for "bpe", no check for other tokenizers.
    int vocab_size = 0;
    std::vector<std::string> inputs;  // files, directories, and "-" for standard input
    // One of kTextFormats; "bin": 2-byte token ids without a header, as written by nanoGPT; "auto": detect per file.
    std::string format = "auto";
    std::string field;  // key of JSON objects, or column of Parquet files; "": "text"
    std::string out_dir;
    double val_fraction = 0.05;  // fraction of the input bytes, taken from the end; in [0, 1)
    uint64_t shard_tokens = kDefaultShardTokens;
    // Number of copies of the train split, from 1 to 1000. BPE-dropout tokenizes each copy differently, which makes a
    // short text harder to memorize (see Encoder). Without a value: default_copies() for "bpe", else 1.
    std::optional<int> copies;
    std::optional<double> bpe_dropout;         // probability in [0, 1). Without a value: see kDefaultBpeDropout
    std::string gpt2_directory = "data/gpt2";  // vocab.json and merges.txt of the tokenizer "gpt2"
    bool force = false;                        // replace an existing data set
    int threads = 0;                           // 0: one per core. The output does not depend on it
    double save_seconds = 5;                   // interval between saves of the progress
};

// The contents of a data set, as recorded in dataset.json.
struct PrepareSummary {
    struct Split {
        uint64_t tokens = 0;      // kEndOfText included
        uint64_t text_bytes = 0;  // bytes of the tokenized text
        uint64_t documents = 0;
    };
    int vocab_size = 0, copies = 1;
    Split train;  // all copies together
    Split val;    // zeros if nothing is held out
};

// Returns the default size of a "bpe" tokenizer: the square root of `train_bytes`, rounded to a power of two from 512
// to 32768. A text of a few kilobytes may give fewer tokens, because each merge needs a pair that occurs twice.
int default_vocab_size(uint64_t train_bytes);

// The default of bpe_dropout for several copies: the best in seven passes over a text of 1 MB. Fewer passes need less
// (dev/results/2026-11-27-short-texts.md).
inline constexpr double kDefaultBpeDropout = 0.03;

// Returns the default number of copies of a text for a "bpe" tokenizer: as many as have at most 50 MB, from 1 to 100.
int default_copies(uint64_t train_bytes);

// Writes OUT/tokenizer.json, OUT/train_%06d.bin, OUT/val_%06d.bin and, last, OUT/dataset.json (counts, sources,
// digests, checksums). The tokenizer is trained on the train split only. kEndOfText precedes each document and the val
// split. OUT must not exist, be empty, or hold an earlier data set. An earlier data set is replaced only if
// `options.force` is set, after everything else has succeeded. OUT is locked during the call. If the process is killed,
// the same call resumes and writes the same files. Fails with Exit::usage if an option is out of range, Exit::no_input
// if an input or the tokenizer is missing, Exit::data if an input is not text, Exit::cannot_create if OUT cannot be
// written, is in use, or holds other files, and Exit::again after a signal.
PrepareSummary prepare(const PrepareOptions& options, const ProgressLine& progress);

// The prepare command: text in, tokenizer and token shards out.
#pragma once

#include "data/prepare/pass_progress.h"
#include "data/shards/shards.h"

struct PrepareOptions {
    // "bytes", "bpe" (trained on the text), "chars" (the text's characters), "gpt2", or the path of a tokenizer's file
    std::string tokenizer = "bpe";
    std::string end_of_text;  // a special token of the tokenizer's file; "": as Tokenizer::load() says
    // All tokens, kEndOfText included. For "bpe" 0 means default_vocab_size(); otherwise 0 or the exact size.
    int vocab_size = 0;
    std::vector<std::string> inputs;  // files, directories, and "-" for standard input
    // One of kTextFormats, or "bin": token ids of 2 bytes without a header, as nanoGPT writes them. "auto": recognized,
    // for each file.
    std::string format = "auto";
    std::string field;  // of JSON objects, or the column of CSV and Parquet; "": "text"
    std::string out_dir;
    double val_fraction = 0.05;  // of the input's bytes, at its end; in [0, 1)
    uint64_t shard_tokens = kDefaultShardTokens;
    // For a text that is short for the training: the train split is written this many times, each copy tokenized
    // differently by BPE-dropout, which makes it harder to memorize. See Encoder.
    int copies = 1;
    double bpe_dropout = 0;                    // probability, in [0, 1)
    std::string gpt2_directory = "data/gpt2";  // vocab.json and merges.txt of the tokenizer "gpt2"
    bool force = false;                        // replace a data set
    int threads = 0;                           // 0: as many as there are cores. The files do not depend on it
    double save_seconds = 5;                   // between two states that another process could continue
};

// What a data set holds, as dataset.json says.
struct PrepareSummary {
    struct Split {
        uint64_t tokens = 0;      // kEndOfText included
        uint64_t text_bytes = 0;  // that the tokens stand for
        uint64_t documents = 0;
    };
    int vocab_size = 0;
    Split train;  // all copies together
    Split val;    // zeros if nothing is held out
};

// The size of a new "bpe" tokenizer for so many bytes of training text: the power of two next to their square root,
// from 512 to 32768. A text of a few kilobytes may give fewer tokens, since each merge needs a pair that occurs twice.
int default_vocab_size(uint64_t train_bytes);

// Writes OUT/tokenizer.json, OUT/train_%06d.bin, OUT/val_%06d.bin and, last, OUT/dataset.json (counts, sources,
// digests, checksums). The tokenizer is trained on the train split only. Each document is preceded by kEndOfText, and
// so is the val split. OUT must be absent, empty, or the output of an earlier prepare, whose files are replaced with
// `options.force` only, after everything else has succeeded. OUT is locked meanwhile. If the process is killed, the
// same call continues what it left, with the same files as a result. Fails with Exit::usage for options out of range,
// Exit::no_input for a missing input or tokenizer, Exit::data for an input that is not text, Exit::cannot_create for an
// OUT that cannot be written, is in use, or holds something else, and Exit::again after a signal.
PrepareSummary prepare(const PrepareOptions& options, const ProgressLine& progress);

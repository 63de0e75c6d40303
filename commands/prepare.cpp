#include "data/prepare.h"

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "runtime/logging/logging.h"

void add_prepare(CLI::App& app) {
    auto options = std::make_shared<PrepareOptions>();
    options->gpt2_directory = program_directory() + "/../data/gpt2";
    CLI::App* parser = app.add_subcommand("prepare", "text to tokenizer and token shards");
    parser
        ->add_option("INPUT", options->inputs,
                     "files of text, JSONL, JSON, CSV, TSV or Parquet, also as .gz or .zst; nanoGPT's .bin; "
                     "directories; - for standard input")
        ->required();
    parser->add_option("--out", options->out_dir, "directory for tokenizer.json and the shards")->required();
    parser->add_option("--vocab-size", options->vocab_size,
                       "tokens of a new bpe tokenizer; "
                       "default: the power of two next to the square root of the bytes of text");
    parser->option_defaults()->always_capture_default();
    parser->add_option("--tokenizer", options->tokenizer,
                       "bytes, bpe (learned from the text), gpt2, or the file of a tokenizer");
    parser->add_option("--val-fraction", options->val_fraction, "share of the input, at its end, to hold out");
    parser->add_option("--shard-tokens", options->shard_tokens, "tokens per shard, at most");
    parser->add_option("--copies", options->copies, "times that the training part is written, for a short text");
    parser->add_option("--bpe-dropout", options->bpe_dropout,
                       "probability that a merge of the training part is left out, so that its copies differ");
    parser->add_option("--format", options->format, "of the input: text, jsonl, json, csv, tsv, parquet or bin");
    parser->add_option("--field", options->field, "key of JSON objects, or column of CSV and Parquet; default: text");
    parser->add_option("--threads", options->threads, "0: one per core; the files do not depend on it");
    parser->add_flag("--force", options->force, "replace a data set in that directory");
    parser->callback([options] {
        install_signal_handlers();
        prepare(*options, [](const std::string& line) {
            print_line(line);
            std::fflush(stdout);
        });
    });
}

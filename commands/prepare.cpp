#include "data/prepare.h"

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "runtime/logging/logging.h"

void add_prepare(CLI::App& app) {
    auto options = std::make_shared<PrepareOptions>();
    options->gpt2_directory = data_directory("gpt2");
    CLI::App* parser = app.add_subcommand("prepare", "text to tokenizer and token shards");
    parser->add_option("INPUT", options->inputs, "UTF-8 text, or JSONL (.jsonl) with a \"text\" field")->required();
    parser->add_option("--out", options->out_dir, "directory for tokenizer.json and the shards")->required();
    parser->add_option("--vocab-size", options->vocab_size, "tokens of a new bpe tokenizer");
    parser->option_defaults()->always_capture_default();
    parser->add_option("--tokenizer", options->tokenizer,
                       "bytes, bpe (learned from the text), gpt2, or the file of a tokenizer")
        ->type_name("bytes|bpe|gpt2|FILE");
    parser->add_option("--val-fraction", options->val_fraction, "share of the input, at its end, to hold out");
    parser->add_option("--shard-tokens", options->shard_tokens, "tokens per shard, at most");
    parser->add_option("--copies", options->copies, "times that the training part is written, for a short text");
    parser->add_option("--bpe-dropout", options->bpe_dropout,
                       "probability that a merge of the training part is left out, so that its copies differ");
    parser->callback([options] { prepare(*options, print_line); });
}

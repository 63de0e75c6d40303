#include "data/prepare/prepare.h"

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/suggest_config.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/installation.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

namespace {

struct Options {
    PrepareOptions prepare;
    double minutes = 2;  // training time of the run in config.json
};

std::string number_text(double value) {
    for (const auto& [unit, name] : {std::pair{1e9, " billion"}, {1e6, " million"}})
        if (value >= unit) return format("%.3g%s", value / unit, name);
    return format("%.0f", value);
}

// Writes OUT/config.json and prints a summary. Moves an older file, which may have been edited, aside.
void write_config(const Options& options, const PrepareSummary& data) {
    const std::string& out = options.prepare.out_dir;
    const int copies = options.prepare.copies;
    const std::optional<Suggestion> suggestion = suggest_config({.directory = out,
                                                                 .vocab_size = data.vocab_size,
                                                                 .train_tokens = data.train.tokens,
                                                                 .text_bytes = data.train.text_bytes / uint64_t(copies),
                                                                 .val_tokens = data.val.tokens,
                                                                 .has_tokenizer = file_exists(out + "/tokenizer.json"),
                                                                 .minutes = options.minutes},
                                                                measured_step_s);
    if (!suggestion) return print_line("no config.json was written: the text is shorter than one batch");
    Config written = suggestion->config;
    written.train.batch_size = 0;  // so that any number of ranks can share the tokens of a step
    const std::string path = out + "/config.json", text = changed_config_json(written);
    if (file_exists(path) && read_file(path) != text) rename_path(path, first_unused(path + ".old-"));
    write_file_atomically(path, text);

    const Config& config = suggestion->config;
    print_line(format("%s: %d layers, %d channels, %s parameters", path.c_str(), config.model.n_layer,
                      config.model.n_embd, number_text(double(suggestion->parameters)).c_str()));
    print_line(format("%g minutes on this machine: about %s steps of %ld tokens, %.1f passes over the text",
                      options.minutes, number_text(suggestion->steps()).c_str(), config.train.total_batch_tokens,
                      suggestion->tokens() / double(data.train.tokens) * copies));
    print_line(format("next: %s %s", command_path(program_path()).c_str(), path.c_str()));
}

}  // namespace

void add_prepare(CLI::App& app) {
    auto command = std::make_shared<Options>();
    PrepareOptions* options = &command->prepare;
    options->gpt2_directory = data_directory("gpt2");
    CLI::App* parser = app.add_subcommand("prepare", "tokenize text into shards and write a configuration");
    parser
        ->add_option("INPUT", options->inputs,
                     "text, JSONL or Parquet files, text and JSONL also as .gz or .zst; nanoGPT's .bin; "
                     "directories; -: standard input")
        ->required();
    parser->add_option("--out", options->out_dir, "directory for tokenizer.json and the shards")->required();
    parser
        ->add_option("--vocab-size", options->vocab_size,
                     "vocabulary size of a new bpe tokenizer or of a .bin; "
                     "default: the square root of the bytes of text, rounded to a power of two")
        ->check(integer_in(0, 1 << 24));
    parser->option_defaults()->always_capture_default();
    parser->add_option("--minutes", command->minutes, "training time that config.json is made for; 0: do not write one")
        ->check(finite_in(0, 1e6));
    parser
        ->add_option("--tokenizer", options->tokenizer,
                     "bytes, bpe (trained on the text), chars (the text's characters), gpt2, or a tokenizer file")
        ->type_name("bytes|bpe|chars|gpt2|FILE");
    parser->add_option("--end-of-text", options->end_of_text, kEndOfTextHelp)->type_name("TOKEN")->default_str("");
    parser->add_option("--val-fraction", options->val_fraction, "fraction held out for validation, from the end");
    parser->add_option("--shard-tokens", options->shard_tokens, "maximum number of tokens per shard")
        ->check(integer_in(1, INT32_MAX));
    parser->add_option("--copies", options->copies, "number of copies of the training split, for short texts");
    parser->add_option("--bpe-dropout", options->bpe_dropout,
                       "probability of skipping a merge in the training split, so that its copies differ");
    parser->add_option("--format", options->format, "input format: text, jsonl, parquet or bin");
    parser->add_option("--field", options->field, "JSON key, or Parquet column, of the text; default: text");
    parser->add_option("--threads", options->threads, "number of threads; 0: one per core. Does not affect the result");
    parser->add_flag("--force", options->force, "replace the data set in the output directory");
    parser->callback([command] {
        install_signal_handlers();
        const PrepareSummary data = prepare(command->prepare, [](const std::string& line) {
            print_line(line);
            std::fflush(stdout);
        });
        if (command->minutes > 0) write_config(*command, data);
    });
}

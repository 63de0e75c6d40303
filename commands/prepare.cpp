#include "data/prepare/prepare.h"

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/suggest_config.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

namespace {

struct Options {
    PrepareOptions prepare;
    double minutes = 2;  // of the training that config.json describes
};

std::string number_text(double value) {
    for (const auto& [unit, name] : {std::pair{1e9, " billion"}, {1e6, " million"}})
        if (value >= unit) return format("%.3g%s", value / unit, name);
    return format("%.0f", value);
}

// Writes OUT/config.json and says what it will do. An older one, which may have been edited, is moved aside.
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
    if (!suggestion) return print_line("the text is too short for a batch of any model: no config.json was written");
    const std::string path = out + "/config.json", text = changed_config_json(suggestion->config);
    if (file_exists(path) && read_file(path) != text) rename_path(path, first_unused(path + ".old-"));
    write_file_atomically(path, text);

    const Config& config = suggestion->config;
    print_line(format("%s: %d layers, %d channels, %s parameters", path.c_str(), config.model.n_layer,
                      config.model.n_embd, number_text(double(suggestion->parameters)).c_str()));
    print_line(format("%g minutes on this machine are about %s steps of %ld tokens: %.1f times the text",
                      options.minutes, number_text(suggestion->steps()).c_str(), config.train.total_batch_tokens,
                      suggestion->tokens() / double(data.train.tokens) * copies));
    print_line(format("next: %s %s", path_to_type(program_path()).c_str(), path.c_str()));
}

}  // namespace

void add_prepare(CLI::App& app) {
    auto command = std::make_shared<Options>();
    PrepareOptions* options = &command->prepare;
    options->gpt2_directory = data_directory("gpt2");
    CLI::App* parser = app.add_subcommand("prepare", "text to tokenizer, token shards and a configuration");
    parser
        ->add_option("INPUT", options->inputs,
                     "files of text, JSONL, JSON, CSV, TSV or Parquet, also as .gz or .zst; nanoGPT's .bin; "
                     "directories; - for standard input")
        ->required();
    parser->add_option("--out", options->out_dir, "directory for tokenizer.json and the shards")->required();
    parser
        ->add_option("--vocab-size", options->vocab_size,
                     "tokens of a new bpe tokenizer, or of a .bin; "
                     "default: the power of two next to the square root of the bytes of text")
        ->check(integer_in(0, 1 << 24));
    parser->option_defaults()->always_capture_default();
    parser->add_option("--minutes", command->minutes, "of training, for which config.json is made; 0: none is made")
        ->check(finite_in(0, 1e6));
    parser
        ->add_option(
            "--tokenizer", options->tokenizer,
            "bytes, bpe (learned from the text), chars (the text's characters), gpt2, or the file of a tokenizer")
        ->type_name("bytes|bpe|chars|gpt2|FILE");
    parser->add_option("--end-of-text", options->end_of_text, kEndOfTextHelp)->type_name("TOKEN")->default_str("");
    parser->add_option("--val-fraction", options->val_fraction, "share of the input, at its end, to hold out");
    parser->add_option("--shard-tokens", options->shard_tokens, "tokens per shard, at most")
        ->check(integer_in(1, INT32_MAX));
    parser->add_option("--copies", options->copies, "times that the training part is written, for a short text");
    parser->add_option("--bpe-dropout", options->bpe_dropout,
                       "probability that a merge of the training part is left out, so that its copies differ");
    parser->add_option("--format", options->format, "of the input: text, jsonl, json, csv, tsv, parquet or bin");
    parser->add_option("--field", options->field, "key of JSON objects, or column of CSV and Parquet; default: text");
    parser->add_option("--threads", options->threads, "0: one per core; the files do not depend on it");
    parser->add_flag("--force", options->force, "replace a data set in that directory");
    parser->callback([command] {
        install_signal_handlers();
        const PrepareSummary data = prepare(command->prepare, [](const std::string& line) {
            print_line(line);
            std::fflush(stdout);
        });
        if (command->minutes > 0) write_config(*command, data);
    });
}

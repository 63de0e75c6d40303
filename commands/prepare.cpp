#include "data/prepare/prepare.h"

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
    const std::optional<Suggestion> suggestion =
        suggest_config({.directory = out,
                        .vocab_size = data.vocab_size,
                        .train_tokens = data.train.tokens,
                        .copies = data.copies,
                        .text_bytes = data.train.text_bytes / uint64_t(data.copies),
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
                      suggestion->passes));
    print_line(format("next: %s %s", command_path(program_path()).c_str(), path.c_str()));
}

}  // namespace

void add_prepare(CLI::App& app) {
    auto options = std::make_shared<Options>();
    PrepareOptions* prepared = &options->prepare;
    prepared->gpt2_directory = data_directory("gpt2");
    const Command command(app, "prepare", "tokenize text into shards and write a configuration");
    command
        .add("INPUT", &prepared->inputs,
             "text, JSONL or Parquet files, text and JSONL also as .gz or .zst; nanoGPT's .bin; "
             "directories; -: standard input")
        .required();
    command.add("--out", &prepared->out_dir, "directory for tokenizer.json and the shards").required();
    command
        .add("--vocab-size", &prepared->vocab_size,
             "vocabulary size of a new bpe tokenizer or of a .bin; "
             "default: the square root of the bytes of text, rounded to a power of two")
        .integer_in(0, 1 << 24);
    command.show_defaults();
    command.add("--minutes", &options->minutes, "training time that config.json is made for; 0: do not write one")
        .finite_in(0, 1e6);
    command
        .add("--tokenizer", &prepared->tokenizer,
             "bytes, bpe (trained on the text), chars (the text's characters), gpt2, or a tokenizer file")
        .type_name("bytes|bpe|chars|gpt2|FILE");
    command.add("--end-of-text", &prepared->end_of_text, kEndOfTextHelp).type_name("TOKEN").default_text("");
    command.add("--val-fraction", &prepared->val_fraction, "fraction held out for validation, from the end");
    command.add("--shard-tokens", &prepared->shard_tokens, "maximum number of tokens per shard")
        .integer_in(1, INT32_MAX);
    command.add("--copies", &prepared->copies,
                "number of copies of the training split; default: for bpe, as many as have at most 50 MB, up to 100");
    command.add("--bpe-dropout", &prepared->bpe_dropout,
                "probability of skipping a merge in the training split, so that its copies differ; default: 0.03 with "
                "several copies");
    command.add("--format", &prepared->format, "input format: text, jsonl, parquet or bin");
    command.add("--field", &prepared->field, "JSON key, or Parquet column, of the text; default: text");
    command.add("--threads", &prepared->threads, "number of threads; 0: one per core. Does not affect the result");
    command.add("--force", &prepared->force, "replace the data set in the output directory");
    command.on_parsed([options] {
        install_signal_handlers();
        const PrepareSummary data = prepare(options->prepare, [](const std::string& line) {
            print_line(line);
            std::fflush(stdout);
        });
        if (options->minutes > 0) write_config(*options, data);
    });
}

#include <unistd.h>

#include <sstream>

#include "commands/command_line.h"
#include "runtime/cluster/cluster.h"
#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/logging/logging.h"
#include "training/models/generation.h"
#include "training/models/model_io.h"

namespace {

constexpr size_t kMaxAtOnce = 16;  // texts generated in one batch: each needs memory for its KV cache

struct Options {
    std::string model;
    TokenizerChoice tokenizer;
    std::vector<std::string> prompts;
    std::string prompts_file;
    GenerationOptions generation;
};

// The prompts of --prompt, then the lines of --prompts.
std::vector<std::string> all_prompts(const Options& options) {
    std::vector<std::string> prompts = options.prompts;
    if (!options.prompts_file.empty()) {
        std::istringstream lines(read_file(options.prompts_file));
        for (std::string line; std::getline(lines, line);) {
            if (line.ends_with('\r')) line.pop_back();
            prompts.push_back(line);
        }
        if (prompts.empty()) fail(Exit::data, "%s is empty; expected one prompt per line", options.prompts_file);
    }
    if (prompts.empty()) prompts.emplace_back();
    return prompts;
}

std::string check_stop(const std::string& text) {
    return !text.empty() && is_utf8(text) ? "" : "must be non-empty UTF-8, is " + printed(text);
}

// Runs on all ranks, which divide the layers; rank 0 prints.
void print_samples(const Options& options, const ModelSource& source, Ranks& ranks) {
    const std::vector<std::string> prompts = all_prompts(options);
    ranks.control().require_same(joined(prompts, "; "), "the prompts");
    const int at_once = int(std::min(prompts.size(), kMaxAtOnce));
    LoadedModel model = load_model(source, 1, ranks.grid_comm(), options.tokenizer, at_once);
    if (!model.tokenizer)
        fail(Exit::no_input, "%s has no tokenizer.json; specify a tokenizer with --tokenizer", options.model);
    const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;  // control characters are escaped on a terminal
    auto print = [&](const std::string& text) {
        if (ranks.comm().rank > 0) return;
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
    };
    generate(
        model.gpt, *model.tokenizer, prompts, options.generation,
        [&](const std::string& piece) { print(is_terminal ? printable(piece) : piece); }, [&] { print("\n"); });
}

}  // namespace

void add_sample(CLI::App& app, CommandLine& line) {
    auto options = std::make_shared<Options>();
    const Command command(app, "sample", "generate text from a model");
    command.show_defaults();
    command.add("MODEL", &options->model, kModelHelp).required();
    Config::Sample& sample = options->generation.sample;
    command
        .add("--prompt", &options->prompts,
             "text to continue, preceded by the token that begins every document, e.g. <|endoftext|>; may be repeated")
        .repeatable()
        .default_text("");
    command.add("--prompts", &options->prompts_file, "file of prompts, one per line").type_name("FILE");
    command.add("--tokens", &sample.tokens, "number of tokens to generate").integer_in(1, 1 << 24);
    command.add("--temperature", &sample.temperature, "temperature; 0: greedy decoding").finite_in(0, 1000);
    command.add("--top-k", &sample.top_k, "sample from the k most likely tokens; 0: all").integer_in(0, 1 << 24);
    command
        .add("--top-p", &sample.top_p,
             "nucleus sampling: the smallest set of tokens with total probability P, after --top-k; 1: all")
        .finite_in(0, 1);
    command.add("--min-p", &sample.min_p, "keep tokens at least P times as likely as the most likely one; 0: all")
        .finite_in(0, 1);
    command.add("--stop", &options->generation.stops, "stop before this text; may be repeated: the first match counts")
        .repeatable()
        .check(check_stop)
        .default_text("");
    command.add("--seed", &options->generation.seed, "random seed").integer_in(0, UINT64_MAX);
    add_tokenizer_options(command, options->tokenizer);
    add_ranks(command, line);
    command.on_parsed([options, &line] {
        if (line.nproc > 0) return;  // main() starts the ranks
        ModelSource source(options->model);
        source.config.parallel = {};
        source.config.parallel.tensor = launched_ranks().size;
        evaluate_on_ranks(source, line.revision, [&](Ranks& ranks) { print_samples(*options, source, ranks); });
    });
}

#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <sstream>

#include "commands/command_line.h"
#include "runtime/config/config.h"
#include "runtime/io/files.h"
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

void print_samples(const Options& options) {
    const std::vector<std::string> prompts = all_prompts(options);
    const int at_once = int(std::min(prompts.size(), kMaxAtOnce));
    LoadedModel model = load_model(options.model, 1, options.tokenizer, at_once);
    if (!model.tokenizer)
        fail(Exit::no_input, "%s has no tokenizer.json; specify a tokenizer with --tokenizer", options.model);
    const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;  // control characters are escaped on a terminal
    auto print = [&](const std::string& text) {
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
    };
    generate(
        model.gpt, *model.tokenizer, prompts, options.generation,
        [&](const std::string& piece) { print(is_terminal ? printable(piece) : piece); }, [&] { print("\n"); });
}

}  // namespace

void add_sample(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("sample", "generate text from a model");
    parser->option_defaults()->always_capture_default();
    parser->add_option("MODEL", options->model, kModelHelp)->required();
    Config::Sample& sample = options->generation.sample;
    parser
        ->add_option("--prompt", options->prompts,
                     "text to continue, preceded by the token that begins every document, e.g. <|endoftext|>; may be "
                     "repeated")
        ->take_all()
        ->allow_extra_args(false)
        ->default_str("");
    parser->add_option("--prompts", options->prompts_file, "file of prompts, one per line")->type_name("FILE");
    parser->add_option("--tokens", sample.tokens, "number of tokens to generate")->check(integer_in(1, 1 << 24));
    parser->add_option("--temperature", sample.temperature, "temperature; 0: greedy decoding")
        ->check(finite_in(0, 1000));
    parser->add_option("--top-k", sample.top_k, "sample from the k most likely tokens; 0: all")
        ->check(integer_in(0, 1 << 24));
    parser
        ->add_option("--top-p", sample.top_p,
                     "nucleus sampling: the smallest set of tokens with total probability P, after --top-k; 1: all")
        ->check(finite_in(0, 1));
    parser->add_option("--min-p", sample.min_p, "keep tokens at least P times as likely as the most likely one; 0: all")
        ->check(finite_in(0, 1));
    parser
        ->add_option("--stop", options->generation.stops,
                     "stop before this text; may be repeated: the first match counts")
        ->take_all()
        ->allow_extra_args(false)
        ->check(CLI::Validator(check_stop, ""))
        ->default_str("");
    parser->add_option("--seed", options->generation.seed, "random seed")->check(integer_in(0, UINT64_MAX));
    add_tokenizer_options(*parser, options->tokenizer);
    parser->callback([options] { print_samples(*options); });
}

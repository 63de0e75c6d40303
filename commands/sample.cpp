#include <unistd.h>

#include <CLI/App.hpp>
#include <memory>

#include "commands/command_line.h"
#include "commands/model_io.h"
#include "runtime/logging/logging.h"

namespace {

struct Options {
    std::string model;
    std::string tokenizer;  // empty: the one beside the weights
    Config::Sample sample;
    uint64_t seed = 1;
};

void print_sample(const Options& options) {
    LoadedModel model = load_model(options.model, 1, options.tokenizer);
    if (!model.tokenizer)
        fail(Exit::no_input, "%s has no tokenizer.json; --tokenizer names another tokenizer", options.model);
    const std::string text = sample_text(model.gpt, *model.tokenizer, options.sample, options.seed);
    print_line(::isatty(STDOUT_FILENO) == 1 ? printable(text) : text);  // a terminal would obey control characters
}

}  // namespace

void add_sample(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("sample", "text from a model");
    parser->option_defaults()->always_capture_default();
    parser->add_option("MODEL", options->model, kModelHelp)->required();
    parser->add_option("--prompt", options->sample.prompt,
                       "text to continue; the model reads <|endoftext|> before it, which begins every document");
    parser->add_option("--tokens", options->sample.tokens, "new tokens")->check(integer_in(1, 1 << 24));
    parser->add_option("--temperature", options->sample.temperature, "0: always the likeliest token")
        ->check(finite_in(0, 1000));
    parser->add_option("--top-k", options->sample.top_k, "only the k likeliest; 0: all")->check(integer_in(0, 1 << 24));
    parser->add_option("--seed", options->seed, "another seed, another text")->check(integer_in(0, UINT64_MAX));
    parser->add_option("--tokenizer", options->tokenizer, kTokenizerHelp)->type_name("gpt2|FILE");
    parser->callback([options] { print_sample(*options); });
}

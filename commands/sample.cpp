#include <CLI/App.hpp>
#include <memory>

#include "commands/command.h"
#include "commands/model_io.h"
#include "runtime/logging/log.h"

namespace {

struct Options {
    std::string checkpoint;
    Config::Sample sample;
    uint64_t seed = 1;
};

void print_sample(const Options& options) {
    LoadedModel model = load_model(options.checkpoint, 1);
    print_line(sample_text(model.gpt, Tokenizer::load(model.tokenizer_path), options.sample, options.seed));
}

}  // namespace

Command add_sample(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("sample", "text from a checkpoint");
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("--prompt", options->sample.prompt, "text to continue");
    parser->add_option("--tokens", options->sample.tokens, "new tokens")
        ->capture_default_str()
        ->check(CLI::PositiveNumber);
    parser->add_option("--temperature", options->sample.temperature, "0: always the likeliest token")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    parser->add_option("--top-k", options->sample.top_k, "only the k likeliest; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    parser->add_option("--seed", options->seed, "another seed, another text")->capture_default_str();
    return {parser, [options] { print_sample(*options); }};
}

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/model_io.h"
#include "runtime/io/io.h"

namespace {

struct Options {
    std::string checkpoint;
    std::string data;  // glob of shards; empty: the run's own
    int batches = 0;   // micro-batches; 0: all
    int stride = -1;   // replaces the run's eval.stride; -1: does not
};

void print_validation_loss(const Options& options) {
    LoadedModel model = load_model(options.checkpoint, 0);
    Config& config = model.config;
    const std::string glob = options.data.empty() ? config.data.val : options.data;
    config.eval.batches = options.batches;
    if (options.stride >= 0) config.eval.stride = options.stride;
    if (options.stride > config.train.seq_len)
        fail(Exit::usage, "--stride %d must be at most the run's train.seq_len, %d", options.stride,
             config.train.seq_len);
    const TokenStream stream(find_shards(glob, options.data.empty() ? "data.val" : "--data"), config.model.vocab_size);
    Loader loader(stream, loader_options(config, comm_single(), SampleOrder::once));
    const Validation result = evaluate_pass(model.gpt, loader, model.tokenizer);
    std::printf("%s: loss %.6f", glob.c_str(), result.loss);
    if (result.bits_per_byte) std::printf(", %.4f bits per byte", *result.bits_per_byte);
    std::printf("\n");
}

}  // namespace

void add_eval(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("eval", "validation loss of a checkpoint");
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("--data", options->data, "glob of shards (default: the run's data.val)");
    parser->add_option("--batches", options->batches, "micro-batches; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    parser->add_option("--stride", options->stride, "tokens each window adds (default: the run's eval.stride)")
        ->check(CLI::NonNegativeNumber);
    parser->callback([options] { print_validation_loss(*options); });
}

#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/model_io.h"

namespace {

struct Options {
    std::string checkpoint;
    std::string data;  // glob of shards; empty: the run's own
    int batches = 0;   // micro-batches; 0: all
    int stride = -1;   // replaces the run's eval.stride; -1: does not
};

// All ranks together; rank 0 prints.
void print_validation_loss(const Options& options, const Checkpoint& checkpoint, const Comm& comm) {
    LoadedModel model = load_model(checkpoint, 0, comm);
    Config& config = model.config;
    const std::string glob = options.data.empty() ? config.data.val : options.data;
    config.eval.batches = options.batches;
    if (options.stride >= 0) config.eval.stride = options.stride;
    if (options.stride > config.train.seq_len)
        fail(Exit::usage, "--stride %d must be at most the run's train.seq_len, %d", options.stride,
             config.train.seq_len);
    const TokenStream stream(find_shards(glob, options.data.empty() ? "data.val" : "--data"), config.model.vocab_size);
    Loader loader(stream, loader_options(config, comm, SampleOrder::once));
    const Validation result = evaluate_pass(model.gpt, loader, model.tokenizer);
    if (comm.rank != 0) return;
    std::printf("%s: loss %.6f", glob.c_str(), result.loss);
    if (result.bits_per_byte) std::printf(", %.4f bits per byte", *result.bits_per_byte);
    std::printf("\n");
}

void evaluate_on_all_ranks(const Options& options, const std::string& revision) {
    const RankEnvironment environment = launched_ranks();
    const Checkpoint checkpoint = open_checkpoint(options.checkpoint);
    if (environment.size == 1) return print_validation_loss(options, checkpoint, comm_single());
    Ranks ranks(environment, config_of(checkpoint), revision);
    ranks.run([&] {
        const TrainState& state = checkpoint.manifest().info;
        ranks.control().require_same(format("step %d of run %s", state.step, state.run_id.c_str()), "the checkpoint");
        ranks.control().note_phase(Phase::evaluation, state.step);
        configure_device({.local_rank = environment.local_rank});
        print_validation_loss(options, checkpoint, ranks.comm());
        return Exit::ok;
    });
}

}  // namespace

void add_eval(CLI::App& app, CommandLine& line) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("eval", "validation loss of a checkpoint");
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("--data", options->data, "glob of shards (default: the run's data.val)");
    parser->add_option("--batches", options->batches, "micro-batches; 0: all")
        ->capture_default_str()
        ->check(integer_in(0, 1'000'000'000));
    parser->add_option("--stride", options->stride, "tokens each window adds (default: the run's eval.stride)")
        ->check(integer_in(0, 1 << 24));
    add_ranks(*parser, line);
    parser->callback([options, &line] {
        if (line.nproc == 0) evaluate_on_all_ranks(*options, line.revision);  // else main() starts the ranks
    });
}

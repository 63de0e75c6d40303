#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/model_io.h"
#include "runtime/logging/logging.h"

namespace {

struct Options {
    std::string source;
    std::string run;
    std::string tokenizer;  // gpt2, a file, or empty: the one beside the source
};

// A run whose only checkpoint, of step 0, has the weights and no optimizer state.
void import_model(const Options& options) {
    if (state_of_run_dir(options.run) == RunDirState::occupied)
        fail(Exit::cannot_create, "%s is not empty; nothing was written", options.run);
    Config config = config_of_weights(options.source);
    config.run.dir = options.run;
    config.model.init_from = options.source;
    const std::optional<Tokenizer> tokenizer = find_tokenizer(options.tokenizer, options.source, config);
    GptOptions gpt_options = ::gpt_options(config);
    gpt_options.training = false;
    Gpt gpt(gpt_options, comm_single());
    load_initial_weights(gpt, config.model, options.source);

    const FileDescriptor lock = open_run_directory(options.run, StartMode::only_new);
    if (tokenizer) {
        config.data.tokenizer = options.run + "/tokenizer.json";
        write_file_atomically(config.data.tokenizer, tokenizer->json());
    }
    write_file_atomically(options.run + "/config.json", config_json(config));
    const TrainState state{.run_id = random_hex(16),
                           .config = config_json(config),
                           .config_digest = config_digest(config),
                           .progress = {.loss_scale = first_loss_scale(config.loss_scale)}};
    const SaveStats stats = save_checkpoint(options.run, comm_single(), state, gpt.saved_tensors());
    print_line(format("wrote %s: %zu parameters of %s", stats.directory.c_str(), gpt.layout().parameters,
                      options.source.c_str()));
    if (!tokenizer)
        print_line(format("no tokenizer is beside %s: sample needs one, see --tokenizer", options.source.c_str()));
}

}  // namespace

void add_import(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("import", "weights of other programs as a checkpoint");
    parser->add_option("SOURCE", options->source, "Hugging Face directory or model file of llm.c")->required();
    parser->add_option("RUN", options->run, "absent or empty directory")->required();
    parser->add_option("--tokenizer", options->tokenizer, kTokenizerHelp)->type_name("gpt2|FILE");
    parser->callback([options] { import_model(*options); });
}

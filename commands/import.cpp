#include <filesystem>

#include "commands/command_line.h"
#include "data/tokenizer/tokenizer.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/config/loss_scale.h"
#include "runtime/io/files.h"
#include "runtime/io/lock.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

namespace {

struct Options {
    std::string source;
    std::string run;
    TokenizerChoice tokenizer;
    std::string continued;  // --hf: directory of the model to continue
    std::string config;     // --out
    std::string data = "data";
};

// Defaults for continuing the training of a pretrained model: a low learning rate, one pass over the data.
void set_continued_training(Config& config) {
    constexpr int kLongestSequence = 2048, kSequencesPerStep = 64;
    config.train.batch_size = 4;
    config.train.seq_len = std::min(config.model.n_positions, kLongestSequence);
    config.train.total_batch_tokens = int64_t(config.train.seq_len) * kSequencesPerStep;
    config.train.precision = Precision::bf16;
    config.train.head_rows = 0;
    config.train.max_steps = 0;
    config.train.max_epochs = 1;
    config.optim.learning_rate = 5e-5;
    config.schedule.warmup_steps = 10;
    config.checkpoint.every_steps = 100;
    config.eval.every_steps = 50;
}

// Writes the configuration of a run that continues the training of the model in a Hugging Face directory.
void write_configuration(const Options& options) {
    const std::string& directory = options.continued;
    if (!file_exists(directory + "/config.json"))
        fail(Exit::no_input, "%s is not a Hugging Face directory: it has no config.json", directory);
    if (file_exists(options.config)) fail(Exit::cannot_create, "%s exists; nothing was written", options.config);
    Config config = config_of_weights(directory);
    const std::filesystem::path out = options.config;
    config.run.dir = "runs/" + std::string(out.stem());
    config.model.init_from = directory;
    config.data.train = {{options.data + "/train_*.bin"}};
    config.data.val = options.data + "/val_*.bin";
    const std::string tokenizer = directory + "/tokenizer.json";
    if (file_exists(tokenizer)) config.data.tokenizer = tokenizer;
    find_tokenizer({}, directory, config);  // fails if it has more tokens than the model
    set_continued_training(config);
    Config checked = config;
    checked.train.head_rows = default_head_rows(config.train.batch_size, config.train.seq_len);
    check_config(checked, options.config, 1);
    write_file_atomically(options.config, changed_config_json(config));
    print_line(format("wrote %s: %s, %d layers, %d channels; continues the training of %s", options.config.c_str(),
                      name_of(config.model.family), config.model.n_layer, config.model.n_embd, directory.c_str()));
    if (config.data.tokenizer.empty())
        print_line(format("%s has no tokenizer.json: %s must have been tokenized with the model's tokenizer",
                          directory.c_str(), options.data.c_str()));
    else if (!directory_exists(options.data))
        print_line(format("next: train_gpt prepare TEXT --tokenizer %s --minutes 0 --out %s", tokenizer.c_str(),
                          options.data.c_str()));
}

// Writes a run whose only checkpoint, of step 0, has the weights and no optimizer state.
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

    const DirectoryLock lock = open_run_directory(options.run, StartMode::only_new);
    if (tokenizer) {
        config.data.tokenizer = options.run + "/tokenizer.json";
        tokenizer->save(options.run);
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
        print_line(format("no tokenizer found next to %s: sample needs one, see --tokenizer", options.source.c_str()));
}

}  // namespace

void add_import(CLI::App& app) {
    auto options = std::make_shared<Options>();
    const Command command(app, "import", "convert a Hugging Face or llm.c model, or continue its training");
    const Argument source = command.add("SOURCE", &options->source, "Hugging Face directory or llm.c model file");
    const Argument run = command.add("RUN", &options->run, "new or empty run directory").needs(source);
    source.needs(run);
    for (const Argument& option : add_tokenizer_options(command, options->tokenizer)) option.needs(source);
    const Argument hf =
        command.add("--hf", &options->continued, "Hugging Face directory of the model to continue training")
            .type_name("DIRECTORY")
            .excludes(source);
    const Argument out =
        command.add("--out", &options->config, "configuration file to write").type_name("FILE").needs(hf);
    hf.needs(out);
    command.add("--data", &options->data, "data set directory of the new run, as made by prepare --out")
        .show_default()
        .type_name("DIRECTORY")
        .needs(out);
    command.on_parsed([options] {
        if (options->continued.empty() && options->source.empty())
            fail(Exit::usage, "import needs SOURCE and RUN, or --hf DIRECTORY and --out FILE");
        options->continued.empty() ? import_model(*options) : write_configuration(*options);
    });
}

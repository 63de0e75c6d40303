// train_gpt tune: times the GEMMs of a step and writes the fastest algorithms to a file.
#include <set>
#include <sstream>

#include "commands/command_line.h"
#include "commands/layouts.h"
#include "kernels/base/check.h"
#include "runtime/io/files.h"
#include "training/models/model_io.h"
#include "training/run.h"

namespace {

struct Options {
    std::string config, out = "gemm_choices.txt";
    std::vector<std::string> overrides;
};

// Returns the configuration of a step with two micro-steps, because the second adds to the gradients of the first.
Config config_of_step(Config config, const Grid& grid) {
    config.train.batch_ramp.clear(), config.train.seq_ramp.clear();
    config.train.total_batch_tokens =
        std::min(config.train.total_batch_tokens, 2L * grid.data * config.train.batch_size * config.train.seq_len);
    config.data.document_mask = false;
    return config;
}

void train_step(Gpt& gpt, const Config& config) {
    gpt.initialize(config.run.seed);
    gpt.masters_changed();
    std::vector<int> tokens(size_t(config.train.batch_size) * size_t(config.train.seq_len) + 1);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(i * 7919 % size_t(config.model.vocab_size));
    gpt.begin_step({.learning_rate = config.optim.learning_rate,
                    .update = 1,
                    .grad_scale = 1.0f / float(config.train.total_batch_tokens)});
    for (const Pass& pass : gpt.passes()) {
        if (pass.begins_micro_step()) gpt.load(tokens.data(), tokens.data() + 1);
        gpt.compute(pass);
    }
    gpt.end_step({});
}

// Returns the lines of all ranks' texts. Ranks that compute the same GEMM use the choice of the first one.
std::string merged(const std::vector<std::string>& texts) {
    std::string all, line;
    std::set<std::string> known;
    for (const std::string& text : texts)
        for (std::istringstream lines(text); std::getline(lines, line);)
            if (known.insert(line.substr(0, line.find(": "))).second) all += line + "\n";
    return all;
}

int count(const std::string& text, const std::string& part) {
    int found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) found++;
    return found;
}

void tune(const Options& options, const std::string& revision) {
    if (gpu_name().empty()) fail(Exit::usage, "tune chooses algorithms of a GPU's library; this is a CPU program");
    const RankEnvironment environment = launched_ranks();
    Config given = load_config(options.config, options.overrides, environment.size);
    given.device.gemm_choices.clear();
    choose_plan(given, environment);
    Ranks ranks(environment, given, revision);
    ranks.run([&] {
        const Config config = config_of_step(given, ranks.grid());
        DeviceSettings settings = device_settings(config, ranks);
        settings.time_gemms = true;
        settings.graphs = false;
        configure_device(settings);
        Gpt gpt(gpt_options(config, ranks.grid(), ranks.comm().rank), ranks.grid_comm());
        train_step(gpt, config);
        const std::string text = merged(ranks.control().all_gather(gemm_choices(), "tune"));
        run_on_rank_0(ranks.comm(), "write the choices", [&] {
            write_file_atomically(options.out, text);
            std::printf(
                "%s: %d GEMMs, %d of them faster than with the library's first proposal\n"
                "next: train with --set device.gemm_choices=%s\n",
                options.out.c_str(), count(text, "\n") - 1, count(text, " instead of "), options.out.c_str());
        });
        return Exit::ok;
    });
}

}  // namespace

void add_tune(CLI::App& app, CommandLine& line) {
    auto options = std::make_shared<Options>();
    const Command command(app, "tune",
                          "time the GEMMs of a configuration on this GPU, and write the fastest algorithms");
    command.add("CONFIG", &options->config, "JSON configuration of the run").required();
    add_overrides(command, options->overrides);
    command.add("--out", &options->out, "file for the key device.gemm_choices").show_default();
    add_ranks(command, line);
    command.on_parsed([options, &line] {
        if (line.nproc == 0) tune(*options, line.revision);  // else main() starts the ranks
    });
}

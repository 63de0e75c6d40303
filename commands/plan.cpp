#include "model/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "commands/command_line.h"
#include "commands/layouts.h"
#include "commands/plan_measured.h"
#include "data/shards/dataset.h"
#include "model/update.h"
#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "runtime/io/process.h"
#include "runtime/performance/performance.h"
#include "training/models/hf_config.h"
#include "training/models/model_io.h"

namespace {

struct Options {
    std::string config;
    std::vector<std::string> overrides;
    std::string measured;  // a run's directory, or empty
    std::string gpu = "h100";
    int gpus = 0, gpus_per_node = 8, nodes = 0;          // 0 GPUs: memory and FLOPs only
    double nvlink_bytes_per_s = 0, net_bytes_per_s = 0;  // 0: the machine's
};

ScalingInputs machine_of(const Options& options) {
    ScalingInputs machine = machine_named(options.gpu);
    machine.gpus = options.gpus;
    machine.gpus_per_node = options.gpus_per_node;
    if (options.nodes > 0 && options.gpus % options.nodes != 0)
        fail(Exit::usage, "--gpus %d must be a multiple of --nodes %d", options.gpus, options.nodes);
    if (options.nodes > 0) machine.gpus_per_node = options.gpus / options.nodes;
    check_nodes(machine.gpus, machine.gpus_per_node);
    if (options.nvlink_bytes_per_s > 0) machine.nvlink_bytes_per_s = options.nvlink_bytes_per_s;
    if (options.net_bytes_per_s > 0) machine.net_bytes_per_s = options.net_bytes_per_s;
    return machine;
}

// Returns the architecture that `export --hf` writes, or why it cannot.
std::string export_text(const Config::Model& model) {
    try {
        return hf_architecture(model);
    } catch (const Error& error) {
        return error.what();
    }
}

// Returns a row for each stage: the bytes of a rank, its parameters and the stage's layers.
std::string stage_table(const std::vector<GptOptions>& stages, const std::vector<size_t>& bytes) {
    const std::vector<TensorLayout> layouts = lay_out_stages(stages[0]);
    std::string table;
    for (size_t i = 0; i < stages.size(); i++) {
        const std::string layers = joined(own_layers(stages[i]), ", ", [](const LayerRange& range) {
            return format("%d to %d", range.first, range.end() - 1);
        });
        table += format("stage %-12zu %14zu bytes, %zu parameters, layers %s\n", i, bytes[i], layouts[i].parameters,
                        layers.c_str());
    }
    return table;
}

void plan(const Options& options) {
    const ScalingInputs machine = machine_of(options);
    Config config = load_config(options.config, options.overrides, machine.gpus);
    std::vector<PlannedLayout> layouts;
    if (machine.gpus > 0) layouts = plan_layouts(config, machine);
    const Config given = config;
    if (config.parallel.automatic && !layouts.empty())
        config = layouts[0].config;
    else if (machine.gpus > 0 && config.leaves_choices())
        if (const std::optional<PlannedLayout> choices = plan_choices(config, machine)) config = choices->config;
    const Grid grid = grid_of(config, machine.gpus);
    const std::string tokenizer =
        check_tokenizer(training_data(config), config.data.tokenizer, config.model.vocab_size);
    if (directory_exists(config.model.init_from)) check_source_tokenizer(config, tokenizer);
    const std::vector<GptOptions> stages = options_of_stages(config, grid);
    const std::vector<size_t> bytes = planned_bytes_of_stages(stages[0]);
    const GptOptions run = stages[size_t(std::ranges::max_element(bytes) - bytes.begin())];
    const double flops = flops_of_token(run, run.seq_len);

    const size_t beside = resident_bytes() + device_info().working_bytes + kBlockBytes;
    if (grid.pipeline > 1)
        std::printf("stage %d of 0 to %d needs the most memory:\n", run.pipeline.rank, grid.pipeline - 1);
    std::printf("%s%s", plan_table(run).c_str(), plan_row("program and buffers", beside).c_str());
    if (config.checkpoint.asynchronous) std::printf("%s", plan_row("copy for checkpoints", saved_bytes(run)).c_str());
    if (grid.pipeline > 1) std::printf("%s", stage_table(stages, bytes).c_str());
    const double most = machine.gpus > 0 ? usable_bytes(machine.gpu) : HUGE_VAL;
    if (!options.measured.empty()) std::printf("%s", measured_plan(run, options.measured, most).c_str());
    for (const auto& [until_step, tokens] : config.train.batch_ramp)
        std::printf("micro-steps        %14d per step of %ld tokens until step %d\n",
                    micro_steps(config, grid.data, until_step), tokens, until_step);
    std::printf("micro-steps        %14d per step of %ld tokens\n", micro_steps(config, grid.data, kMaxSteps),
                config.train.total_batch_tokens);
    for (const auto& [until_step, seq_len] : config.train.seq_ramp)
        std::printf("sequence length    %14ld until step %d\n", seq_len, until_step);
    std::printf("FLOPs per token    %14.4e, per step %.4e\n", flops, flops * double(config.train.total_batch_tokens));
    std::printf("%s", update_table(run, config.optim.learning_rate).c_str());
    std::printf("Hugging Face       %s\n", export_text(config.model).c_str());
    if (machine.gpus == 0) return;
    Config configured = config;
    configured.open = given.open, configured.train.recompute = given.train.recompute;
    std::printf("\n%s", layout_table(layouts, configured, machine).c_str());
}

}  // namespace

void add_plan(CLI::App& app) {
    auto options = std::make_shared<Options>();
    const Command command(app, "plan", "estimate memory and FLOPs (speed too with --gpus) without allocating");
    command.add("CONFIG", &options->config, "JSON configuration of the run").required();
    add_overrides(command, options->overrides);
    command.add("--measured", &options->measured, "balance the pipeline's stages by the times of this run's directory");
    const Argument gpus =
        command.add("--gpus", &options->gpus, "predict the speed on this many GPUs, and list the fastest layouts")
            .integer_in(1, 1 << 20);
    auto add_rate = [&](const char* flag, double& rate, const char* help) {
        auto read = [&rate, flag](const std::string& text) { rate = parse_rate(text, flag); };
        return command.add(flag, read, help).needs(gpus);
    };
    command
        .add("--gpu", &options->gpu,
             "GPU model: a100, h100, h200, b200, rtx4090, ...; cpu; or a JSON file with a machine's constants")
        .show_default()
        .needs(gpus);
    const Argument per_node =
        command.add("--gpus-per-node", &options->gpus_per_node, "number of GPUs connected by NVLink or PCIe")
            .show_default()
            .integer_in(1, 1 << 20)
            .needs(gpus);
    command.add("--nodes", &options->nodes, "number of nodes, instead of --gpus-per-node")
        .integer_in(1, 1 << 20)
        .needs(gpus)
        .excludes(per_node);
    add_rate("--nvlink", options->nvlink_bytes_per_s,
             "NVLink or PCIe bandwidth per GPU and direction, e.g. 450GB/s (default: the GPU's)");
    add_rate("--net", options->net_bytes_per_s, "network bandwidth per GPU and direction, e.g. 50GB/s or 400Gb/s")
        .default_text("50GB/s");
    command.on_parsed([options] { plan(*options); });
}

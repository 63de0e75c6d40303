#include "commands/plan.h"

#include <CLI/App.hpp>
#include <cstdio>
#include <memory>

#include "commands/command.h"
#include "commands/model_io.h"
#include "model/plan.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/io.h"

namespace {

void add_run(ScalingInputs& inputs, const GptOptions& run, double flops_per_token) {
    inputs.flops_per_token = flops_per_token;
    inputs.tokens_per_micro_step = double(run.batch) * run.seq_len;
    inputs.micro_steps = run.micro_steps;
    inputs.param_wire_bytes = double(size_of(run.precision));
    for (const Bucket& bucket : lay_out_tensors(run.shape).buckets)
        inputs.bucket_elements.push_back(double(bucket.piece));
    GptOptions staged = run;
    for (staged.zero_stage = 0; staged.zero_stage <= 3; staged.zero_stage++)
        inputs.memory_bytes_per_rank[size_t(staged.zero_stage)] = double(planned_bytes(staged));
}

void plan(const PlanOptions& options) {
    std::optional<ScalingInputs> scaling;
    if (options.gpus > 0) scaling = scaling_machine(options);
    const int ranks = std::max(1, options.gpus);
    const Config config = load_config(options.config, options.overrides, ranks);
    const GptOptions run = gpt_options(config, 0, ranks);
    const double flops = flops_of_token(run);

    const size_t beside = resident_bytes() + device_info().working_bytes + kStagingBytes;
    std::printf("%s", plan_table(run).c_str());
    std::printf("%-22s %16zu bytes %10.1f MiB\n", "program and buffers", beside, double(beside) / 0x1p20);
    std::printf("micro-steps        %14d per step of %.0f tokens\n", run.micro_steps,
                double(config.train.total_batch_tokens));
    std::printf("FLOPs per token    %14.4e, per step %.4e\n", flops, flops * double(config.train.total_batch_tokens));
    if (scaling) {
        add_run(*scaling, run, flops);
        std::printf("\n%s", scaling_table(*scaling).c_str());
    }
}

}  // namespace

CLI::App* add_plan_options(CLI::App& app, PlanOptions& options) {
    CLI::App* parser =
        app.add_subcommand("plan", "memory by category and FLOPs, and with --gpus the speed; allocates nothing");
    parser->add_option("CONFIG", options.config, "the run, as JSON")->required();
    add_overrides(*parser, options.overrides);
    auto* gpus = parser->add_option("--gpus", options.gpus, "predict the speed on this many GPUs, by ZeRO stage")
                     ->check(CLI::Range(1, 1 << 20));
    parser->add_option("--gpu", options.gpu, "which GPU: a100, h100, h200, b200, rtx4090, ...")
        ->capture_default_str()
        ->needs(gpus);
    parser->add_option("--gpus-per-node", options.gpus_per_node, "GPUs that NVLink or PCIe connects")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 20))
        ->needs(gpus);
    parser->add_option("--nvlink", options.nvlink, "its rate per GPU and direction, like 450GB/s (default: the GPU's)")
        ->needs(gpus);
    parser->add_option("--net", options.net, "the network's rate per GPU and direction, like 50GB/s or 400Gb/s")
        ->capture_default_str()
        ->needs(gpus);
    return parser;
}

ScalingInputs scaling_machine(const PlanOptions& options) {
    ScalingInputs inputs;
    inputs.gpu = find_gpu(options.gpu);
    inputs.gpus = options.gpus;
    inputs.gpus_per_node = options.gpus_per_node;
    inputs.nvlink_bytes_per_s = options.nvlink ? parse_rate(*options.nvlink, "--nvlink") : inputs.gpu.link_bytes_per_s;
    inputs.net_bytes_per_s = parse_rate(options.net, "--net");
    check_nodes(inputs.gpus, inputs.gpus_per_node);
    return inputs;
}

Command add_plan(CLI::App& app) {
    auto options = std::make_shared<PlanOptions>();
    return {add_plan_options(app, *options), [options] { plan(*options); }};
}

#include "commands/layouts.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "kernels/base/check.h"
#include "model/arena.h"
#include "model/balance.h"
#include "model/plan.h"
#include "runtime/io/joined.h"
#include "training/models/model_io.h"

std::vector<GptOptions> options_of_stages(const Config& config, const Grid& grid) {
    std::vector<GptOptions> stages(size_t(grid.pipeline), gpt_options(config, grid));
    for (int stage = 0; stage < grid.pipeline; stage++) stages[size_t(stage)].pipeline.rank = stage;
    return stages;
}

namespace {

// Times that differ by less than about 0.1 % compare as equal.
double rounded_log(double seconds) { return std::round(1000 * std::log(seconds)); }

constexpr double kGiB = 0x1p30;
constexpr int kShortestPart = 1024;  // tokens of a sequence on a rank

// Divides the buckets of a stage between its parts. The embeddings' are in the outer bucket of the first.
void add_buckets(const TensorLayout& layout, std::vector<PartWork>& parts) {
    for (PartWork& part : parts) part.bucket_elements = {0};
    for (size_t i = 0; i < layout.buckets.size(); i++) {
        const Bucket& bucket = layout.buckets[i];
        const auto elements = double(layout.bucket_elements(int(i)));
        const bool is_outer = std::ranges::count(layout.input_buckets, int(i)) > 0;
        size_t part = 0;
        while (part + 1 < parts.size() && bucket.begin >= layout.chunks[part].end) part++;
        if (is_outer)
            parts[0].bucket_elements[0] += elements;
        else
            parts[part].bucket_elements.push_back(elements);
    }
}

// Adds the run to a layout: the work of all stages and the order of their passes.
ScalingInputs scaling_inputs(const Config& config, const std::vector<GptOptions>& stages, ScalingInputs in) {
    const GptOptions& run = stages[0];
    in.tokens_per_micro_step = double(run.batch) * run.seq_len;
    in.micro_steps = micro_steps(config, in.data(), kMaxSteps);
    in.param_wire_bytes = double(size_of(run.precision));
    in.row_bytes = double(run.shape.n_embd) * double(size_of(run.precision));
    const auto longer = [](const OffloadTraffic& traffic) {
        return double(std::max(traffic.to_device, traffic.to_host));
    };
    in.update_host_bytes = longer(planned_traffic_of_update(run));
    in.passes_host_bytes = longer(planned_traffic_of_passes(run));
    // With biases and norms.
    const std::vector<double> work = layer_work(run);
    const double scale = flops_of_token(run, run.seq_len) / (6 * std::accumulate(work.begin(), work.end(), 0.0));
    const std::vector<TensorLayout> layouts = lay_out_stages(run);
    in.stages.clear();
    for (const GptOptions& stage : stages) {
        std::vector<PartWork>& parts = in.stages.emplace_back();
        for (std::array<PassWork, 3> passes : work_of_parts(stage)) {
            for (PassWork& pass : passes) pass.flops_per_token *= scale;
            parts.push_back({passes, {}});
        }
        add_buckets(layouts[size_t(stage.pipeline.rank)], parts);
    }
    if (in.pipeline > 1)
        in.passes = schedule_passes(run.pipeline.schedule, in.pipeline, run.pipeline.chunks, in.micro_steps);
    return in;
}

// Plans the configuration with another layout. Returns nothing if a check refuses it.
std::optional<PlannedLayout> planned(Config config, const ScalingInputs& layout) {
    config.parallel.tensor = layout.tensor, config.parallel.pipeline = layout.pipeline;
    config.parallel.context = layout.context, config.parallel.zero_stage = layout.zero_stage;
    const Grid grid = grid_of(config, layout.gpus);
    std::vector<GptOptions> stages;
    try {
        check_config(config, "", layout.gpus);
        stages = options_of_stages(config, grid);
    } catch (const Error&) {
        return std::nullopt;
    }
    const std::vector<size_t> bytes = planned_bytes_of_stages(stages[0]);
    const auto largest = std::ranges::max_element(bytes);
    PlannedLayout plan{config, grid, int(largest - bytes.begin()), double(*largest),
                       predict_step(scaling_inputs(config, stages, layout))};
    const bool fits = plan.memory_bytes <= usable_bytes(layout.gpu);
    if (fits || layout.pipeline == 1 || !config.parallel.pipeline_layers.empty()) return plan;
    // The layers are the fastest for all stages; others may fit.
    config.parallel.pipeline_layers = balanced_layers(stages[0], pipeline_work(stages[0]), usable_bytes(layout.gpu));
    const std::optional<PlannedLayout> other = planned(config, layout);
    return other->memory_bytes <= usable_bytes(layout.gpu) ? other : plan;
}

// Returns the configurations with values for what `config` leaves open, in the order of preference at equal speed: the
// least recomputation, the largest micro-batch.
std::vector<Config> candidates_of(const Config& config, int data) {
    // GPT-2 124M on an H200 is no faster with twice as many: dev/results/2026-11-29-h200.md.
    constexpr int kMostTokens = 65536;
    using enum Recompute;
    std::vector<Recompute> levels = {config.train.recompute};
    if (levels[0] == automatic) levels = {none, gelu, norm, block};
    std::vector<Config> candidates;
    Config one = config;
    one.open = {};
    for (const Recompute level : levels) {
        one.train.recompute = level;
        one.train.batch_size = config.train.batch_size, one.train.head_rows = config.train.head_rows;
        if (!config.open.batch_size) candidates.push_back(one);
        int most = config.open.batch_size ? std::max(1, kMostTokens / config.train.seq_len) : 0;
        for (int batch; (batch = largest_batch_size(config, data, most)) > 0; most = batch / 2) {
            one.train.batch_size = batch;
            if (config.open.head_rows) one.train.head_rows = default_head_rows(batch, config.train.seq_len);
            candidates.push_back(one);
        }
    }
    return candidates;
}

// The seconds of a step that depend on an open micro-batch and recompute level and that predict_step() ignores.
double seconds_of_choices(const GptOptions& run, const ScalingInputs& layout) {
    // A layer's kernels start and end in turn. 32 and 64 sequences on an H200 give 0.2 ms for GPT-2 124M
    // and nothing for 1558M: dev/results/2026-11-29-h200.md.
    constexpr double kLayer_s = 1e-4;
    const double layers = double(run.shape.n_layer) / layout.pipeline, size = double(size_of(run.precision));
    double bytes = 0;  // per token: a recomputed tensor is written, and what it is computed from is read
    if (run.recompute >= Recompute::gelu) bytes += 2 * double(run.shape.hidden()) * size;
    if (run.recompute >= Recompute::norm) bytes += 4 * double(run.shape.n_embd) * size;
    const double tokens = double(run.batch) * run.seq_len / (layout.tensor * layout.context);
    const double recompute_s = bytes == 0 ? 0 : tokens * bytes / layout.gpu.memory_bytes_per_s;
    return run.micro_steps * layers * (kLayer_s + recompute_s);
}

// Returns the best of the configuration's candidates for a layout, or nothing if a check refuses all.
std::optional<PlannedLayout> best_planned(const Config& config, const ScalingInputs& layout) {
    constexpr int kManyPerStage = 8;  // micro-steps: the bubble of 1F1B is at most an eighth of the work
    const auto fits = [&](const PlannedLayout& plan) { return plan.memory_bytes <= usable_bytes(layout.gpu); };
    const auto plan_one = [&](const Config& one) {
        std::optional<PlannedLayout> plan = planned(one, layout);
        if (!plan) return plan;
        plan->compared_s = plan->step.step_s;
        if (config.leaves_choices())
            plan->compared_s += seconds_of_choices(gpt_options(plan->config, plan->grid), layout);
        return plan;
    };
    // A smaller micro-batch than one that fits is not faster, except in a pipeline with few micro-steps.
    const auto is_slower = [&](const Config& one, const PlannedLayout& best) {
        return fits(best) && best.config.train.recompute == one.train.recompute &&
               (layout.pipeline == 1 ||
                micro_steps(best.config, layout.data(), kMaxSteps) >= kManyPerStage * layout.pipeline);
    };
    const std::vector<Config> candidates = candidates_of(config, layout.data());
    std::optional<PlannedLayout> best = plan_one(candidates.back());  // needs the least memory
    if (candidates.size() == 1 || (best && !fits(*best))) return best;
    best.reset();
    Config::Train largest;  // the largest micro-batch that fits, with the least recomputation
    largest.batch_size = 0;
    for (const Config& one : candidates) {
        const Config::Train& train = one.train;
        if (train.batch_size <= largest.batch_size && train.recompute != largest.recompute) continue;
        if (best && is_slower(one, *best)) continue;
        const std::optional<PlannedLayout> plan = plan_one(one);
        if (plan && fits(*plan) && train.batch_size > largest.batch_size) largest = train;
        if (!plan || (best && fits(*best) && !fits(*plan))) continue;
        if (!best || !fits(*best) || rounded_log(plan->compared_s) < rounded_log(best->compared_s)) best = plan;
    }
    return best;
}

// The given numbers of layers, and what the configuration left open: ", layers [9, 8, 7], batch 16, recompute norm".
std::string choices_text(const PlannedLayout& layout, const Config& configured) {
    const std::vector<int>& layers = layout.config.parallel.pipeline_layers;
    const Config::Train& train = layout.config.train;
    std::string text = layers.empty() ? "" : ", layers [" + joined(layers) + "]";
    if (configured.open.batch_size) text += format(", batch %d", train.batch_size);
    if (configured.train.recompute == Recompute::automatic) text += format(", recompute %s", name_of(train.recompute));
    return text;
}

// "data 4, pipeline 2, context 1, tensor 8, ZeRO 1"
std::string layout_text(const PlannedLayout& layout, const Config& configured) {
    return format("data %d, pipeline %d, context %d, tensor %d, ZeRO %d%s", layout.grid.data, layout.grid.pipeline,
                  layout.grid.context, layout.grid.tensor, layout.config.parallel.zero_stage,
                  choices_text(layout, configured).c_str());
}

// Why a layout does not fit: its memory by category.
std::string memory_text(const PlannedLayout& layout, const Config& configured) {
    const GptOptions stage = options_of_stages(layout.config, layout.grid)[size_t(layout.largest_stage)];
    std::map<std::string, double> categories;
    for (const MemoryRegion& region : plan_memory(stage)) categories[region.category] += double(region.bytes);
    const std::string text = joined(categories, ", ", [](const auto& category) {
        return format("%s %.1f", category.first.c_str(), category.second / kGiB);
    });
    return format("%s, needs %.1f GiB: %s", layout_text(layout, configured).c_str(), layout.memory_bytes / kGiB,
                  text.c_str());
}

}  // namespace

double usable_bytes(const GpuModel& gpu) {
    constexpr double kUsable = 0.94;  // the rest: driver and ECC, see GpuModel
    return gpu.memory_gib == 0 ? HUGE_VAL : kUsable * gpu.memory_gib * kGiB;
}

std::vector<PlannedLayout> plan_layouts(const Config& config, const ScalingInputs& machine) {
    std::vector<PlannedLayout> layouts;
    Config plain = config;
    plain.parallel.automatic = false;
    ScalingInputs layout = machine;
    for (layout.tensor = 1; layout.tensor <= machine.gpus; layout.tensor++)
        for (layout.context = 1; layout.tensor * layout.context <= machine.gpus; layout.context++) {
            // Parts of sequences on one node, and not too short to hide the ring.
            const bool is_likely = layout.tensor * layout.context <= machine.gpus_per_node &&
                                   config.train.seq_len / layout.context >= kShortestPart;
            if (layout.context > 1 && !is_likely && layout.context != config.parallel.context) continue;
            for (layout.pipeline = 1; layout.pipeline <= config.model.n_layer; layout.pipeline++)
                if (machine.gpus % (layout.tensor * layout.context * layout.pipeline) == 0)
                    for (layout.zero_stage = 0; layout.zero_stage <= (layout.replicas() > 1 ? 3 : 0);
                         layout.zero_stage++)
                        if (const auto plan = best_planned(plain, layout)) layouts.push_back(*plan);
        }
    const auto first_small = std::ranges::stable_partition(
        layouts, [&](const PlannedLayout& l) { return l.memory_bytes <= usable_bytes(machine.gpu); });
    std::ranges::stable_sort(layouts.begin(), first_small.begin(), {},
                             [](const auto& l) { return rounded_log(l.compared_s); });
    std::ranges::stable_sort(first_small, {}, &PlannedLayout::memory_bytes);
    return layouts;
}

std::optional<PlannedLayout> plan_choices(const Config& config, const ScalingInputs& machine) {
    ScalingInputs layout = machine;
    layout.tensor = config.parallel.tensor, layout.pipeline = config.parallel.pipeline;
    layout.context = config.parallel.context, layout.zero_stage = config.parallel.zero_stage;
    return best_planned(config, layout);
}

std::string layout_table(const std::vector<PlannedLayout>& layouts, const Config& configured,
                         const ScalingInputs& machine) {
    constexpr size_t kMostRows = 10;
    constexpr double kTera = 1e12, kGiga = 1e9;
    const int nodes = (machine.gpus + machine.gpus_per_node - 1) / machine.gpus_per_node;
    const char* link = machine.gpu.has_nvlink ? "NVLink" : "PCIe";
    std::string text = format("predicted for %d %s on %d node%s; %s %.0f GB/s", machine.gpus, machine.gpu.product,
                              nodes, nodes == 1 ? "" : "s", link, machine.nvlink_bytes_per_s / kGiga);
    if (nodes > 1) text += format(", network %.0f GB/s", machine.net_bytes_per_s / kGiga);
    text += format(" per GPU and direction; compute at %.0f %% of %.1f TFLOP/s\n", machine.peak_share * 100,
                   machine.gpu.flops_per_s / kTera);
    size_t fitting = 0, shown = 0;
    for (const PlannedLayout& layout : layouts) fitting += layout.memory_bytes <= usable_bytes(machine.gpu);
    text += format("%zu layouts of %d %s", layouts.size(), machine.gpus, machine.gpu.product);
    if (fitting < layouts.size())
        text += format("; %zu need more than the usable memory of %.0f GiB", layouts.size() - fitting,
                       machine.gpu.memory_gib);
    if (layouts.empty()) return text + ": no grid has a valid configuration\n";
    if (fitting == 0) text += "\nthe smallest, " + memory_text(layouts[0], configured);
    text += format("\n\n%5s%9s%8s%7s%6s%7s%12s%8s ms%12s%12s%11s%10s%10s%12s\n", "data", "pipeline", "context",
                   "tensor", "ZeRO", "GiB", "compute ms", link, "network ms", "exposed ms", "bubble ms", "step ms",
                   "tokens/s", "efficiency");
    const Grid grid = grid_of(configured, machine.gpus);
    for (const PlannedLayout& layout : layouts) {
        const int zero_stage = layout.config.parallel.zero_stage;
        const bool is_configured = layout.grid == grid, does_fit = shown < fitting;
        if (++shown > std::min(kMostRows, fitting) && !is_configured) continue;
        const bool crosses = nodes > 1 && machine.gpus_per_node % layout.grid.tensor != 0;
        const StepPrediction& step = layout.step;
        text +=
            format("%5d%9d%8d%7d%c%5d%7.1f%12.2f%11.2f%12.2f%12.2f%11.2f%10.2f%10.0f%10.1f %%%s%s%s\n",
                   layout.grid.data, layout.grid.pipeline, layout.grid.context, layout.grid.tensor, crosses ? '*' : ' ',
                   zero_stage, layout.memory_bytes / kGiB, (step.compute_s + step.slowdown_s + step.update_s) * 1e3,
                   step.communication.nvlink_s * 1e3, step.communication.net_s * 1e3, step.exposed_s * 1e3,
                   step.bubble_s * 1e3, step.step_s * 1e3, step.tokens_per_s, step.efficiency * 100,
                   is_configured && zero_stage == configured.parallel.zero_stage ? "  configured" : "",
                   does_fit ? "" : "  too large", choices_text(layout, configured).c_str());
    }
    if (text.find('*') != std::string::npos) text += "* warning: GPUs of different nodes divide a layer\n";
    return text;
}

std::string choose_plan(Config& config, const RankEnvironment& environment) {
    const Config given = config;
    config.open = {};
    if (config.train.recompute == Recompute::automatic) config.train.recompute = Recompute::none;
    const bool is_open = given.parallel.automatic || (given.leaves_choices() && gpu_of_device(gpu_name()));
    if (!is_open) return "";

    ScalingInputs machine = machine_of_device(gpu_name());
    machine.gpus = environment.size;
    machine.gpus_per_node = environment.local_size > 0 ? environment.local_size : environment.size;
    const std::string gpus = format("%d %s", machine.gpus, machine.gpu.product);
    if (!given.parallel.automatic) {
        const std::optional<PlannedLayout> plan = plan_choices(given, machine);
        if (!plan) return "";
        config = plan->config;
        return format(
            "plan     train.batch_size %d, train.recompute %s: the fastest that fits %s by prediction, %.1f GiB",
            config.train.batch_size, name_of(config.train.recompute), gpus.c_str(), plan->memory_bytes / kGiB);
    }
    const std::vector<PlannedLayout> layouts = plan_layouts(given, machine);
    if (layouts.empty())
        fail(Exit::config,
             "parallel.auto: no layout of %d ranks is valid; train.total_batch_tokens (%ld) must be a multiple of "
             "train.batch_size (%d) times train.seq_len (%d) times the ranks with different samples",
             environment.size, config.train.total_batch_tokens, config.train.batch_size, config.train.seq_len);
    if (layouts[0].memory_bytes > usable_bytes(machine.gpu))
        fail(Exit::config, "parallel.auto: no layout of %d ranks fits into %.0f GiB; the smallest, %s",
             environment.size, machine.gpu.memory_gib, memory_text(layouts[0], given));
    config = layouts[0].config;
    return format("layout   %s: the fastest of %zu for %s by prediction, %.2f ms per step",
                  layout_text(layouts[0], given).c_str(), layouts.size(), gpus.c_str(), layouts[0].step.step_s * 1e3);
}

#include "commands/plan_measured.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "commands/run_records.h"
#include "kernels/base/check.h"
#include "model/balance.h"
#include "runtime/io/joined.h"

namespace {

// The layers and the work of each stage, which are the sums over its parts.
struct Stages {
    std::vector<int> layers;
    std::vector<double> work;
};

Stages stages_of(const PipelineWork& work, const std::vector<LayerRange>& ranges, size_t stages) {
    Stages sums{std::vector<int>(stages), std::vector<double>(stages)};
    for (size_t part = 0; part < ranges.size(); part++) {
        sums.layers[part % stages] += ranges[part].count;
        sums.work[part % stages] += work.of_part(part, ranges[part]);
    }
    return sums;
}

// Returns the ms of each stage in every window of a run whose stages had these layers: (windows, stages).
std::vector<std::vector<double>> measured_windows(const std::string& run_dir, const std::vector<int>& layers) {
    const RunRecords records(run_dir);
    const RecordTable& table = records.table("ranks");
    std::vector<std::vector<double>> windows;
    for (size_t row = 0; row < table.steps.size(); row++) {
        const auto value = [&](size_t stage, const char* key) {
            const std::vector<double>* column = table.column(format("stage_%zu/%s", stage, key));
            return column ? (*column)[row] : NAN;
        };
        std::vector<double> ms;
        for (size_t stage = 0; stage < layers.size(); stage++)
            if (value(stage, "layers") == layers[stage]) ms.push_back(value(stage, "compute_ms"));
        if (ms.size() == layers.size() && std::isnan(value(layers.size(), "layers"))) windows.push_back(ms);
    }
    return windows;
}

}  // namespace

std::string measured_plan(const GptOptions& options, const std::string& run_dir, double most_bytes) {
    const size_t stages = size_t(options.pipeline.size);
    if (stages == 1)
        fail(Exit::config, "--measured %s: parallel.pipeline of the configuration must be above 1", run_dir);
    PipelineWork work = pipeline_work(options);
    const Stages before = stages_of(work, layer_ranges(options), stages);
    const std::vector<std::vector<double>> windows = measured_windows(run_dir, before.layers);
    if (windows.empty())
        fail(Exit::data,
             "%s/metrics.jsonl has no times of pipeline stages with [%s] layers, which the configuration has; use the "
             "run's config.json, and train for more than 20 steps and 10 seconds",
             run_dir, joined(before.layers));
    std::vector<double> stage_ms;
    for (size_t stage = 0; stage < stages; stage++) {
        std::vector<double> ms;
        for (const std::vector<double>& window : windows) ms.push_back(window[stage]);
        std::ranges::nth_element(ms, ms.begin() + ptrdiff_t(ms.size() / 2));
        stage_ms.push_back(ms[ms.size() / 2]);
    }

    const double ms_per_work = std::accumulate(stage_ms.begin(), stage_ms.end(), 0.0) /
                               std::accumulate(before.work.begin(), before.work.end(), 0.0);
    for (double& layers : work.before) layers *= ms_per_work;
    for (size_t part = 0; part < work.parts.size(); part++) {
        const double rest_ms = stage_ms[part % stages] - before.work[part % stages] * ms_per_work;
        work.parts[part] = work.parts[part] * ms_per_work + rest_ms / options.pipeline.chunks;
    }
    GptOptions balanced = options;
    balanced.pipeline.layers = balanced_layers(options, work, most_bytes);
    const Stages after = stages_of(work, layer_ranges(balanced), stages);

    std::string text = format("measured in %zu windows of %s, per step:\n", windows.size(), run_dir.c_str());
    for (size_t stage = 0; stage < stages; stage++)
        text += format("stage %-12zu %3d layers %10.2f ms; predicted with %3d layers %10.2f ms\n", stage,
                       before.layers[stage], stage_ms[stage], after.layers[stage], after.work[stage]);
    const double most = std::ranges::max(stage_ms), predicted = std::ranges::max(after.work);
    // Less than what is printed is no gain.
    if (predicted > most - 0.01)
        return text + format("the slowest stage takes %.2f ms; no other layers are predicted to be faster\n", most);
    return text +
           format("the slowest stage takes %.2f ms, and predicted %.2f ms with\nparallel.pipeline_layers: [%s]\n", most,
                  predicted, joined(balanced.pipeline.layers).c_str());
}

// The plan command's options, as a test reads them too.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/performance/scaling.h"

namespace CLI {
class App;
}

struct PlanOptions {
    std::string config;
    std::vector<std::string> overrides;
    int gpus = 0;  // 0: memory and FLOPs only
    int gpus_per_node = 8;
    std::string gpu = "h100";           // a name that find_gpu() knows
    std::optional<std::string> nvlink;  // a rate, as parse_rate() takes it; absent: the GPU's
    std::string net = "50GB/s";
};

CLI::App* add_plan_options(CLI::App& app, PlanOptions& options);

// The machine that the options describe, without what ScalingInputs says about the run. Fails with Exit::usage if the
// GPU is not known, a rate cannot be read, or the GPUs do not fill whole nodes.
ScalingInputs scaling_machine(const PlanOptions& options);

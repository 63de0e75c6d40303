// The layouts of a run's ranks: data x pipeline x context x tensor parallelism and the ZeRO stage. Finds those that the
// configuration allows, plans the memory of each and predicts its speed, for `plan` and parallel.auto.
#pragma once

#include "model/options.h"
#include "runtime/cluster/cluster.h"
#include "runtime/performance/performance.h"

// A layout of the ranks of `config`, whose section "parallel" describes it.
struct PlannedLayout {
    Config config;
    Grid grid;
    int largest_stage = 0;    // the stage of the pipeline whose ranks need the most memory
    double memory_bytes = 0;  // of such a rank
    StepPrediction step;
    double compared_s = 0;  // of a step, to compare layouts: with the costs of small micro-batches and recomputation if
                            // the configuration leaves them open
};

// Returns the options of a rank of each stage of the pipeline.
std::vector<GptOptions> options_of_stages(const Config& config, const Grid& grid);

// Returns the layouts of machine.gpus ranks that check_config() and gpt_options() accept: those that fit into the GPU's
// memory, the fastest first and, if 0.1 % decide, the fewest ranks that divide layers or sequences and the lowest ZeRO
// stage; then those that do not, the smallest first. Ranks that divide sequences are on one node
// and have at least 1024 tokens each, unless config.parallel.context says otherwise. The schedule of the pipeline is
// the configuration's, and so are the micro-batch and recomputation, unless it leaves them open: then each layout has
// the fastest ones that fit, or else those with the least memory. If a stage does not fit, sets
// parallel.pipeline_layers to the fastest layers that fit, if any do.
std::vector<PlannedLayout> plan_layouts(const Config& config, const ScalingInputs& machine);

// Returns the configured layout with the choices that the configuration leaves open, as plan_layouts() makes them, or
// nothing if check_config() or gpt_options() refuses all.
std::optional<PlannedLayout> plan_choices(const Config& config, const ScalingInputs& machine);

// Returns the memory of the GPU that a rank can use. A GPU without a known size has enough.
double usable_bytes(const GpuModel& gpu);

// Returns the machine, the number of layouts that do not fit, and rows for the terminal: the first layouts, and the
// configured one with all ZeRO stages.
std::string layout_table(const std::vector<PlannedLayout>& layouts, const Config& configured,
                         const ScalingInputs& machine);

// Sets the keys that the configuration leaves to the program, to the same values on all ranks: with parallel.auto those
// of the first layout, and parallel.auto to false; on a known GPU an open micro-batch and train.recompute "auto".
// Elsewhere "auto" becomes "none". Returns a line that explains a choice, or an empty string. With parallel.auto, fails
// with Exit::config if no layout fits or the GPU is unknown.
std::string choose_plan(Config& config, const RankEnvironment& environment);

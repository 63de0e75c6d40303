// The layers of a pipeline's parts, balanced by work and memory.
#pragma once

#include <cmath>

#include "model/options.h"

// The work of the layers before each layer of a model and before its end and, for each part of a pipeline, what it has
// besides its layers, in any unit.
struct PipelineWork {
    std::vector<double> before = {0}, parts;
    double of_part(size_t part, const LayerRange& range) const {
        return before[size_t(range.end())] - before[size_t(range.first)] + parts[part];
    }
};
// Returns the multiplications per token of the size * chunks parts of options.pipeline; the last part has the head.
PipelineWork pipeline_work(const GptOptions& options);

// Returns the number of layers of each part. Of the divisions with which no rank needs more than `most_bytes`, takes
// one with the least work of the part that has the most; of these, one with the least memory of the rank that needs the
// most. If no division fits, work does not count.
//
// The memory of a rank is planned_bytes(), linear in the number of layers: exact near the mean. The chunks of a rank
// share it equally.
std::vector<int> balanced_layers(const GptOptions& options, const PipelineWork& work, double most_bytes = HUGE_VAL);

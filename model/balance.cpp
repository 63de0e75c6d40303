#include "model/balance.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

#include "model/plan.h"

PipelineWork pipeline_work(const GptOptions& options) {
    const std::vector<double> layers = layer_work(options);  // the last: the head
    PipelineWork work;
    work.parts.resize(size_t(options.pipeline.size * options.pipeline.chunks));
    work.parts.back() = layers.back();
    std::partial_sum(layers.begin(), layers.end() - 1, std::back_inserter(work.before));
    return work;
}

namespace {

using PartCost = std::function<double(size_t part, const LayerRange& range)>;

// Returns the largest cost of a part and the layers of each, such that the cost is as small as possible. If it is
// infinite, the layers have no meaning.
std::pair<double, std::vector<int>> least_cost(size_t parts, int layers, const PartCost& cost) {
    // most[part][end]: of the parts up to `part`, which have the layers before `end`, the largest cost; first[][]: the
    // first layer of `part`.
    std::vector<std::vector<double>> most(parts, std::vector<double>(size_t(layers) + 1, HUGE_VAL));
    std::vector<std::vector<int>> first(parts, std::vector<int>(size_t(layers) + 1, 0));
    for (size_t part = 0; part < parts; part++)
        for (int end = int(part) + 1; end <= layers; end++)
            for (int begin = part == 0 ? 0 : end - 1; begin >= int(part); begin--) {
                double& least = most[part][size_t(end)];
                const double own = cost(part, {begin, end - begin});
                if (own >= least) break;  // more layers cost more
                const double larger = std::max(own, part == 0 ? 0 : most[part - 1][size_t(begin)]);
                if (larger < least) least = larger, first[part][size_t(end)] = begin;
            }
    std::vector<int> counts;
    for (int part = int(parts) - 1, end = layers; part >= 0; end = first[size_t(part--)][size_t(end)])
        counts.push_back(end - first[size_t(part)][size_t(end)]);
    std::ranges::reverse(counts);
    return {most.back().back(), counts};
}

}  // namespace

std::vector<int> balanced_layers(const GptOptions& options, const PipelineWork& work, double most_bytes) {
    const size_t parts = work.parts.size(), ranks = size_t(options.pipeline.size);
    const int layers = options.shape.n_layer, mean = std::max(1, layers / int(parts));
    const auto bytes_of_ranks = [&](int count) {  // if each part has `count` layers
        GptOptions even = options;
        even.shape.n_layer = int(parts) * count, even.pipeline.layers.assign(parts, count);
        return planned_bytes_of_stages(even);
    };
    const std::vector<size_t> of_mean = bytes_of_ranks(mean), of_more = bytes_of_ranks(mean + 1);
    const auto bytes = [&](size_t part, const LayerRange& range) {
        const auto at_mean = double(of_mean[part % ranks]), of_layer = double(of_more[part % ranks]) - at_mean;
        return (at_mean + (range.count - mean) * of_layer) / options.pipeline.chunks;
    };
    const auto fastest = least_cost(parts, layers, [&](size_t part, const LayerRange& range) {
        const bool fits = bytes(part, range) * options.pipeline.chunks <= most_bytes;
        return fits ? work.of_part(part, range) : HUGE_VAL;
    });
    const auto smallest = least_cost(parts, layers, [&](size_t part, const LayerRange& range) {
        return work.of_part(part, range) <= fastest.first ? bytes(part, range) : HUGE_VAL;
    });
    return smallest.second;
}

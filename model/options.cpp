#include "model/options.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "kernels/base/check.h"

std::vector<double> layer_work(const GptOptions& options) {
    const GptShape& s = options.shape;
    std::vector<double> work;
    for (int layer = 0; layer < s.n_layer; layer++)
        work.push_back(double(s.n_embd) * (s.qkv_channels() + s.attention_channels() + s.fc_channels() + s.hidden()) +
                       2 * s.attended(layer, options.seq_len));
    work.push_back(double(s.n_embd) * s.padded_vocab());
    return work;
}

double PipelineWork::of_part(size_t part, const LayerRange& range) const {
    return std::accumulate(layers.begin() + range.first, layers.begin() + range.end(), parts[part]);
}

PipelineWork pipeline_work(const GptOptions& options) {
    PipelineWork work{.layers = layer_work(options), .parts = {}};
    work.parts.resize(size_t(options.pipeline.size * options.pipeline.chunks));
    work.parts.back() = work.layers.back();
    work.layers.pop_back();
    return work;
}

std::vector<LayerRange> balanced_layers(const PipelineWork& work) {
    const int layers = int(work.layers.size()), parts = int(work.parts.size());
    std::vector<double> before = {0};  // the work of the layers before each one
    for (const double layer : work.layers) before.push_back(before.back() + layer);
    // most[part][end]: of the parts up to `part`, which have the layers before `end`, the most work of one; first[][]:
    // the first layer of `part`.
    std::vector<std::vector<double>> most(size_t(parts), std::vector<double>(size_t(layers) + 1, HUGE_VAL));
    std::vector<std::vector<int>> first(size_t(parts), std::vector<int>(size_t(layers) + 1, 0));
    for (int part = 0; part < parts; part++)
        for (int end = part + 1; end <= layers; end++)
            for (int begin = part; begin < end; begin++) {
                if (part == 0 && begin > 0) break;
                const double earlier = part == 0 ? 0 : most[size_t(part) - 1][size_t(begin)];
                const double own = before[size_t(end)] - before[size_t(begin)] + work.parts[size_t(part)];
                const double larger = std::max(earlier, own);
                if (larger < most[size_t(part)][size_t(end)])
                    most[size_t(part)][size_t(end)] = larger, first[size_t(part)][size_t(end)] = begin;
            }
    std::vector<LayerRange> ranges;
    for (int part = parts - 1, end = layers; part >= 0; end = first[size_t(part)][size_t(end)], part--)
        ranges.push_back({first[size_t(part)][size_t(end)], end - first[size_t(part)][size_t(end)]});
    std::ranges::reverse(ranges);
    return ranges;
}

std::vector<LayerRange> layer_ranges(const GptOptions& options) {
    std::vector<LayerRange> ranges;
    for (const int count : options.pipeline.layers) ranges.push_back({ranges.empty() ? 0 : ranges.back().end(), count});
    return ranges.empty() ? balanced_layers(pipeline_work(options)) : ranges;
}

std::vector<LayerRange> own_layers(const GptOptions& options) {
    const std::vector<LayerRange> ranges = layer_ranges(options);
    std::vector<LayerRange> own;
    for (int chunk = 0; chunk < options.pipeline.chunks; chunk++)
        own.push_back(ranges[size_t(chunk * options.pipeline.size + options.pipeline.rank)]);
    return own;
}

std::string tensor_parallel_problem(const GptOptions& o) {
    const int parts = o.tensor_parallel.size;
    if (parts == 1) return "";
    if (std::string problem = o.shape.parts_problem(parts); !problem.empty()) return problem;
    if (o.batch * o.seq_len % parts != 0)
        return format("train.batch_size (%d) times train.seq_len (%d) must be a multiple of parallel.tensor (%d)",
                      o.batch, o.seq_len, parts);
    if (o.cached_sequences > 0 && o.seq_len % parts != 0)
        return format("train.seq_len (%d) must be a multiple of parallel.tensor (%d)", o.seq_len, parts);
    return "";
}

int segments_of_ring(const GptOptions& o, int seq_len) {
    int all = int(std::bit_floor(unsigned(o.training ? o.max_terms : 1)));
    while (all > 1 && seq_len % (32 * all) != 0) all /= 2;
    return all > 1 && all % o.context.size == 0 ? all / o.context.size : 0;
}

int terms_of_sums(const GptOptions& o) {
    GptOptions divided = o;
    int& parts = divided.tensor_parallel.size;
    const int most = o.training ? std::min(o.max_terms, o.shape.kv_heads()) : 1;
    for (parts = int(std::bit_floor(unsigned(most))); parts > o.tensor_parallel.size; parts /= 2)
        if (tensor_parallel_problem(divided).empty()) return parts;
    return o.tensor_parallel.size;
}

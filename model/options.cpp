#include "model/options.h"

#include <bit>

#include "kernels/base/check.h"
#include "model/balance.h"

std::vector<double> layer_work(const GptOptions& options) {
    const GptShape& s = options.shape;
    std::vector<double> work;
    for (int layer = 0; layer < s.n_layer; layer++)
        work.push_back(double(s.n_embd) * (s.qkv_channels() + s.attention_channels() + s.fc_channels() + s.hidden()) +
                       2 * s.attended(layer, options.seq_len));
    work.push_back(double(s.n_embd) * s.padded_vocab());
    return work;
}

std::vector<int> part_layers(const GptOptions& options) {
    const PipelineParallel& pipeline = options.pipeline;
    if (pipeline.size * pipeline.chunks == 1) return {options.shape.n_layer};
    return pipeline.layers.empty() ? balanced_layers(options, pipeline_work(options)) : pipeline.layers;
}

std::vector<LayerRange> layer_ranges(const GptOptions& options) {
    std::vector<LayerRange> ranges;
    for (const int count : part_layers(options)) ranges.push_back({ranges.empty() ? 0 : ranges.back().end(), count});
    return ranges;
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

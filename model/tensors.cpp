#include "model/tensors.h"

#include <algorithm>
#include <map>
#include <numeric>

const std::vector<TensorRow>& tensor_table() {
    using G = GptWeights;
    using B = BlockWeights;
    using W = LayerWeights;
    using S = GptShape;
    using enum Init;
    using enum TensorRole;
    using enum Division;
    static const std::vector<TensorRow> table = {
        {&G::wte, &W::weight, "wte", &S::padded_vocab, &S::channels, normal, embedding, rows},
        {&G::wpe, &W::weight, "wpe", &S::positions, &S::channels, normal, embedding, whole, &S::has_positions},
        {&G::norm_e, &W::weight, "norm_e.weight", &S::channels, &S::one, one, vector, summed,
         &S::has_embedding_norm_weight},
        {&G::norm_e, &W::bias, "norm_e.bias", &S::channels, &S::one, zero, vector, summed, &S::has_embedding_norm_bias},
        {&G::norm_f, &W::weight, "norm_f.weight", &S::channels, &S::one, one, vector, summed, &S::has_norm_weight},
        {&G::norm_f, &W::bias, "norm_f.bias", &S::channels, &S::one, zero, vector, summed, &S::has_norm_bias},
        {&B::norm1, &W::weight, "norm1.weight", &S::channels, &S::one, one, vector, summed, &S::has_norm_weight},
        {&B::norm1, &W::bias, "norm1.bias", &S::channels, &S::one, zero, vector, summed, &S::has_norm_bias},
        {&B::qkv, &W::weight, "qkv.weight", &S::computed_qkv_channels, &S::channels, normal, matrix, rows, &S::always,
         &S::qkv_rows},
        {&B::qkv, &W::bias, "qkv.bias", &S::computed_qkv_channels, &S::one, zero, vector, rows, &S::has_qkv_bias,
         &S::qkv_rows},
        {&B::q_norm, &W::weight, "q_norm.weight", &S::head_channels, &S::one, one, vector, summed,
         &S::has_qk_norm_weight},
        {&B::k_norm, &W::weight, "k_norm.weight", &S::head_channels, &S::one, one, vector, summed,
         &S::has_qk_norm_weight},
        {&B::attn_proj, &W::weight, "attn_proj.weight", &S::channels, &S::attention_channels, normal_residual, matrix,
         columns},
        {&B::attn_proj, &W::bias, "attn_proj.bias", &S::channels, &S::one, zero, vector, whole, &S::has_attn_proj_bias},
        {&B::norm2, &W::weight, "norm2.weight", &S::channels, &S::one, one, vector, summed, &S::has_norm_weight},
        {&B::norm2, &W::bias, "norm2.bias", &S::channels, &S::one, zero, vector, summed, &S::has_norm_bias},
        {&B::fc, &W::weight, "fc.weight", &S::fc_channels, &S::channels, normal, matrix, rows, &S::always, &S::fc_rows},
        {&B::fc, &W::bias, "fc.bias", &S::fc_channels, &S::one, zero, vector, rows, &S::has_mlp_bias, &S::fc_rows},
        {&B::fc_proj, &W::weight, "fc_proj.weight", &S::channels, &S::hidden, normal_residual, matrix, columns},
        {&B::fc_proj, &W::bias, "fc_proj.bias", &S::channels, &S::one, zero, vector, whole, &S::has_mlp_bias},
        {&G::head, &W::weight, "head.weight", &S::padded_vocab, &S::channels, normal, head, rows, &S::has_head},
    };
    return table;
}

bool TensorRow::is_linear() const {
    if (!per_layer()) return false;
    const auto of = std::get<1>(layer);
    return of == &BlockWeights::qkv || of == &BlockWeights::attn_proj || of == &BlockWeights::fc ||
           of == &BlockWeights::fc_proj;
}

namespace {

void append(TensorLayout& layout, const TensorRow& row, int layer) {
    Tensor tensor;
    tensor.name = layer < 0 ? row.name : "h." + std::to_string(layer) + "." + row.name;
    tensor.row = &row;
    tensor.layer = layer;
    tensor.rows = (layout.shape.*row.rows)();
    tensor.cols = (layout.shape.*row.cols)();
    tensor.begin = layout.elements;
    tensor.count = size_t(tensor.rows) * size_t(tensor.cols);
    tensor.bucket = int(layout.buckets.size()) - 1;
    tensor.number = int(layout.tensors.size());
    tensor.is_copy = false;
    layout.elements += round_up(tensor.count, kTensorAlignment);
    layout.parameters += tensor.count;
    layout.tensors.push_back(std::move(tensor));
}

enum class Group { tied, input, block, norm_f, head };

// A tied embedding is in the group of the input, except with pipeline parallelism.
Group group_of(const TensorRow& row, bool is_tied_apart) {
    if (row.per_layer()) return Group::block;
    const auto layer = std::get<0>(row.layer);
    if (layer == &GptWeights::wte && is_tied_apart) return Group::tied;
    if (layer == &GptWeights::norm_f) return Group::norm_f;
    return layer == &GptWeights::head ? Group::head : Group::input;
}

void append_group(TensorLayout& layout, Group group, bool is_tied_apart, int layer = -1) {
    for (const TensorRow& row : tensor_table())
        if (group_of(row, is_tied_apart) == group && (layout.shape.*row.is_present)()) append(layout, row, layer);
}

void begin_bucket(TensorLayout& layout, int first_layer, int n_layers) {
    layout.buckets.push_back({first_layer, n_layers, layout.elements, 0, layout.shard_elements});
}

// With one rank the piece is the whole bucket; with several, each piece is a multiple of a chunk. Returns the bucket's
// number.
int end_bucket(TensorLayout& layout) {
    Bucket& bucket = layout.buckets.back();
    const size_t ranks = size_t(layout.ranks), elements = layout.elements - bucket.begin;
    bucket.piece = ranks == 1 ? elements : round_up((elements + ranks - 1) / ranks, ops::kChunkElements);
    layout.elements = bucket.begin + ranks * bucket.piece;
    layout.shard_elements += bucket.piece;
    return int(layout.buckets.size()) - 1;
}

// Makes the next tensor begin a chunk.
void begin_chunk(TensorLayout& layout) {
    const size_t begin = layout.buckets.back().begin;
    layout.elements = begin + round_up(layout.elements - begin, ops::kChunkElements);
}

// How the tensors are laid out.
struct LayoutRules {
    size_t bucket_elements;  // the most of successive layers in a bucket
    bool is_tied_apart;      // a tied embedding has a bucket
    bool begins_chunks;      // each group and layer begins a chunk
};

// Appends a bucket of some groups, unless they have no tensors, to a list of buckets.
void append_bucket(TensorLayout& layout, const std::vector<Group>& groups, const LayoutRules& rules,
                   std::vector<int>& list) {
    begin_bucket(layout, -1, 0);
    for (const Group group : groups) {
        if (rules.begins_chunks) begin_chunk(layout);
        append_group(layout, group, rules.is_tied_apart);
    }
    if (layout.elements == layout.buckets.back().begin)
        layout.buckets.pop_back();
    else
        list.push_back(end_bucket(layout));
}

int layers_of_bucket(const GptShape& shape, size_t bucket_elements) {
    TensorLayout one;
    one.shape = shape;
    begin_bucket(one, 0, 1);
    append_group(one, Group::block, false, 0);
    return int(std::clamp<size_t>(bucket_elements / one.elements, 1, size_t(shape.n_layer)));
}

void append_layers(TensorLayout& layout, const LayerRange& range, const LayoutRules& rules) {
    const int most = layers_of_bucket(layout.shape, rules.bucket_elements);
    for (int layer = range.first; layer < range.end(); layer++) {
        if ((layer - range.first) % most == 0) begin_bucket(layout, layer, std::min(most, range.end() - layer));
        if (rules.begins_chunks) begin_chunk(layout);
        append_group(layout, Group::block, false, layer);
        layout.layer_buckets[size_t(layer)] = int(layout.buckets.size()) - 1;
        if ((layer - range.first + 1) % most == 0 || layer + 1 == range.end()) end_bucket(layout);
    }
}

TensorLayout empty_layout(const GptShape& shape, int ranks, const TensorParallel& tensor_parallel) {
    TensorLayout layout;
    layout.shape = shape.part(tensor_parallel.size);
    layout.whole = shape;
    layout.tensor_parallel = tensor_parallel;
    layout.ranks = ranks;
    layout.layer_buckets.assign(size_t(shape.n_layer), -1);
    return layout;
}

TensorLayout lay_out_stage(const GptOptions& o) {
    TensorLayout layout = empty_layout(o.shape, o.ranks, o.tensor_parallel);
    const bool is_first = o.pipeline.is_first(), is_last = o.pipeline.is_last(), is_tied = o.shape.tie_embeddings;
    const LayoutRules rules{o.bucket_bytes / sizeof(float), is_tied, o.deterministic_reduce};
    if (is_first && is_tied) append_bucket(layout, {Group::tied}, rules, layout.input_buckets);
    if (is_first) append_bucket(layout, {Group::input}, rules, layout.input_buckets);
    for (const LayerRange& range : own_layers(o)) {
        const size_t begin = layout.chunks.empty() ? 0 : layout.elements;
        append_layers(layout, range, rules);
        layout.chunks.push_back({begin, layout.elements});
    }
    if (is_last) append_bucket(layout, {Group::norm_f, Group::head}, rules, layout.output_buckets);
    if (is_last && is_tied && !is_first) {
        append_bucket(layout, {Group::tied}, rules, layout.output_buckets);
        for (Tensor& tensor : layout.tensors) tensor.is_copy = tensor.bucket == layout.output_buckets.back();
    } else if (is_last && is_tied) {
        layout.output_buckets.push_back(layout.input_buckets.front());
    }
    layout.chunks.back().end = layout.elements;
    if (is_tied && is_first) layout.tied_bucket = layout.input_buckets.front();
    if (is_tied && !is_first && is_last) layout.tied_bucket = layout.output_buckets.back();
    return layout;
}

// Returns the number of chunks of elements [first, first + count) of a tensor.
size_t chunks_of(const TensorLayout& layout, const Tensor& tensor, size_t first, size_t count) {
    const size_t begin = tensor.begin - layout.bucket_of(tensor).begin + first;
    return count == 0 ? 0 : (begin + count - 1) / ops::kChunkElements - begin / ops::kChunkElements + 1;
}

// Returns TensorLayout::first_chunks of all stages.
std::vector<size_t> first_chunks_of(const std::vector<TensorLayout>& stages, size_t names) {
    std::vector<size_t> first(names + 1, 0);
    for (const TensorLayout& stage : stages)
        for (const Tensor& tensor : stage.tensors)
            first[size_t(tensor.number) + 1] = chunks_of(stage, tensor, 0, tensor.count);
    std::partial_sum(first.begin(), first.end(), first.begin());
    return first;
}

}  // namespace

TensorLayout lay_out_tensors(const GptShape& shape, int ranks, size_t bucket_elements,
                             const TensorParallel& tensor_parallel) {
    const LayoutRules rules{bucket_elements, false, false};
    TensorLayout layout = empty_layout(shape, ranks, tensor_parallel);
    append_bucket(layout, {Group::input, Group::norm_f}, rules, layout.input_buckets);
    layout.output_buckets = layout.input_buckets;
    append_layers(layout, {0, shape.n_layer}, rules);
    append_bucket(layout, {Group::head}, rules, layout.output_buckets);
    layout.chunks = {{0, layout.elements}};
    for (const Tensor& tensor : layout.tensors) layout.names.push_back(tensor.name);
    layout.first_chunks = first_chunks_of({layout}, layout.names.size());
    return layout;
}

// The layouts of all stages. Only `named` has names and first_chunks; -1: all do.
static std::vector<TensorLayout> lay_out_stages(const GptOptions& o, int named) {
    std::vector<TensorLayout> stages;
    const TensorLayout whole = lay_out_tensors(o.shape, o.ranks, o.bucket_bytes / sizeof(float), o.tensor_parallel);
    if (o.pipeline.size == 1 && !o.deterministic_reduce) return {whole};
    std::map<std::string_view, int> numbers;
    for (const Tensor& tensor : whole.tensors) numbers.emplace(tensor.name, tensor.number);
    GptOptions stage = o;
    stage.pipeline.layers = part_layers(o);
    for (stage.pipeline.rank = 0; stage.pipeline.rank < o.pipeline.size; stage.pipeline.rank++) {
        stages.push_back(lay_out_stage(stage));
        for (Tensor& tensor : stages.back().tensors) tensor.number = numbers.at(tensor.name);
    }
    const std::vector<size_t> first_chunks = first_chunks_of(stages, whole.names.size());
    for (int i = 0; i < o.pipeline.size; i++)
        if (named < 0 || named == i)
            stages[size_t(i)].names = whole.names, stages[size_t(i)].first_chunks = first_chunks;
    return stages;
}

std::vector<TensorLayout> lay_out_stages(const GptOptions& o) { return lay_out_stages(o, -1); }

TensorLayout lay_out_rank(const GptOptions& o) {
    return std::move(lay_out_stages(o, o.pipeline.rank)[size_t(o.pipeline.rank)]);
}

Parameter& parameter_of(GptWeights& weights, const Tensor& tensor) {
    const TensorRow& row = *tensor.row;
    LayerWeights& layer =
        row.per_layer() ? weights.block[size_t(tensor.layer)].*std::get<1>(row.layer) : weights.*std::get<0>(row.layer);
    Parameter& parameter = layer.*row.member;
    parameter.rows = tensor.rows;
    parameter.cols = tensor.cols;
    parameter.name = row.name;
    return parameter;
}

TensorPart part_of(const TensorLayout& layout, const Tensor& tensor, int rank) {
    const Bucket& bucket = layout.bucket_of(tensor);
    const size_t piece_begin = bucket.begin + size_t(rank) * bucket.piece;
    const size_t begin = std::clamp(tensor.begin, piece_begin, piece_begin + bucket.piece);
    const size_t end = std::clamp(tensor.begin + tensor.count, piece_begin, piece_begin + bucket.piece);
    if (begin == end) return {0, 0, bucket.shard_begin};
    return {begin - tensor.begin, end - begin, bucket.shard_begin + (begin - piece_begin)};
}

NamedTensor without_padding(NamedTensor tensor, const GptShape& shape) {
    tensor.shape[0] = size_t(shape.vocab_size);
    size_t elements = tensor.shape[0] * tensor.shape[1];
    for (Box& box : tensor.boxes) {  // at most one
        box.rows = std::min(box.rows, tensor.shape[0] - std::min(box.row, tensor.shape[0]));
        elements = box.count();
    }
    tensor.count = std::min(tensor.first + tensor.count, std::max(tensor.first, elements)) - tensor.first;
    return tensor;
}

size_t without_vocabulary_padding(const TensorLayout& layout) {
    const size_t padding = size_t(layout.shape.padded_vocab() - layout.shape.vocab_size) * size_t(layout.shape.n_embd);
    return layout.parameters - (layout.shape.has_head() ? 2 : 1) * padding;
}

std::vector<size_t> logical_shape(const TensorLayout& layout, const Tensor& tensor) {
    const TensorRow& row = *tensor.row;
    const auto rows = size_t((layout.whole.*row.rows)()), cols = size_t((layout.whole.*row.cols)());
    if (row.cols == &GptShape::one) return {rows};
    return {rows, cols};
}

std::vector<NamedTensor> whole_tensors(const TensorLayout& layout) {
    std::vector<NamedTensor> tensors;
    for (const Tensor& tensor : layout.tensors)
        tensors.push_back({.name = tensor.name, .shape = logical_shape(layout, tensor)});
    return tensors;
}

std::vector<Box> boxes_of(const TensorLayout& layout, const Tensor& tensor) {
    const TensorRow& row = *tensor.row;
    const auto rank = size_t(layout.tensor_parallel.rank);
    const auto rows = size_t(tensor.rows), cols = size_t(tensor.cols);
    if (layout.tensor_parallel.size == 1 || !row.is_divided()) return {};
    if (row.division == Division::columns) return {{.row = 0, .rows = rows, .col = rank * cols, .cols = cols}};
    std::vector<Box> boxes;
    size_t first = 0;  // of a stacked matrix in the whole tensor
    for (const int stacked : row.stacked_rows ? (layout.shape.*row.stacked_rows)() : std::vector<int>{tensor.rows}) {
        const auto count = size_t(stacked);
        boxes.push_back({.row = first + rank * count, .rows = count, .col = 0, .cols = cols});
        first += size_t(layout.tensor_parallel.size) * count;
    }
    return boxes;
}

std::vector<ops::Chunk> chunk_grid(const TensorLayout& layout) {
    std::vector<ops::Chunk> chunks;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const size_t origin = layout.bucket_of(tensor).begin, end = tensor.begin + tensor.count;
        size_t number = layout.first_chunks[size_t(tensor.number)];
        for (size_t begin = tensor.begin, next = begin; begin < end; begin = next, number++) {
            next = std::min(end, origin + round_up(begin - origin + 1, ops::kChunkElements));
            chunks.push_back({.begin = begin,
                              .count = int(next - begin),
                              .tensor = int(i),
                              .index = int(number) * layout.tensor_parallel.size + layout.tensor_parallel.rank,
                              .group = 0,
                              .state_begin = 0,
                              .first = uint32_t(begin - tensor.begin)});
        }
    }
    return chunks;
}

std::vector<ops::Chunk> counted_once(const TensorLayout& layout, std::vector<ops::Chunk> chunks) {
    std::erase_if(chunks, [&](const ops::Chunk& chunk) {
        const Tensor& tensor = layout.tensors[size_t(chunk.tensor)];
        return tensor.is_copy || (layout.tensor_parallel.rank > 0 && !tensor.row->is_divided());
    });
    return chunks;
}

size_t chunk_count(const TensorLayout& layout) {
    size_t count = 0;
    for (const Tensor& tensor : layout.tensors) count += chunks_of(layout, tensor, 0, tensor.count);
    return count;
}

size_t owned_chunk_count(const TensorLayout& layout, int rank) {
    size_t count = 0;
    for (const Tensor& tensor : layout.tensors) {
        const TensorPart part = part_of(layout, tensor, rank);
        count += chunks_of(layout, tensor, part.first, part.count);
    }
    return count;
}

std::vector<ops::Chunk> owned_chunks(const TensorLayout& layout, const std::vector<ops::Chunk>& grid, int rank,
                                     bool whole) {
    std::vector<ops::Chunk> owned;
    for (ops::Chunk chunk : grid) {
        const Bucket& bucket = layout.bucket_of(layout.tensors[size_t(chunk.tensor)]);
        const size_t inside = chunk.begin - bucket.begin;
        if (inside / bucket.piece != size_t(rank)) continue;
        if (!whole) chunk.begin = bucket.shard_begin + inside % bucket.piece;
        owned.push_back(chunk);
    }
    return owned;
}

// The memory layout of a rank: computed without memory for the plan, then again over the allocation.
#include "model/state.h"

#include <algorithm>
#include <bit>

#include "kernels/base/check.h"

namespace {

size_t scratch_bytes(const GptOptions& options) {
    const GptShape shape = options.shape.part(options.tensor_parallel.size);
    const BatchSizes part = options.part();
    const int BT = int(part.rows()), C = shape.n_embd;
    const int head_rows = std::min(options.head_rows, BT);
    size_t most = 0;
    auto need = [&](size_t bytes) { most = std::max(most, bytes); };
    auto need_for_weight = [&](int rows, int n, int k) {
        ops::MatmulBackwardWeight op{};
        op.rows = rows, op.n = n, op.k = k;
        need(ops::matmul_backward_weight_scratch_bytes(op));
    };
    need_for_weight(head_rows, shape.padded_vocab(), C);
    need_for_weight(BT, shape.qkv_channels(), C);
    need_for_weight(BT, C, shape.attention_channels());
    need_for_weight(BT, shape.fc_channels(), C);
    need_for_weight(BT, C, shape.hidden());

    ops::NormBackward norm{};
    norm.rows = BT / options.tensor_parallel.size, norm.cols = C;
    need(ops::norm_backward_scratch_bytes(norm));

    ops::EmbeddingBackward embedding{};
    embedding.batch = part.batch, embedding.seq_len = part.seq_len, embedding.channels = C;
    embedding.vocab = shape.padded_vocab(), embedding.n_positions = shape.n_positions;
    need(ops::embedding_backward_scratch_bytes(embedding));

    ops::AttentionBackward attention{};
    attention.batch = options.batch, attention.seq_len = part.seq_len, attention.n_head = shape.n_head;
    attention.n_kv_head = shape.kv_heads(), attention.head_size = shape.head_size();
    need(ops::attention_backward_scratch_bytes(attention));

    if (shape.changes_heads()) {
        ops::QkNormRopeBackward heads{};
        heads.batch = part.batch, heads.seq_len = part.seq_len, heads.n_head = shape.n_head;
        heads.n_kv_head = shape.kv_heads(), heads.head_size = shape.head_size(), heads.rotary = shape.rotary();
        need(ops::qk_norm_rope_backward_scratch_bytes(heads));
    }
    return most;
}

size_t decode_scratch_bytes(const GptState& s) {
    ops::AttentionDecode op{};
    op.rows = s.cache.sequences, op.capacity = s.cache.capacity;
    op.n_head = s.layout.shape.n_head, op.head_size = s.layout.shape.head_size();
    return ops::attention_decode_scratch_bytes(op);
}

// Returns the size of the largest bucket in a slot, in elements; 0 for the head's slot if the head is tied.
size_t slot_elements(const TensorLayout& layout, int slot) {
    size_t most = 0;
    for (int i = 0; i < int(layout.buckets.size()); i++)
        if (slot_of(layout, i) == slot) most = std::max(most, layout.bucket_elements(i));
    return most;
}

void place_slots(BucketSlot* slots, Dtype dtype, const TensorLayout& layout, const char* category, const char* name,
                 Arena& arena) {
    for (int i = 0; i < kSlots; i++)
        if (const size_t elements = slot_elements(layout, i))
            slots[i].values = arena.take(category, format("%s_slot_%d", name, i), elements, dtype);
}

// Returns the tensor's place in its bucket's slot.
View in_slot(const TensorLayout& layout, const BucketSlot* slots, const Tensor& tensor) {
    return slots[slot_of(layout, tensor.bucket)].values.from(tensor.begin - layout.bucket_of(tensor).begin);
}

void place_parameters(GptState& s, Arena& arena) {
    const Dtype precision = s.options.precision;
    s.master = arena.take("master weights", "master", owned_elements(s), s.options.optimizer.master_type(),
                          masters_are_offloaded(s.options));
    s.own_param = s.options.computes_with_masters() ? s.master
                                                    : arena.take("compute weights", "own_param", owned_elements(s),
                                                                 precision, s.options.offload_weights);
    if (s.options.keeps_whole_parameters()) {
        s.param =
            s.options.is_sharded() ? arena.take("compute weights", "param", s.layout.elements, precision) : s.own_param;
        s.param_ready.resize(s.layout.buckets.size());
    } else {
        place_slots(s.param_slot, precision, s.layout, "compute weights", "param", arena);
    }
    s.weights.block.resize(size_t(s.options.shape.n_layer));
    for (const Tensor& tensor : s.layout.tensors)
        parameter_of(s.weights, tensor).value =
            s.options.keeps_whole_parameters() ? s.param.from(tensor.begin) : in_slot(s.layout, s.param_slot, tensor);
}

void place_gradients(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    if (options.keeps_whole_gradients()) {
        const int levels = options.deterministic_reduce ? std::bit_width(unsigned(options.micro_steps)) : 1;
        for (int level = 0; level < levels; level++)
            s.levels.push_back(arena.take<float>("gradients", level == 0 ? "grad" : format("grad_level_%d", level),
                                                 s.layout.elements));
        for (int level = 0; s.layout.has_input() && s.layout.has_output() && level < levels; level++)
            if (s.layout.tied_bucket >= 0)
                s.head_levels.push_back(arena.take<float>("gradients", format("head_grad_%d", level),
                                                          s.layout.bucket_elements(s.layout.tied_bucket)));
        s.grad = s.levels[0];
        point_gradients(s, 0);
    } else {
        place_slots(s.grad_slot, Dtype::fp32, s.layout, "gradients", "grad", arena);
        for (int i = 0; options.is_sharded() && options.micro_steps > 1 && i < kSlots; i++)
            if (const size_t elements = slot_elements(s.layout, i))
                s.grad_slot[i].reduced =
                    arena.take<float>("gradients", format("reduced_slot_%d", i), elements / size_t(options.ranks));
        for (const Tensor& tensor : s.layout.tensors)
            parameter_of(s.weights, tensor).grad = in_slot(s.layout, s.grad_slot, tensor).as<float>();
    }
    s.own_grad = options.is_sharded() || options.offload_gradients
                     ? arena.take<float>("gradients", "own_grad", owned_elements(s), options.offload_gradients)
                     : s.grad;
    if (const int tied = s.layout.tied_bucket; tied >= 0 && (options.pipeline.size > 1 || options.is_sharded()))
        s.tied = arena.take<float>(
            "gradients", "tied_embedding",
            options.is_sharded() ? s.layout.buckets[size_t(tied)].piece : s.layout.bucket_elements(tied));
    size_t largest_piece = 0;
    for (const Bucket& bucket : s.layout.buckets) largest_piece = std::max(largest_piece, bucket.piece);
    s.comm_scratch = arena.take<std::byte>(
        "scratch", "comm_scratch",
        reduce_scatter_scratch_bytes(Dtype::fp32, largest_piece, options.ranks, options.deterministic_reduce));
}

// The buffers of layers whose sums have several terms on a rank.
void place_parts(GptState& s, size_t parts, Arena& arena) {
    const GptShape& shape = s.layout.shape;
    TensorParallelGroup& group = s.group;
    const size_t tokens = s.options.part().rows(), C = size_t(shape.n_embd);
    const auto take = [&](const char* name, size_t count) {
        return arena.take("terms", name, count, s.options.precision);
    };
    const auto channels =
        size_t(std::max({shape.qkv_channels(), shape.fc_channels(), shape.attention_channels(), shape.hidden()}));
    group.part_channels = take("part_channels", tokens * channels / parts);
    group.part_weight = take("part_weight", C * channels / parts);
    if (shape.has_qk_norm_weight()) {
        const size_t heads = size_t(shape.n_head + shape.kv_heads()) / parts;
        group.part_raw = take("part_raw", tokens * heads * size_t(shape.head_size()));
        group.part_rstd = arena.take<float>("terms", "part_rstd", tokens * heads);
    }
    if (s.options.tensor_parallel.size > 1) group.sum = arena.take<float>("terms", "sum", tokens * C);
}

// The buffers of the collectives in s.group.
void place_group(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    const auto ranks = size_t(options.tensor_parallel.size), terms = size_t(terms_of_sums(options));
    if (terms == 1) return;
    const size_t tokens = options.part().rows(), C = size_t(s.layout.shape.n_embd), parts = terms / ranks;
    s.group.gathered = s.acts[0].gathered.view, s.group.terms = s.acts[0].terms.view, s.group.parts = int(parts);
    s.group.sums = arena.take<ops::VocabularySums>("control", "vocabulary_sums",
                                                   terms * std::min(size_t(options.head_rows), tokens));
    const GptShape& shape = s.layout.shape;
    if (parts > 1) place_parts(s, parts, arena);
    if (ranks == 1) return;
    // On CPUs too, where overlap costs up to 4 % of a step, so that CPU ranks test what GPUs run.
    if (options.max_terms == 1) s.group.max_bands = 2;
    size_t scratch = reduce_scatter_scratch_bytes(parts > 1 ? Dtype::fp32 : options.precision, tokens / ranks * C,
                                                  int(ranks), options.deterministic_reduce, options.precision);
    if (const int sharers = shape.kv_head_parts; sharers > 1) {
        const size_t part = tokens * size_t(shape.computed_kv_channels());
        s.group.computed_qkv = arena.take("activations", "computed_qkv", tokens * size_t(shape.computed_qkv_channels()),
                                          options.precision);
        s.group.kv_parts = arena.take("activations", "kv_parts", size_t(sharers) * part, options.precision);
        scratch = std::max(scratch, reduce_scatter_scratch_bytes(options.precision, part, sharers,
                                                                 options.deterministic_reduce, options.precision));
    }
    if (options.training) {
        for (const Tensor& tensor : s.layout.tensors) s.summed_elements += summed_part(s, tensor).count;
        s.summed_elements = round_up(s.summed_elements, ranks * kTensorAlignment);
        s.summed = arena.take<float>("gradients", "summed", s.summed_elements);
        scratch = std::max(scratch, reduce_scatter_scratch_bytes(Dtype::fp32, s.summed_elements / ranks, int(ranks),
                                                                 options.deterministic_reduce));
    }
    s.group.scratch = arena.take<std::byte>("scratch", "tensor_parallel_scratch", scratch);
}

// The buffers of sums with a term for each segment.
void place_terms(GptState& s, size_t kv, Arena& arena) {
    const GptOptions& options = s.options;
    const GptShape& shape = s.layout.shape;
    SegmentTerms& terms = s.ring.terms;
    const size_t ranks = size_t(options.context.size), segments = size_t(options.context.segments);
    const size_t rows = ranks * options.part().rows(), C = size_t(shape.n_embd);
    terms.kv = arena.take("context parallelism", "gathered_kv", ranks * kv, options.precision);
    terms.dkv = arena.take<float>("context parallelism", "gathered_dkv", ranks * kv);
    size_t most = ranks * kv, summed = 0;
    if (const int tied = s.layout.tied_bucket; tied >= 0) summed = s.layout.bucket_elements(tied);
    for (const Tensor& tensor : s.layout.tensors) {
        most = std::max(most, tensor.count + size_t(tensor.rows));  // with a bias
        summed = std::max(summed, tensor.count);
    }
    for (size_t level = 1; level < segments; level *= 2)
        terms.levels.push_back(arena.take<float>("terms", format("level_%zu", level), most));
    if (shape.has_qk_norm_weight())
        terms.head_vectors =
            arena.take<float>("terms", "head_vectors",
                              round_up(2 * segments * size_t(shape.head_size()), size_t(options.tensor_parallel.size)));
    if (ranks == 1) return;
    terms.rows = arena.take("context parallelism", "gathered_rows", rows * C, options.precision);
    terms.tokens = arena.take<int>("context parallelism", "gathered_tokens", rows);
    summed = std::max(round_up(summed, kTensorAlignment) / ranks, kv);
    terms.scratch = arena.take<std::byte>("scratch", "segment_terms_scratch",
                                          reduce_scatter_scratch_bytes(Dtype::fp32, summed, int(ranks), true));
}

// The buffers of attention over chunks.
void place_ring(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    if (!options.context.is_divided()) return;
    const GptShape& shape = s.layout.shape;
    const size_t rows = options.part().rows(), kv = rows * size_t(shape.kv_channels());
    const auto take = [&](const char* name, size_t count) {
        return arena.take<float>("context parallelism", name, count);
    };
    s.ring.running = {.out = take("ring_out", rows * size_t(shape.attention_channels())),
                      .max = take("ring_max", rows * size_t(shape.n_head)),
                      .sum = take("ring_sum", rows * size_t(shape.n_head))};
    if (options.context.has_terms()) return place_terms(s, kv, arena);
    for (View& buffer : s.ring.kv) buffer = arena.take("context parallelism", "ring_kv", kv, options.precision);
    if (!options.training) return;
    s.ring.dkv = take("ring_dkv", kv);
    for (float*& buffer : s.ring.sent) buffer = take("ring_sent", kv);
    s.ring.received = take("ring_received", kv);
}

// Sums over the rows of the residual stream have a term for each part of the heads or for each segment, whichever are
// more. The ranks of s.group and of the ring divide the terms.
void place_vectors(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    TensorParallelGroup& group = s.group;
    group.row_terms = group.parts;
    if (options.context.has_terms())
        group.row_terms =
            std::max({1, group.parts / options.context.size, options.context.segments / options.tensor_parallel.size});
    if (const auto terms = size_t(std::max(group.parts, group.row_terms)); terms > 1)
        group.vectors = arena.take<float>(
            "terms", "vectors", 2 * terms * size_t(std::max(options.shape.n_embd, options.shape.head_size())));
}

// Allocates the inputs of the micro-steps in flight on any part of the layers.
void place_inputs(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    const BatchSizes part = options.part();
    const size_t tokens = part.rows();
    const bool drops = options.training && options.dropout > 0;
    if (drops) s.host_dropout_keys.resize(size_t(part.batch) * size_t(options.max_parts));
    if (options.document_mask) s.host_first_key.resize(size_t(options.batch) * size_t(options.seq_len));
    if (options.context.is_divided()) s.host_part.resize(tokens);
    s.inputs.resize(size_t(s.in_flight[0]));
    const size_t count = s.inputs.size();
    int* const ids = arena.take<int>("control", "tokens", count * tokens);
    int* const targets = arena.take<int>("control", "targets", count * tokens);
    int* const first_key = options.document_mask ? arena.take<int>("control", "first_key", count * tokens) : nullptr;
    uint64_t* const keys =
        drops ? arena.take<uint64_t>("control", "dropout_keys", count * s.host_dropout_keys.size()) : nullptr;
    for (size_t i = 0; ids && i < count; i++)
        s.inputs[i] = {.tokens = ids + i * tokens,
                       .targets = targets + i * tokens,
                       .first_key = first_key ? first_key + i * tokens : nullptr,
                       .dropout_keys = keys ? keys + i * s.host_dropout_keys.size() : nullptr};
}

void place_channel(StageChannel& channel, const GptOptions& options, const char* name, bool receives, bool sends,
                   Arena& arena) {
    const size_t count = residual_elements(options);
    if (receives) channel.received = arena.take("pipeline", format("received_%s", name), count, options.precision);
    for (int i = 0; sends && i < kBuffers; i++)
        channel.sent[i] = arena.take("pipeline", format("sent_%s_%d", name, i), count, options.precision);
}

// The buffers of messages between stages. With several parts on each rank, the first and the last have neighbors, too.
void place_channels(GptState& s, Arena& arena) {
    const GptOptions& options = s.options;
    const PipelineParallel& pipeline = options.pipeline;
    const bool has_previous = !pipeline.is_first() || pipeline.chunks > 1;
    const bool has_next = !pipeline.is_last() || pipeline.chunks > 1;
    if (pipeline.size == 1) return;
    place_channel(s.activations, options, "activations", has_previous, has_next, arena);
    if (options.training) place_channel(s.gradients, options, "gradients", has_next, has_previous, arena);
}

void place_optimizers(GptState& s, Arena& arena) {
    s.update = lay_out_update(s.options, s.layout);
    for (RuleState& rule : s.update.rules)
        for (const StateSlot& slot : optimizer_row(rule.rule).slots)
            rule.slots.push_back(arena.take("optimizer state", slot.name + " of " + name_of(rule.rule), rule.elements,
                                            s.options.optimizer.state_type(), s.options.offload_optimizer));
    if (s.options.averages)
        s.average = arena.take<float>("weight average", "average", owned_elements(s), s.options.offload_optimizer);
    place_offload(s, arena);
    place_matrices(s, arena);
    s.update_scalars = arena.take<ops::UpdateScalars>("control", "update_scalars", s.update.groups.size());
}

}  // namespace

TensorPart summed_part(const GptState& s, const Tensor& tensor) {
    if (tensor.row->division != Division::summed) return {0, 0, 0};
    if (s.options.deterministic_reduce) return {0, tensor.count, tensor.begin};
    return owned_part(s.options, s.layout, tensor);
}

void point_gradients(GptState& s, size_t level) {
    float* const flat = s.levels[level];
    for (const Tensor& tensor : s.layout.tensors)
        parameter_of(s.weights, tensor).grad = flat ? flat + tensor.begin : nullptr;
    if (s.head_levels.empty()) return;
    s.weights.head.weight = s.weights.wte.weight;
    s.weights.head.weight.grad = s.head_levels[level];
}

GptState place_state(const GptOptions& options, TensorLayout layout, Arena& arena) {
    GptState s;
    s.options = options;
    s.step.micro_steps = options.micro_steps, s.step.seq_len = options.seq_len;
    s.layout = std::move(layout);
    s.layers = own_layers(options);
    s.in_flight = micro_steps_in_flight(options);
    s.deferred = micro_steps_deferred(options);
    s.micro_steps_done.assign(s.layers.size(), 0);
    s.weights_done = s.micro_steps_done;
    place_parameters(s, arena);
    if (options.training) {
        place_gradients(s, arena);
        place_optimizers(s, arena);
        const size_t n_chunks = chunk_count(s.layout);
        const size_t n_own_chunks = owned_chunk_count(s.layout, options.rank);
        s.grid = arena.take<ops::Chunk>("control", "grid", n_chunks);
        s.own_chunks = arena.take<ops::Chunk>("control", "own_chunks", n_own_chunks);
        s.update_chunks = arena.take<ops::Chunk>(
            "control", "update_chunks",
            max_update_chunks(s.layout, s.update, options.is_sharded() ? n_own_chunks : n_chunks));
        if (s.update.has_layers()) {
            const size_t layers = s.layout.tensors.size() * kMaxStacked;
            s.trust.n_sums = s.layout.first_chunks.back() * size_t(options.tensor_parallel.size) * kMaxStacked;
            s.trust.layers = arena.take<ops::Layer>("control", "layers", layers);
            s.trust.sums = arena.take<double>("control", "trust_sums", 2 * s.trust.n_sums);
            s.trust.ratios = arena.take<float>("control", "trust_ratios", layers);
            place_factors(s, arena);
        }
        s.grad_norm = arena.take<ops::GradNorm>("control", "grad_norm", 1);
        s.scratch = arena.take<std::byte>("scratch", "scratch", scratch_bytes(options));
    }
    s.acts = place_activations(options, arena);
    place_group(s, arena);
    place_ring(s, arena);
    place_vectors(s, arena);
    s.fp8 = place_fp8(options, s.layout.shape, arena);

    place_inputs(s, arena);
    place_channels(s, arena);

    if (const int rotary = options.shape.rotary())
        s.rope_table = arena.take<float>("control", "rope_table", size_t(options.seq_len) * size_t(rotary));
    if (options.cached_sequences > 0) {
        // Others fill up the rows of decode() that ranks divide.
        const int others = options.tensor_parallel.size - 1;
        const size_t layers = size_t(options.shape.n_layer), sequences = size_t(options.cached_sequences + others);
        s.cache = {.memory = {},
                   .scratch = nullptr,
                   .sequences = int(sequences),
                   .capacity = options.seq_len,
                   .channels = s.layout.shape.kv_channels()};
        s.cache.memory = arena.take("KV cache", "kv_cache", layers * s.cache.layer_elements(), options.precision);
        s.cached.resize(sequences);
        s.cache.scratch = arena.take<std::byte>("scratch", "decode_scratch", decode_scratch_bytes(s));
        s.places = arena.take<ops::AttentionDecode::Place>("control", "places", sequences);
        s.positions = arena.take<int>("control", "positions", sequences);
    }
    s.loss_sum = arena.take<double>("control", "loss_sum", 1);
    s.sums = arena.take<double>("control", "sums", step_sums(s).count());
    if (s.sums) s.fp8.saturated = s.sums + step_sums(s).saturated();
    s.loss_scale = arena.take<float>("control", "loss_scale", 1);
    return s;
}

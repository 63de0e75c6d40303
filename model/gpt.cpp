#include "model/gpt.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/dropout.h"
#include "kernels/base/rounding.h"
#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/op_work.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "kernels/trace.h"
#include "model/activations.h"
#include "model/arena.h"
#include "model/block.h"
#include "model/initialize.h"
#include "model/layers.h"
#include "model/measurements.h"
#include "model/named_state.h"
#include "model/options.h"
#include "model/plan.h"
#include "model/shape.h"
#include "model/sharding.h"
#include "model/state.h"
#include "model/tensors.h"

namespace {

void check_options(const GptOptions& o) {
    const GptShape& s = o.shape;
    require(s.n_layer > 0 && s.n_head > 0 && s.kv_heads() > 0 && s.n_embd > 0 && s.n_positions > 0 && s.vocab_size > 0,
            "model: every size must be positive");
    const std::string problem = s.problem();
    require(problem.empty(), "%s", problem.c_str());
    require(0 <= o.dropout && o.dropout <= ops::kMaxDropout, "model: dropout %g must be in [0, %g]", o.dropout,
            ops::kMaxDropout);
    require(o.cached_sequences >= 0 && o.cached_sequences <= (o.training ? 0 : o.batch * o.seq_len),
            "model: %d cached sequences, limit: the tokens of a batch, 0 in training", o.cached_sequences);
    require(o.batch > 0 && o.head_rows > 0, "model: batch %d and head_rows %d must be positive", o.batch, o.head_rows);
    require(o.micro_steps > 0 && 0 <= o.rank && o.rank < o.ranks && 0 <= o.zero_stage && o.zero_stage <= 3,
            "model: %d micro-steps, rank %d of %d, ZeRO stage %d", o.micro_steps, o.rank, o.ranks, o.zero_stage);
    require(o.optimizer.master_type() == Dtype::fp32 || o.computes_with_masters(),
            "model: master weights in %s, precision %s", name_of(o.optimizer.master_type()), name_of(o.precision));
    require(o.seq_len > 0 && o.seq_len <= s.n_positions, "model: seq_len %d must be in [1, n_positions = %d]",
            o.seq_len, s.n_positions);
    const std::string parts_problem = tensor_parallel_problem(o);
    require(parts_problem.empty(), "%s", parts_problem.c_str());
}

}  // namespace

std::vector<MemoryRegion> plan_memory(const GptOptions& options) {
    check_options(options);
    Arena arena;
    place_state(options, arena);
    return arena.regions();
}

Gpt::Gpt(const GptOptions& options, const GridComm& comm) {
    check_options(options);
    Arena dry;
    place_state(options, dry);
    for (const auto& [rank, ranks, group] : {std::tuple(options.rank, options.ranks, comm.data),
                                             {options.tensor_parallel.rank, options.tensor_parallel.size, comm.tensor}})
        require(rank == group.rank && ranks == group.size,
                "model: options have rank %d of %d, the communicator rank %d of %d", rank, ranks, group.rank,
                group.size);
    check_fits(options);
    DeviceBuffer memory(dry.bytes());
    Arena arena(static_cast<std::byte*>(memory.data()));
    state_ = std::make_unique<GptState>(place_state(options, arena));
    GptState& s = *state_;
    s.memory = std::move(memory);
    s.world = comm.world, s.comm = comm.data, s.group.comm = comm.tensor;
    s.host_sums.resize(step_sums(s).count());
    s.host_update_scalars.reserve(s.update.groups.size());
    if (options.training) {
        const std::vector<ops::Chunk> grid = chunk_grid(s.layout);
        const std::vector<ops::Chunk> own = owned_chunks(s.layout, grid, options.rank, !options.is_sharded());
        s.host_all_chunks = with_other_parts(s.layout, grid);
        s.host_own_chunks = counted_once(s.layout, own);
        copy_to_device(s.all_chunks, s.host_all_chunks.data(), s.n_all_chunks * sizeof(ops::Chunk), s.stream);
        copy_to_device(s.own_chunks, s.host_own_chunks.data(), s.host_own_chunks.size() * sizeof(ops::Chunk), s.stream);
        s.host_update_chunks = update_chunks(options, s.layout, s.update, options.is_sharded() ? own : grid);
        copy_to_device(s.update_chunks, s.host_update_chunks.data(), s.host_update_chunks.size() * sizeof(ops::Chunk),
                       s.stream);
        load_matrices(s);
        if (s.update.has_layers()) {
            std::vector<ops::Layer>& layers = s.trust.host_layers;
            layers = update_layers(s.layout, s.update, s.host_all_chunks);
            load_factors(s);
            copy_to_device(s.trust.layers, layers.data(), layers.size() * sizeof(ops::Layer), s.stream);
        }
    }
    if (s.rope_table) {
        const std::vector<float> table = rope_table(options.shape, options.seq_len);
        copy_to_device(s.rope_table, table.data(), table.size() * sizeof(float), s.stream);
    }
    copy_to_device(s.loss_scale, &s.host_loss_scale, sizeof(float), s.stream);
    synchronize(s.stream);
}

Gpt::Gpt(Gpt&&) noexcept = default;
Gpt::~Gpt() {
    if (!state_) return;
    for (const Comm& comm : {state_->world, state_->comm, state_->group.comm}) drain(comm);
}

const GptOptions& Gpt::options() const { return state_->options; }
const TensorLayout& Gpt::layout() const { return state_->layout; }

void Gpt::initialize(uint64_t seed) {
    GptState& s = *state_;
    float* const values = s.master.dtype == Dtype::fp32 ? s.master.as<float>() : s.own_grad;
    require(values, "initialize: masters in %s need the gradients' memory", name_of(s.master.dtype));
    initialize_tensors(s, seed, values);
    if (values != s.master.data) ops::cast({.out = s.master, .inp = values, .count = owned_elements(s)}, s.stream);
    masters_changed();
}

void Gpt::begin_step(const StepSettings& settings) {
    GptState& s = *state_;
    s.host_loss_scale = settings.loss_scale;
    copy_to_device(s.loss_scale, &s.host_loss_scale, sizeof(float), s.stream);
    std::vector<ops::UpdateScalars>& scalars = s.host_update_scalars;
    scalars.clear();
    for (const UpdateGroup& group : s.update.groups) {
        const bool is_own = group.schedule >= 0 && !settings.group_rates.empty();
        const double rate = is_own ? settings.group_rates[size_t(group.schedule)] : settings.learning_rate;
        scalars.push_back(update_scalars(s.options.optimizer, group, rate, settings.update));
        scalars.back().rounding_key = ops::rounding_key(s.options.seed, uint64_t(settings.update));
    }
    copy_to_device(s.update_scalars, scalars.data(), scalars.size() * sizeof(ops::UpdateScalars), s.stream);
    const int most = s.options.micro_steps;
    s.micro_steps = settings.micro_steps > 0 ? settings.micro_steps : most;
    require(s.micro_steps <= most, "begin_step: %d micro-steps, at most %d", s.micro_steps, most);
    s.seq_len = settings.seq_len > 0 ? settings.seq_len : s.options.seq_len;
    require(s.options.seq_len % s.seq_len == 0 && s.options.seq_len / s.seq_len <= s.options.max_parts,
            "begin_step: sequences of %d tokens must be %d tokens split into at most %d parts", s.seq_len,
            s.options.seq_len, s.options.max_parts);
    s.average_weight = settings.average_weight;
    s.update_number = settings.update;
    s.micro_steps_done = 0;
    s.measure = settings.measure;
    s.measure_first = settings.measure_first;
    s.first_norm_squared = 0;
    s.first_sample = settings.first_sample;
    s.drops = s.options.dropout > 0;
    if (s.world.size == 1) return;
    std::fill(s.host_sums.begin(), s.host_sums.end(), 0.0);
    copy_to_device(s.sums, s.host_sums.data(), s.host_sums.size() * sizeof(double), s.stream);
}

namespace {

// Finds the start of each token's document: the last document_token so far in its sequence.
void load_documents(GptState& s, PassSizes sizes, const int* tokens) {
    if (!s.first_key) return;
    for (int row = 0, first = 0; row < int(sizes.rows()); row++) {
        const int position = row % sizes.seq_len;
        if (position == 0 || tokens[row] == s.options.document_token) first = position;
        s.host_first_key[size_t(row)] = first;
    }
    copy_to_device(s.first_key, s.host_first_key.data(), sizes.rows() * sizeof(int), s.stream);
}

// Returns the masks of the next micro-step, if forward() drops. They depend on the number of each sample in the run.
// The keys are in device memory, so the same launches serve every step.
ops::DropoutMask next_dropout(GptState& s) {
    if (!s.drops) return {};
    const size_t micro_step = size_t(s.options.rank) * size_t(s.micro_steps) + size_t(s.micro_steps_done);
    std::vector<uint64_t>& keys = s.host_dropout_keys;
    const size_t batch = size_t(s.options.batch), parts = size_t(s.options.seq_len / s.seq_len);
    for (size_t row = 0; row < batch * parts; row++)
        keys[row] = ops::dropout_key(s.options.seed,
                                     s.first_sample + micro_step * batch + row / parts + (uint64_t(row % parts) << 48));
    copy_to_device(s.dropout_keys, keys.data(), keys.size() * sizeof(uint64_t), s.stream);
    return {.keys = s.dropout_keys, .threshold = ops::dropout_threshold(s.options.dropout)};
}

// Returns the input of a block: the output of the previous block, or the embedding without a branch. The final norm
// follows the last block.
ResidualSum block_input(const GptState& s, size_t layer) {
    if (layer == 0) return {.residual = s.acts.block[0].residual, .branch = nullptr};
    const BlockActivations& before = s.acts.block[layer - 1];
    return {.residual = before.residual_mid, .branch = before.mlp.out};
}

}  // namespace

void load_tokens(GptState& s, PassSizes sizes, const int* tokens) {
    copy_to_device(s.tokens, tokens, sizes.rows() * sizeof(int), s.stream);
    load_documents(s, sizes, tokens);
}

void loss_forward_backward(GptState& s, const LayerContext& x, const int* targets, int index, float grad_scale,
                           View dinp) {
    copy_to_device(s.targets, targets, size_t(x.rows) * sizeof(int), s.stream);
    wait_params(s, s.layout.bucket_of_head());
    head_forward_backward(x, head_weights(s), s.acts.norm_f.out, s.options.head_rows,
                          {.logits = s.acts.logits.view,
                           .loss = s.acts.loss.view.as<float>(),
                           .targets = s.targets,
                           .loss_scale = s.loss_scale,
                           .grad_scale = grad_scale,
                           .z_loss = s.options.z_loss,
                           .dinp = dinp});
    run(s.stream, ops::loss_sum,
        {.out = s.sums + step_sums(s).loss(s.options.rank, index),
         .loss = s.acts.loss.view.as<float>(),
         .rows = x.rows,
         .accumulate = false});
}

void forward_pass(GptState& s, const LayerContext& x) {
    const bool is_measured = s.measure && s.micro_steps_done + 1 == s.micro_steps;
    wait_params(s, 0);
    const Activation& input = s.acts.block[0].residual;
    const bool is_normed = s.options.shape.embedding_norm;
    embedding_forward(x, s.weights.wte, s.weights.wpe, s.tokens, is_normed ? s.acts.embedding : input);
    if (is_normed) {
        NormActivations norm = s.acts.norm_e;
        norm.out = input;
        residual_norm_forward(x, s.weights.norm_e, {.residual = s.acts.embedding, .branch = nullptr}, s.acts.embedding,
                              norm);
    }
    dropout_forward(x, DropoutSite::embedding, input);
    for (size_t layer = 0; layer < s.acts.block.size(); layer++) {
        const int bucket = s.layout.bucket_of_layer(int(layer));
        wait_params(s, bucket);
        prefetch_params(s, bucket + 1);
        const BlockActivations& block = s.acts.block[layer];
        block_forward(x.of_block(layer), s.weights.block[layer], block_input(s, layer), block);
        if (is_measured) measure_residual(s, block.norm1), measure_residual(s, block.norm2);
    }
    residual_norm_forward(x, s.weights.norm_f, block_input(s, s.acts.block.size()), s.acts.residual_f, s.acts.norm_f);
    if (is_measured) measure_residual(s, s.acts.norm_f);
}

void Gpt::trace(Trace* trace, int step) {
    GptState& s = *state_;
    if (trace) trace->begin_step(step, s.stream);
    s.stream.trace = trace;
    for (const Comm& comm : {s.world, s.comm, s.group.comm}) observe(comm, trace);
}

void Gpt::forward(const int* tokens) {
    GptState& s = *state_;
    const HostSpan span(s.stream.trace, "forward");
    s.dropout = next_dropout(s);
    s.residual_rms.clear();
    load_tokens(s, step_sizes(s), tokens);
    forward_pass(s, layer_context(s, step_sizes(s), false));
}

void Gpt::backward(const int* targets, float grad_scale) {
    GptState& s = *state_;
    const HostSpan span(s.stream.trace, "backward");
    const MicroStep micro = begin_micro_step(s);
    const LayerContext x = layer_context(s, step_sizes(s), micro.accumulate);
    LayerContext again = x;
    again.is_recomputing = true;
    const View dresidual = s.acts.dresidual.view, dbranch = s.acts.dbranch.view;

    const int head = s.layout.bucket_of_head();
    begin_grads(s, 0);
    if (head > 0) begin_grads(s, head);
    loss_forward_backward(s, x, targets, micro.index, grad_scale, dbranch);
    if (head > 0) end_grads(s, head, micro);
    residual_norm_backward(x, s.weights.norm_f, s.acts.residual_f, s.acts.norm_f, dbranch, dresidual, false);
    for (size_t layer = s.acts.block.size(); layer-- > 0;) {
        const int index = s.layout.bucket_of_layer(int(layer));
        const Bucket& bucket = s.layout.buckets[size_t(index)];
        wait_params(s, index);
        prefetch_params(s, index - 1);
        if (int(layer) + 1 == bucket.first_layer + bucket.n_layers) begin_grads(s, index);
        block_forward(again.of_block(layer), s.weights.block[layer], block_input(s, layer), s.acts.block[layer]);
        block_backward(x.of_block(layer), s.weights.block[layer], s.acts.block[layer],
                       {dresidual, dbranch, s.acts.dwide.view});
        if (int(layer) == bucket.first_layer) end_grads(s, index, micro);
    }
    dropout_backward(x, DropoutSite::embedding, dresidual, dresidual);
    if (s.options.shape.embedding_norm) {
        residual_norm_backward(x, s.weights.norm_e, s.acts.embedding, s.acts.norm_e, dresidual, dbranch, false);
        embedding_backward(x, s.weights.wte, s.weights.wpe, s.tokens, dbranch);
    } else {
        embedding_backward(x, s.weights.wte, s.weights.wpe, s.tokens, dresidual);
    }
    end_grads(s, 0, micro);
    end_micro_step(s);
    if (s.measure_first && micro.index == 0) s.first_norm_squared = gradients_squared(s);
}

double Gpt::first_norm_squared() const { return state_->first_norm_squared; }

StepResult Gpt::end_step(std::span<const double> votes) {
    GptState& s = *state_;
    require(int(votes.size()) <= s.options.votes, "end_step: %zu votes, options.votes is %d", votes.size(),
            s.options.votes);
    const HostSpan span(s.stream.trace, "update");
    const StepSums places = step_sums(s);
    std::vector<double>& sums = s.host_sums;
    if (!votes.empty()) copy_to_device(s.sums + places.first_vote(), votes.data(), votes.size_bytes(), s.stream);
    s.drops = false;
    finish_grads(s);
    update(s);
    gather_params(s);
    ops::GradNorm norm;
    copy_to_host(&norm, s.grad_norm, sizeof(norm), s.stream);
    const size_t first = places.loss(0, 0);  // only the device needs the entries before
    copy_to_host(&sums[first], s.sums + first, (sums.size() - first) * sizeof(double), s.stream);
    synchronize(s.stream);

    StepResult result{};
    for (size_t i = 0; i < places.losses; i++) result.loss_sum += sums[first + i];
    result.votes.assign(&sums[places.first_vote()], &sums[places.first_vote()] + votes.size());
    result.grad_norm = norm.norm;
    result.update_ms = s.update_time.take_ms();
    if (s.measure) {
        result.tensor_norms = tensor_norms(s);
        result.residual_rms = std::exchange(s.residual_rms, {});
        s.measure = false;
    }
    if (norm.non_finite_tensor >= 0) result.non_finite_tensor = s.layout.tensors[size_t(norm.non_finite_tensor)].name;
    return result;
}

void Gpt::sum_over_ranks(std::span<double> values) { sum_over(*state_, state_->comm, values); }

void sum_over(GptState& s, const Comm& comm, std::span<double> values) {
    const size_t most = step_sums(s).count();
    for (; comm.size > 1 && !values.empty(); values = values.subspan(std::min(most, values.size()))) {
        const std::span<double> some = values.first(std::min(most, values.size()));
        copy_to_device(s.sums, some.data(), some.size_bytes(), s.stream);
        wait(all_reduce_sum(s.sums, some.size(), comm, s.stream), comm, s.stream);
        copy_to_host(some.data(), s.sums, some.size_bytes(), s.stream);
        synchronize(s.stream);
    }
}

std::vector<NamedTensor> Gpt::master_tensors() const { return name_tensors(*state_, "master", state_->master); }

std::vector<NamedTensor> Gpt::gradient_tensors() const { return name_tensors(*state_, "grad", state_->own_grad); }

// Appends the state of whole matrices.
static std::vector<NamedTensor> with_matrix_state(const GptState& s, std::vector<NamedTensor> named) {
    std::ranges::move(name_matrix_state(s), std::back_inserter(named));
    return named;
}

std::vector<NamedTensor> Gpt::state_tensors() const { return with_matrix_state(*state_, name_state(*state_, false)); }

std::vector<NamedTensor> Gpt::saved_tensors() const {
    std::vector<NamedTensor> tensors = with_matrix_state(*state_, name_state(*state_, true));
    std::ranges::stable_partition(tensors, [](const NamedTensor& tensor) { return size_of(tensor.values.dtype) == 4; });
    return tensors;
}

std::vector<NamedTensor> Gpt::replicated_tensors() const {
    const GptState& s = *state_;
    if (!s.options.is_sharded()) return name_state(s, false);
    std::vector<NamedTensor> tensors = name_factors(s, false);
    for (const Tensor& tensor : s.layout.tensors)
        if (s.options.keeps_whole_parameters())
            tensors.push_back({.name = "param." + tensor.name,
                               .shape = {tensor.count},
                               .values = s.param.from(tensor.begin),
                               .count = tensor.count,
                               .boxes = boxes_of(s.layout, tensor)});
    return tensors;
}

void Gpt::masters_changed() {
    GptState& s = *state_;
    if (!s.options.computes_with_masters())
        ops::cast({.out = s.own_param, .inp = s.master, .count = owned_elements(s)}, s.stream);
    gather_params(s);
    synchronize(s.stream);
}

void Gpt::use_average() {
    GptState& s = *state_;
    require(s.average, "use_average: the model keeps no average");
    ops::cast({.out = s.own_grad, .inp = s.master, .count = owned_elements(s)}, s.stream);
    ops::cast({.out = s.master, .inp = s.average, .count = owned_elements(s)}, s.stream);
    masters_changed();
}

void Gpt::restore_masters() {
    GptState& s = *state_;
    ops::cast({.out = s.master, .inp = s.own_grad, .count = owned_elements(s)}, s.stream);
    masters_changed();
}

#include "model/gpt.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/dropout.h"
#include "kernels/base/rounding.h"
#include "kernels/device.h"
#include "kernels/numeric.h"
#include "kernels/op_work.h"
#include "kernels/trace.h"
#include "model/activations.h"
#include "model/initialize.h"
#include "model/measurements.h"
#include "model/named_state.h"
#include "model/offload.h"
#include "model/plan.h"
#include "model/shape.h"
#include "model/sharding.h"
#include "model/stage.h"
#include "model/state.h"

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
    require(o.context.divides(o.seq_len) && o.ranks % o.context.size == 0 && o.rank % o.context.size == o.context.rank,
            "model: seq_len %d, rank %d of %d, context %d of %d", o.seq_len, o.rank, o.ranks, o.context.rank,
            o.context.size);
    require(!(o.offload_weights || o.offload_gradients) ||
                (o.offload_optimizer && o.ranks * o.tensor_parallel.size * o.pipeline.size == 1),
            "model: weights or gradients in host memory on %d ranks, offload_optimizer %d", o.ranks,
            int(o.offload_optimizer));
    require(!o.offload_gradients || !o.deterministic_reduce,
            "model: gradients in host memory with deterministic_reduce");
    const std::string parts_problem = tensor_parallel_problem(o);
    require(parts_problem.empty(), "%s", parts_problem.c_str());
}

// Copies chunks to the device. There a tensor has its number in the model, which keys RoundingBits.
void copy_chunks(const GptState& s, ops::Chunk* to, std::vector<ops::Chunk> chunks) {
    for (ops::Chunk& chunk : chunks) chunk.tensor = s.layout.tensors[size_t(chunk.tensor)].number;
    copy_to_device(to, chunks.data(), chunks.size() * sizeof(ops::Chunk), s.stream);
}

}  // namespace

static std::vector<MemoryRegion> regions_of(const GptOptions& options, TensorLayout layout) {
    Arena arena;
    place_state(options, std::move(layout), arena);
    return arena.regions();
}

std::vector<MemoryRegion> plan_memory(const GptOptions& options) {
    check_options(options);
    return regions_of(options, lay_out_rank(options));
}

std::vector<std::vector<MemoryRegion>> plan_memory_of_stages(GptOptions options) {
    check_options(options);
    std::vector<TensorLayout> layouts = lay_out_stages(options);
    std::vector<std::vector<MemoryRegion>> stages;
    for (int& stage = options.pipeline.rank = 0; stage < options.pipeline.size; stage++)
        stages.push_back(regions_of(options, std::move(layouts[size_t(stage)])));
    return stages;
}

Gpt::Gpt(const GptOptions& options, const GridComm& comm) {
    check_options(options);
    const int sharers = options.shape.part(options.tensor_parallel.size).kv_head_parts;
    for (const auto& [rank, ranks, group] : {std::tuple(options.rank, options.ranks, comm.data),
                                             {options.context.rank, options.context.size, comm.context},
                                             {options.tensor_parallel.rank, options.tensor_parallel.size, comm.tensor},
                                             {options.tensor_parallel.rank % sharers, sharers, comm.kv_head},
                                             {options.pipeline.rank, options.pipeline.size, comm.pipeline}})
        require(rank == group.rank && ranks == group.size,
                "model: options have rank %d of %d, the communicator rank %d of %d", rank, ranks, group.rank,
                group.size);
    check_fits(options);
    DeviceBuffer memory(planned_bytes(options));
    HostBuffer host_memory(planned_host_bytes(options));
    Arena arena(static_cast<std::byte*>(memory.data()), static_cast<std::byte*>(host_memory.data()));
    state_ = std::make_unique<GptState>(place_state(options, lay_out_rank(options), arena));
    GptState& s = *state_;
    s.memory = std::move(memory), s.offload.memory = std::move(host_memory);
    open_offload(s);
    s.comms = comm, s.group.comm = comm.tensor, s.group.kv_head = comm.kv_head, s.ring.comm = comm.context;
    s.activations.from = comm.neighbors.from_previous, s.activations.to = comm.neighbors.to_next;
    s.gradients.from = comm.neighbors.from_next, s.gradients.to = comm.neighbors.to_previous;
    s.host_sums.resize(step_sums(s).count());
    s.host_update_scalars.reserve(s.update.groups.size());
    if (options.training) {
        const std::vector<ops::Chunk> grid = chunk_grid(s.layout);
        const std::vector<ops::Chunk> own = owned_chunks(s.layout, grid, options.rank, !options.is_sharded());
        s.host_own_chunks = counted_once(s.layout, own);
        copy_chunks(s, s.grid, grid);
        copy_chunks(s, s.own_chunks, s.host_own_chunks);
        s.host_update_chunks = update_chunks(options, s.layout, s.update, options.is_sharded() ? own : grid);
        copy_chunks(s, s.update_chunks, s.host_update_chunks);
        load_matrices(s);
        if (s.update.has_layers()) {
            std::vector<ops::Layer>& layers = s.trust.host_layers;
            layers = update_layers(s.layout, s.update, grid);
            load_factors(s);
            copy_to_device(s.trust.layers, layers.data(), layers.size() * sizeof(ops::Layer), s.stream);
        }
    }
    if (s.rope_table) {
        const std::vector<float> table = rope_table(options.shape, options.seq_len);
        copy_to_device(s.rope_table, table.data(), table.size() * sizeof(float), s.stream);
    }
    copy_to_device(s.loss_scale, &s.step.loss_scale, sizeof(float), s.stream);
    synchronize(s.stream);
}

Gpt::Gpt(Gpt&&) noexcept = default;
Gpt::~Gpt() {
    if (!state_) return;
    for (const Comm& comm : state_->comms.distinct()) drain(comm);
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

// Plans this step's passes, if their number differs from the last step's.
static void plan_passes(GptState& s) {
    s.next_pass = 0;
    const size_t kinds = s.options.pipeline.defers_weights() ? 3 : 2;
    if (s.passes.size() == kinds * s.layers.size() * size_t(s.step.micro_steps)) return;
    s.passes = passes_of(s.options, s.step.micro_steps);
    for (size_t chunk = 0; chunk < s.in_flight.size(); chunk++)
        require(most_in_flight(s.passes, int(chunk)) <= s.in_flight[chunk] && most_deferred(s.passes) <= s.deferred,
                "begin_step: %d micro-steps need more memory", s.step.micro_steps);
}

void Gpt::begin_step(const StepSettings& settings) {
    GptState& s = *state_;
    s.step = settings;
    s.offload.traffic = {};
    copy_to_device(s.loss_scale, &s.step.loss_scale, sizeof(float), s.stream);
    std::vector<ops::UpdateScalars>& scalars = s.host_update_scalars;
    scalars.clear();
    for (const UpdateGroup& group : s.update.groups) {
        const bool is_own = group.schedule >= 0 && !settings.group_rates.empty();
        const double rate = is_own ? settings.group_rates[size_t(group.schedule)] : settings.learning_rate;
        scalars.push_back(update_scalars(s.options.optimizer, group, rate, settings.update));
        scalars.back().rounding_key = ops::rounding_key(s.options.seed, uint64_t(settings.update));
    }
    copy_to_device(s.update_scalars, scalars.data(), scalars.size() * sizeof(ops::UpdateScalars), s.stream);
    int &micro_steps = s.step.micro_steps, &seq_len = s.step.seq_len;
    if (micro_steps <= 0) micro_steps = s.options.micro_steps;
    require(micro_steps <= s.options.micro_steps, "begin_step: %d micro-steps, at most %d", micro_steps,
            s.options.micro_steps);
    if (seq_len <= 0) seq_len = s.options.seq_len;
    require(s.options.seq_len % seq_len == 0 && s.options.seq_len / seq_len <= s.options.max_parts &&
                s.options.context.divides(seq_len),
            "begin_step: sequences of %d tokens must be %d tokens split into at most %d parts, for %d ranks", seq_len,
            s.options.seq_len, s.options.max_parts, s.options.context.size);
    plan_passes(s);
    const std::pair sizes(seq_len, settings.grad_scale);
    if (std::exchange(s.recorded_sizes, sizes) != sizes) s.recordings.clear();  // a ramp does not return to them
    s.micro_steps_loaded = 0;
    for (std::vector<int>* done : {&s.micro_steps_done, &s.weights_done}) std::ranges::fill(*done, 0);
    s.residual_rms.clear();
    s.first_norm_squared = 0;
    s.drops = s.options.dropout > 0;
    clear(s.sums, step_sums(s).count(), s.stream);
}

// Returns the masks of a micro-step's input, which depend on the number of each sample in the run. The keys are in
// device memory, so the same launches serve every step.
static ops::DropoutMask dropout_of(GptState& s, int micro_step, uint64_t* device_keys) {
    if (!s.drops) return {};
    const size_t number = size_t(s.options.sample_rank()) * size_t(s.step.micro_steps) + size_t(micro_step);
    std::vector<uint64_t>& keys = s.host_dropout_keys;
    const size_t batch = size_t(s.options.batch), parts = size_t(s.options.seq_len / s.step.seq_len);
    for (size_t i = 0; i < keys.size(); i++) {
        const size_t row = i % (batch * parts);  // a rank may have two chunks of a sequence
        keys[i] = ops::dropout_key(s.options.seed,
                                   s.step.first_sample + number * batch + row / parts + (uint64_t(row % parts) << 48));
    }
    copy_to_device(device_keys, keys.data(), keys.size() * sizeof(uint64_t), s.stream);
    return {.keys = device_keys, .threshold = ops::dropout_threshold(s.options.dropout)};
}

void Gpt::trace(Trace* trace, int step) {
    GptState& s = *state_;
    if (trace) trace->begin_step(step, s.stream);
    s.stream.trace = trace;
    for (const Comm& comm : s.comms.distinct()) observe(comm, trace);
}

const std::vector<Pass>& Gpt::passes() const { return state_->passes; }

void Gpt::load(const int* tokens, const int* targets) {
    GptState& s = *state_;
    const int micro_step = s.micro_steps_loaded++;
    MicroStepInput& input = s.inputs[size_t(micro_step) % s.inputs.size()];
    load_input(s, input, step_sizes(s), tokens);
    if (targets) load_targets(s, input, step_sizes(s), targets);
    input.dropout = dropout_of(s, micro_step, input.dropout_keys);
}

// Queues the work of a pass.
static void queue_pass(GptState& s, const Pass& pass, const Pass* next, bool is_measured) {
    StagePass place = stage_pass(s, layer_context(s, step_sizes(s)), pass.chunk, pass.micro_step);
    place.x.dropout = place.input.dropout;
    place.is_training = true;
    if (s.options.fp8) place.x.fp8 = &s.fp8;
    switch (pass.kind) {
        case Pass::forward: return forward_part(s, place, next, is_measured);
        case Pass::backward: return backward_part(s, place, next);
        case Pass::weights: return weights_part(s, place, next);
    }
}

// Whether the pass is only work on the device: without collectives, a host that reads results, copies from or to host
// memory, or a trace. Collectives start in the step's last micro-step, and the first micro-step waits for the
// parameters of the last update.
static bool is_recordable(const GptState& s, const Pass& pass) {
    const GptOptions& o = s.options;
    const bool is_between = 0 < pass.micro_step && pass.micro_step + 1 < s.step.micro_steps;
    return !s.stream.trace && !o.offload_activations && o.pipeline.size == 1 && o.tensor_parallel.size == 1 &&
           o.context.size == 1 && o.keeps_whole_parameters() && o.keeps_whole_gradients() &&
           (o.ranks == 1 || is_between);
}

static void compute_pass(GptState& s, const Pass& pass, const Pass* next) {
    static constexpr const char* kNames[] = {"forward", "backward", "weights"};
    const HostSpan span(s.stream.trace, kNames[pass.kind]);
    const bool is_last = pass.micro_step + 1 == s.step.micro_steps;
    const bool is_measured = pass.kind == Pass::forward && s.step.measure && is_last;
    if (is_measured) s.residual_rms.resize(2 * s.weights.block.size() + 1);
    if (is_measured || !is_recordable(s, pass)) {
        queue_pass(s, pass, next, is_measured);
    } else {
        const PassKey key{.kind = pass.kind,
                          .seq_len = s.step.seq_len,
                          .grad_scale = s.step.grad_scale,
                          .drops = s.drops,
                          .place = pass.kind == Pass::forward ? 0 : gradient_place(s, pass.micro_step)};
        const auto queue = [&] { queue_pass(s, pass, next, false); };
        s.recordings[key].run(s.stream, std::ref(queue));  // a copy would allocate
    }
    if (pass.kind == Pass::forward) return;
    const int index = s.micro_steps_done[size_t(pass.chunk)];
    count_micro_step(s, pass.kind, pass.chunk);
    if (pass.kind != Pass::backward) return;
    if (s.layout.has_output() && pass.chunk + 1 == s.options.pipeline.chunks)
        copy_on_device(s.sums + step_sums(s).loss(s.options.rank, index), s.loss_sum, sizeof(double), s.stream);
    if (s.step.measure_first && pass.micro_step == 0) s.first_norm_squared = gradients_squared(s);
}

void Gpt::compute(const Pass& pass) {
    GptState& s = *state_;
    require(s.next_pass < s.passes.size() && pass == s.passes[s.next_pass], "compute: not the next pass of the step");
    s.next_pass++;
    compute_pass(s, pass, s.next_pass < s.passes.size() ? &s.passes[s.next_pass] : nullptr);
}

void Gpt::forward(const int* tokens) {
    GptState& s = *state_;
    require(s.options.pipeline.size == 1, "forward: this rank has one of %d stages", s.options.pipeline.size);
    s.micro_steps_loaded = s.micro_steps_done[0];
    load(tokens, nullptr);
    compute_pass(s, {Pass::forward, 0, s.micro_steps_done[0]}, nullptr);
}

void Gpt::backward(const int* targets, float grad_scale) {
    GptState& s = *state_;
    s.step.grad_scale = grad_scale;
    load_targets(s, s.inputs[0], step_sizes(s), targets);
    compute_pass(s, {Pass::backward, 0, s.micro_steps_done[0]}, nullptr);
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
    const size_t first = places.saturated();  // only the device needs the entries before
    copy_to_host(&sums[first], s.sums + first, (sums.size() - first) * sizeof(double), s.stream);
    synchronize(s.stream);

    StepResult result{};
    for (size_t i = 0; i < places.losses; i++) result.loss_sum += sums[places.loss(0, 0) + i];
    result.fp8_saturated = sums[places.saturated()];
    result.votes.assign(&sums[places.first_vote()], &sums[places.first_vote()] + votes.size());
    result.grad_norm = norm.norm;
    result.offload = s.offload.traffic;
    result.update_ms = s.update_time.take_ms();
    if (s.step.measure) {
        result.tensor_norms = tensor_norms(s);
        result.residual_rms = std::exchange(s.residual_rms, {});
        sum_over(s, s.comms.pipeline, result.residual_rms);
        s.step.measure = false;
    }
    if (norm.non_finite_tensor >= 0) result.non_finite_tensor = s.layout.names[size_t(norm.non_finite_tensor)];
    return result;
}

void Gpt::sum_over_ranks(std::span<double> values) { sum_over(*state_, state_->comms.data, values); }

void Gpt::take_from_last_stage(std::span<double> values) {
    if (!state_->options.pipeline.is_last()) std::ranges::fill(values, 0.0);
    sum_over(*state_, state_->comms.pipeline, values);
}

std::vector<NamedTensor> Gpt::master_tensors() const { return name_tensors(*state_, "master", state_->master); }

std::vector<NamedTensor> Gpt::gradient_tensors() const { return name_tensors(*state_, "grad", state_->own_grad); }

// Names all state of the model in the order of a rank that has all layers. This rank has no elements of the tensors on
// other stages.
static std::vector<NamedTensor> name_all_state(const GptState& s, bool once) {
    std::vector<NamedTensor> named = name_state(s, once);
    std::ranges::move(name_matrix_state(s), std::back_inserter(named));
    if (s.options.pipeline.size == 1) return named;
    std::map<std::string, NamedTensor> own;
    for (NamedTensor& tensor : named) own.emplace(tensor.name, std::move(tensor));
    GptOptions alone = s.options;
    alone.pipeline = {}, alone.tensor_parallel = {}, alone.context = {};
    alone.rank = 0, alone.ranks = 1;
    Arena dry;
    named = name_all_state(place_state(alone, lay_out_rank(alone), dry), once);
    for (NamedTensor& tensor : named) {
        tensor.count = 0;
        if (const auto found = own.find(tensor.name); found != own.end()) tensor = std::move(found->second);
    }
    return named;
}

std::vector<NamedTensor> Gpt::state_tensors() const { return name_all_state(*state_, false); }

std::vector<NamedTensor> Gpt::saved_tensors() const {
    std::vector<NamedTensor> tensors = name_all_state(*state_, true);
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

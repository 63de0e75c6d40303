#include "model/gpt.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/check.h"
#include "model/plan.h"
#include "model/sharding.h"
#include "model/state.h"

struct Gpt::Impl {
    DeviceBuffer memory;
    std::variant<GptState<float>, GptState<bf16>, GptState<fp16>> state;
    std::vector<std::byte> row;  // one row of logits on the host
    std::vector<double> sums;    // the host's copy of GptState::sums
};

namespace {

using AnyState = std::variant<GptState<float>, GptState<bf16>, GptState<fp16>>;

AnyState place(const GptOptions& options, Arena& arena) {
    switch (options.precision) {
        case Dtype::bf16: return place_state<bf16>(options, arena);
        case Dtype::fp16: return place_state<fp16>(options, arena);
        default: return place_state<float>(options, arena);
    }
}

void check_options(const GptOptions& o) {
    const GptShape& s = o.shape;
    require(s.n_layer > 0 && s.n_head > 0 && s.n_kv_head > 0 && s.n_embd > 0 && s.n_positions > 0 && s.vocab_size > 0,
            "model: every size must be positive");
    require(s.n_embd % s.n_head == 0, "model: n_embd %d must be a multiple of n_head %d", s.n_embd, s.n_head);
    require(s.n_head % s.n_kv_head == 0, "model: n_head %d must be a multiple of n_kv_head %d", s.n_head, s.n_kv_head);
    require(o.batch > 0 && o.head_rows > 0, "model: batch %d and head_rows %d must be positive", o.batch, o.head_rows);
    require(o.micro_steps > 0 && 0 <= o.rank && o.rank < o.ranks && 0 <= o.zero_stage && o.zero_stage <= 3,
            "model: %d micro-steps, rank %d of %d, ZeRO stage %d", o.micro_steps, o.rank, o.ranks, o.zero_stage);
    require(o.seq_len > 0 && o.seq_len <= s.n_positions, "model: seq_len %d must be in [1, n_positions = %d]",
            o.seq_len, s.n_positions);
}

// FNV-1a: gives each tensor numbers of its own, whatever tensors there are beside it.
uint32_t subsequence_of(const std::string& name) {
    uint32_t hash = 2166136261u;
    for (unsigned char c : name) hash = (hash ^ c) * 16777619u;
    return hash;
}

// The rows of the vocabulary's padding stay zero for ever: their logits are never read and their gradients are zero.
size_t initialised_elements(const Tensor& tensor, const GptShape& shape) {
    if (tensor_table<float>()[size_t(tensor.row)].rows != &GptShape::padded_vocab) return tensor.count;
    return size_t(shape.vocab_size) * size_t(tensor.cols);
}

// Where a tensor, or this rank's part of it, lies in the owned arrays.
template <class Act> TensorPart owned_part(const GptState<Act>& s, const Tensor& tensor) {
    if (!s.options.is_sharded()) return {0, tensor.count, tensor.begin};
    return part_of(s.layout, tensor, s.options.rank);
}

template <class Act> void initialize_tensor(GptState<Act>& s, const Tensor& tensor, uint64_t seed) {
    const Init init = tensor_table<float>()[size_t(tensor.row)].init;
    const TensorPart part = owned_part(s, tensor);
    float* out = s.master + part.shard_begin;
    const bool is_normal = init == Init::normal || init == Init::normal_residual;
    ops::fill({.out = out, .count = part.count, .value = init == Init::one ? 1.0f : 0.0f}, s.stream);
    const size_t last = std::min(part.first + part.count, initialised_elements(tensor, s.options.shape));
    if (!is_normal || last <= part.first) return;
    const float shrink = init == Init::normal_residual ? 1.0f / std::sqrt(2.0f * float(s.options.shape.n_layer)) : 1.0f;
    ops::normal_fill({.out = out,
                      .count = last - part.first,
                      .seed = seed,
                      .subsequence = subsequence_of(tensor.name),
                      .deviation = 0.02f * shrink,
                      .first = part.first},
                     s.stream);
}

template <class Act>
std::vector<NamedTensor> name_tensors(const GptState<Act>& s, const std::string& prefix, float* owned) {
    std::vector<NamedTensor> named;
    for (const Tensor& tensor : s.layout.tensors) {
        const TensorPart part = owned_part(s, tensor);
        named.push_back(
            {prefix + tensor.name, logical_shape(tensor), owned + part.shard_begin, part.first, part.count});
    }
    return named;
}

}  // namespace

std::vector<MemoryRegion> plan_memory(const GptOptions& options) {
    check_options(options);
    Arena arena;
    place(options, arena);
    return arena.regions();
}

Gpt::Gpt(const GptOptions& options, const Comm& comm) : impl_(std::make_unique<Impl>()) {
    check_options(options);
    Arena dry;
    place(options, dry);
    require(comm.rank == options.rank && comm.size == options.ranks, "model: rank %d of %d in a world of rank %d of %d",
            options.rank, options.ranks, comm.rank, comm.size);
    check_fits(options);
    impl_->memory = DeviceBuffer(dry.bytes());
    Arena arena(static_cast<std::byte*>(impl_->memory.data()));
    impl_->state = place(options, arena);
    impl_->row.resize(size_t(options.shape.padded_vocab()) * sizeof(float));
    std::visit(
        [&](auto& s) {
            s.comm = comm;
            impl_->sums.resize(step_sums(s).count());
            auto send = [&](ops::Chunk* to, const std::vector<ops::Chunk>& chunks) {
                if (to) copy_to_device(to, chunks.data(), chunks.size() * sizeof(ops::Chunk), s.stream);
            };
            send(s.all_chunks, s.host_all_chunks);
            send(s.own_chunks, s.host_own_chunks);
            const ops::StepScalars neutral{1.0f, 0.0f, 1.0f, 1.0f};
            copy_to_device(s.scalars, &neutral, sizeof(neutral), s.stream);
            synchronize(s.stream);
        },
        impl_->state);
}

Gpt::Gpt(Gpt&&) noexcept = default;
Gpt::~Gpt() {
    if (impl_) std::visit([](auto& s) { drain(s.comm); }, impl_->state);
}

const GptOptions& Gpt::options() const {
    return std::visit([](auto& s) -> const GptOptions& { return s.options; }, impl_->state);
}

const TensorLayout& Gpt::layout() const {
    return std::visit([](auto& s) -> const TensorLayout& { return s.layout; }, impl_->state);
}

void Gpt::initialize(uint64_t seed) {
    std::visit(
        [&](auto& s) {
            for (const Tensor& tensor : s.layout.tensors) initialize_tensor(s, tensor, seed);
        },
        impl_->state);
    masters_changed();
}

void Gpt::begin_step(const ops::StepScalars& scalars) {
    std::visit(
        [&](auto& s) {
            copy_to_device(s.scalars, &scalars, sizeof(scalars), s.stream);
            s.micro_steps_done = 0;
            if (s.comm.size == 1) return;
            std::fill(impl_->sums.begin(), impl_->sums.end(), 0.0);
            copy_to_device(s.sums, impl_->sums.data(), impl_->sums.size() * sizeof(double), s.stream);
        },
        impl_->state);
}

namespace {

template <class State> void load_batch(State& s, const int* tokens, const int* targets) {
    const size_t bytes = size_t(s.options.batch) * size_t(s.options.seq_len) * sizeof(int);
    copy_to_device(s.tokens, tokens, bytes, s.stream);
    copy_to_device(s.targets, targets, bytes, s.stream);
}

}  // namespace

void Gpt::micro_step(const int* tokens, const int* targets, float grad_scale) {
    std::visit(
        [&](auto& s) {
            load_batch(s, tokens, targets);
            const MicroStep micro = begin_micro_step(s, grad_scale);
            trunk_forward(s);
            head_forward_backward(s, Pass::train, micro);
            trunk_backward(s, micro);
            end_micro_step(s);
        },
        impl_->state);
}

StepResult Gpt::end_step(const UpdateSettings& settings, const std::array<double, StepResult::kVotes>& votes) {
    return std::visit(
        [&](auto& s) {
            const StepSums places = step_sums(s);
            std::vector<double>& sums = impl_->sums;
            copy_to_device(s.sums + places.vote(0), votes.data(), sizeof(votes), s.stream);
            finish_grads(s);
            update(s, settings);
            share_params(s);
            ops::GradNorm norm;
            copy_to_host(&norm, s.grad_norm, sizeof(norm), s.stream);
            const size_t first = places.loss(0, 0);  // what comes before concerns the device alone
            copy_to_host(&sums[first], s.sums + first, (sums.size() - first) * sizeof(double), s.stream);
            synchronize(s.stream);

            StepResult result{};
            for (size_t i = 0; i < places.losses; i++) result.loss_sum += sums[first + i];
            for (int i = 0; i < StepResult::kVotes; i++) result.votes[i] = sums[places.vote(i)];
            result.grad_norm = norm.norm;
            result.update_ms = s.update_time.take_ms();
            if (norm.non_finite_tensor >= 0)
                result.non_finite_tensor = s.layout.tensors[size_t(norm.non_finite_tensor)].name;
            return result;
        },
        impl_->state);
}

void Gpt::sum_over_ranks(std::array<double, StepResult::kVotes>& values) {
    std::visit(
        [&](auto& s) {
            double* sums = s.sums + step_sums(s).vote(0);
            copy_to_device(sums, values.data(), sizeof(values), s.stream);
            wait(all_reduce_sum(sums, values.size(), s.comm, s.stream), s.comm, s.stream);
            copy_to_host(values.data(), sums, sizeof(values), s.stream);
            synchronize(s.stream);
        },
        impl_->state);
}

double Gpt::evaluate(const int* tokens, const int* targets) {
    return std::visit(
        [&](auto& s) {
            load_batch(s, tokens, targets);
            trunk_forward(s);
            const MicroStep only{.index = 0, .last = true, .accumulate = false, .grad_scale = 0};
            head_forward_backward(s, Pass::evaluate, only);
            double loss_sum = 0;
            copy_to_host(&loss_sum, s.sums + step_sums(s).loss(s.options.rank, 0), sizeof(loss_sum), s.stream);
            synchronize(s.stream);
            return loss_sum;
        },
        impl_->state);
}

void Gpt::next_token_logits(const int* tokens, int count, float* logits) {
    std::visit(
        [&]<class Act>(GptState<Act>& s) {
            const int T = s.options.seq_len, C = s.options.shape.n_embd, Vp = s.options.shape.padded_vocab();
            require(count >= 1 && count <= T, "next_token_logits: %d tokens, must be in [1, %d]", count, T);
            copy_to_device(s.tokens, tokens, size_t(count) * sizeof(int), s.stream);
            trunk_forward(s);
            ops::matmul_forward<Act>({.out = s.acts.logits,
                                      .pre_gelu = nullptr,
                                      .inp = s.acts.norm_f + size_t(count - 1) * size_t(C),
                                      .weight = s.params.wte,
                                      .bias = nullptr,
                                      .rows = 1,
                                      .n = Vp,
                                      .k = C},
                                     s.stream);
            copy_to_host(impl_->row.data(), s.acts.logits, size_t(Vp) * sizeof(Act), s.stream);
            synchronize(s.stream);
            for (int i = 0; i < s.options.shape.vocab_size; i++) {
                Act value;
                std::memcpy(&value, impl_->row.data() + size_t(i) * sizeof(Act), sizeof(Act));
                logits[i] = to_float(value);
            }
        },
        impl_->state);
}

std::vector<NamedTensor> Gpt::master_tensors() const {
    return std::visit([](auto& s) { return name_tensors(s, "master.", s.master); }, impl_->state);
}

std::vector<NamedTensor> Gpt::gradient_tensors() const {
    return std::visit([](auto& s) { return name_tensors(s, "grad.", s.own_grad); }, impl_->state);
}

std::vector<NamedTensor> Gpt::state_tensors() const {
    std::vector<NamedTensor> all = master_tensors();
    std::visit(
        [&](auto& s) {
            auto append = [&](const char* prefix, float* owned) {
                for (NamedTensor& tensor : name_tensors(s, prefix, owned)) all.push_back(std::move(tensor));
            };
            if (s.m) append("m.", s.m);
            if (s.v) append("v.", s.v);
        },
        impl_->state);
    return all;
}

std::vector<NamedTensor> Gpt::saved_tensors() const {
    std::vector<NamedTensor> tensors = state_tensors();
    if (options().is_sharded()) return tensors;
    const TensorLayout& all = layout();
    for (size_t i = 0; i < tensors.size(); i++) {
        const TensorPart part = part_of(all, all.tensors[i % all.tensors.size()], options().rank);
        tensors[i].values = tensors[i].values.from(part.first);
        tensors[i].count = part.count;
        tensors[i].first = part.first;
    }
    return tensors;
}

void Gpt::masters_changed() {
    std::visit(
        []<class Act>(GptState<Act>& s) {
            if constexpr (!std::is_same_v<Act, float>)
                ops::cast<Act>({.out = s.own_param, .inp = s.master, .count = owned_elements(s)}, s.stream);
            share_params(s);
            synchronize(s.stream);
        },
        impl_->state);
}

#include "model/gpt.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/check.h"
#include "model/plan.h"
#include "model/state.h"

struct Gpt::Impl {
    Comm comm;
    DeviceBuffer memory;
    std::variant<GptState<float>, GptState<bf16>, GptState<fp16>> state;
    std::vector<std::byte> row;  // one row of logits on the host
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

void initialize_tensor(const Tensor& tensor, const GptShape& shape, float* master, uint64_t seed, Stream stream) {
    const Init init = tensor_table<float>()[size_t(tensor.row)].init;
    float* out = master + tensor.begin;
    if (init == Init::zero || init == Init::one) {
        ops::fill({.out = out, .count = tensor.count, .value = init == Init::one ? 1.0f : 0.0f}, stream);
        return;
    }
    const float shrink = init == Init::normal_residual ? 1.0f / std::sqrt(2.0f * float(shape.n_layer)) : 1.0f;
    ops::fill({.out = out, .count = tensor.count, .value = 0.0f}, stream);
    ops::normal_fill({.out = out,
                      .count = initialised_elements(tensor, shape),
                      .seed = seed,
                      .subsequence = subsequence_of(tensor.name),
                      .deviation = 0.02f * shrink},
                     stream);
}

std::vector<StateTensor> name_tensors(const TensorLayout& layout, const std::string& prefix, float* flat) {
    std::vector<StateTensor> named;
    for (const Tensor& tensor : layout.tensors)
        named.push_back({prefix + tensor.name, logical_shape(tensor), flat + tensor.begin, tensor.count});
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
    impl_->comm = comm;
    check_fits(options);
    impl_->memory = DeviceBuffer(dry.bytes());
    Arena arena(static_cast<std::byte*>(impl_->memory.data()));
    impl_->state = place(options, arena);
    impl_->row.resize(size_t(options.shape.padded_vocab()) * sizeof(float));
    std::visit(
        [](auto& s) {
            if (s.chunks)
                copy_to_device(s.chunks, s.host_chunks.data(), s.host_chunks.size() * sizeof(ops::Chunk), s.stream);
            const ops::StepScalars neutral{1.0f, 0.0f, 1.0f, 1.0f};
            copy_to_device(s.scalars, &neutral, sizeof(neutral), s.stream);
            synchronize(s.stream);
        },
        impl_->state);
}

Gpt::Gpt(Gpt&&) noexcept = default;
Gpt::~Gpt() = default;

const GptOptions& Gpt::options() const {
    return std::visit([](auto& s) -> const GptOptions& { return s.options; }, impl_->state);
}

const TensorLayout& Gpt::layout() const {
    return std::visit([](auto& s) -> const TensorLayout& { return s.layout; }, impl_->state);
}

void Gpt::initialize(uint64_t seed) {
    std::visit(
        [&](auto& s) {
            for (const Tensor& tensor : s.layout.tensors)
                initialize_tensor(tensor, s.options.shape, s.master, seed, s.stream);
        },
        impl_->state);
    masters_changed();
}

void Gpt::begin_step(const ops::StepScalars& scalars) {
    std::visit([&](auto& s) { copy_to_device(s.scalars, &scalars, sizeof(scalars), s.stream); }, impl_->state);
}

namespace {

template <class State> void load_batch(State& s, const int* tokens, const int* targets) {
    const size_t bytes = size_t(s.options.batch) * size_t(s.options.seq_len) * sizeof(int);
    copy_to_device(s.tokens, tokens, bytes, s.stream);
    copy_to_device(s.targets, targets, bytes, s.stream);
}

}  // namespace

void Gpt::micro_step(const int* tokens, const int* targets, const MicroStep& micro) {
    std::visit(
        [&](auto& s) {
            load_batch(s, tokens, targets);
            trunk_forward(s);
            head_forward_backward(s, Pass::train, micro);
            trunk_backward(s, micro);
        },
        impl_->state);
}

StepResult Gpt::end_step(const UpdateSettings& settings) {
    return std::visit(
        [&](auto& s) {
            all_reduce_sum(s.grad, s.layout.elements, impl_->comm, s.stream);
            update(s, settings);
            ops::GradNorm norm;
            StepResult result;
            copy_to_host(&norm, s.grad_norm, sizeof(norm), s.stream);
            copy_to_host(&result.loss_sum, s.loss_sum, sizeof(double), s.stream);
            synchronize(s.stream);
            result.grad_norm = norm.norm;
            if (norm.non_finite_tensor >= 0)
                result.non_finite_tensor = s.layout.tensors[size_t(norm.non_finite_tensor)].name;
            return result;
        },
        impl_->state);
}

double Gpt::evaluate(const int* tokens, const int* targets) {
    return std::visit(
        [&](auto& s) {
            load_batch(s, tokens, targets);
            trunk_forward(s);
            head_forward_backward(s, Pass::evaluate, {.first = true, .grad_scale = 0});
            double loss_sum = 0;
            copy_to_host(&loss_sum, s.loss_sum, sizeof(loss_sum), s.stream);
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

std::vector<StateTensor> Gpt::master_tensors() const {
    return std::visit([](auto& s) { return name_tensors(s.layout, "master.", s.master); }, impl_->state);
}

std::vector<StateTensor> Gpt::gradient_tensors() const {
    return std::visit([](auto& s) { return name_tensors(s.layout, "grad.", s.grad); }, impl_->state);
}

std::vector<StateTensor> Gpt::state_tensors() const {
    std::vector<StateTensor> all = master_tensors();
    auto append = [&](const TensorLayout& layout, const char* prefix, float* flat) {
        for (StateTensor& tensor : name_tensors(layout, prefix, flat)) all.push_back(std::move(tensor));
    };
    std::visit(
        [&](auto& s) {
            if (s.m) append(s.layout, "m.", s.m);
            if (s.v) append(s.layout, "v.", s.v);
        },
        impl_->state);
    return all;
}

void Gpt::masters_changed() {
    std::visit(
        []<class Act>(GptState<Act>& s) {
            if constexpr (!std::is_same_v<Act, float>)
                ops::cast<Act>({.out = s.param, .inp = s.master, .count = s.layout.elements}, s.stream);
            synchronize(s.stream);
        },
        impl_->state);
}

// elementwise_update, trust_sums and trust_ratios against ref::.
#include <cstddef>

#include "kernels/shared/update_rules.h"
#include "test/reference/update_rules.h"
#include "test/support/bounded.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"
#include "test/support/update_chunks.h"

namespace {

constexpr OptimizerKind kRules[] = {OptimizerKind::adamw, OptimizerKind::adam,    OptimizerKind::sgd,
                                    OptimizerKind::lion,  OptimizerKind::rmsprop, OptimizerKind::adagrad,
                                    OptimizerKind::lamb,  OptimizerKind::lars};
constexpr OptimizerKind kLayerwise[] = {OptimizerKind::lamb, OptimizerKind::lars};

bool is_layerwise(OptimizerKind rule) { return std::ranges::find(kLayerwise, rule) != std::end(kLayerwise); }

// The arrays of an update. `param` is null if T is float.
template <class T> struct Update {
    OptimizerKind rule;
    size_t count = element_count(), state_count = count + state_shift(kTensors);
    Array<float> master{"master", Role::output, random_values(count, 1)};
    // The first array of state has squares, which are positive, or a momentum.
    bool has_squares_first = rule == OptimizerKind::rmsprop || rule == OptimizerKind::adagrad;
    Array<float> first{"state 0", Role::output, random_values(state_count, 2, 0.1, has_squares_first ? 0.1 : 0)};
    Array<float> second{"state 1", Role::output, random_values(state_count, 3, 0.01, 0.01)};
    Stored<T> param{"param", Role::output, nans(count)};
    Array<float> grad{"grad", Role::input, random_values(count, 4, 2048)};
    Array<ops::Chunk> chunks{"chunks", Role::input, chunks_of_one_rank()};
    Array<ops::GradNorm> grad_norm;
    Array<ops::UpdateScalars> scalars;
    Array<float> ratios{"trust ratios", Role::input, std::vector<float>{0.5f, 1.5f, 0.25f, 3, 0.75f, 2}};  // of tensors

    explicit Update(OptimizerKind kind, int non_finite_tensor = -1)
        : rule(kind),
          grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = 3, .scale = 1.0f / 1024 / 3, .non_finite_tensor = non_finite_tensor, .reserved = 0}}),
          scalars("scalars", Role::input,
                  std::vector<ops::UpdateScalars>{scalars_of(0.01f, 0.1f), scalars_of(0.02f, 0)}) {}

    static ops::UpdateScalars scalars_of(float learning_rate, float decay) {
        return {.learning_rate = learning_rate,
                .weight_decay = decay,
                .keep = float(1 - double(learning_rate) * decay),
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .one_minus_beta1 = 0.1f,
                .one_minus_beta2 = 0.05f,
                .step_size = learning_rate / 0.271f,
                .root_bias_correction2 = 0.172f,
                .eps = 1e-3f,  // large enough to matter
                .momentum = 0.85f,
                .step_momentum = decay > 0 ? 0.85f : 1,  // the first group has Nesterov's momentum
                .step_gradient = decay > 0 ? 1.0f : 0,
                .alpha = 0.97f,
                .one_minus_alpha = 0.03f,
                .bias_correction1 = 0.271f,
                .trust_coefficient = 0.02f,
                .clip_threshold = 1};
    }

    static constexpr bool kHasParam = !std::is_same_v<T, float>;
    static size_t chunks_of_sums() { return chunks_of_all_tensors().size(); }
    int n_states() const {
        int states = 0;
        ops::dispatch(rule, [&]<class Rule>() { states = Rule::kStates; });
        return states;
    }

    template <class Side> ops::ElementwiseUpdate on(Side side) {
        return {.rule = rule,
                .master = master.on(side),
                .param = kHasParam ? View(param.on(side)) : View(),
                .state = {n_states() > 0 ? first.on(side) : nullptr, n_states() > 1 ? second.on(side) : nullptr},
                .grad = grad.on(side),
                .chunks = chunks.on(side),
                .scalars = scalars.on(side),
                .grad_norm = grad_norm.on(side),
                .n_chunks = int(chunks.host.size()),
                .trust_ratios = is_layerwise(rule) ? ratios.on(side) : nullptr};
    }

    template <class Other> void check_same_state(const Other& expected) const {
        check_same_bits(master, expected.master.fetch());
        check_same_bits(first, expected.first.fetch());
        check_same_bits(second, expected.second.fetch());
        check_same_bits(param, expected.param.fetch());
    }
};

// The error bounds of an update's results: the formula's error in float plus the rounding when they are stored.
// 0 outside its chunks, where nothing changes.
template <class T> struct UpdateErrors {
    std::vector<double> master, first, second;

    explicit UpdateErrors(Update<T>& arrays)
        : master(arrays.count), first(arrays.state_count), second(arrays.state_count) {
        const ops::ElementwiseUpdate op = arrays.on(OnHost());
        for (const ops::Chunk& chunk : arrays.chunks.host)
            for (size_t e = 0; e < size_t(chunk.count); e++) {
                const size_t place = chunk.begin + e, state_place = chunk.state_begin + e;
                Bounded weight(element(op.master, place)),
                    state[] = {arrays.first.host[state_place], arrays.second.host[state_place]};
                const Bounded g = Bounded(op.grad[place]) * Bounded(op.grad_norm->scale);
                ops::UpdateScalars scalars = op.scalars[chunk.group];
                if (op.trust_ratios) scalars.trust_ratio = op.trust_ratios[chunk.layer];
                ref::update_element(op.rule, scalars, g, weight, state);
                master[place] = weight.error + stored_error_fp32(weight.value);
                if (op.state[0]) first[state_place] = state[0].error + stored_error_fp32(state[0].value);
                if (op.state[1]) second[state_place] = state[1].error + stored_error_fp32(state[1].value);
            }
    }
};

}  // namespace

TEMPLATE_TEST_CASE("elementwise_update", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const OptimizerKind rule : kRules) {
        INFO(name_of(rule));
        Update<T> arrays(rule);
        const UpdateErrors<T> errors(arrays);
        std::vector<T> expected_param = arrays.param.fetch();
        ops::elementwise_update(arrays.on(OnDevice<T>()), Stream());
        ref::elementwise_update(arrays.on(OnHost()));
        check_close(arrays.master, [&](size_t e) { return errors.master[e]; });
        check_close(arrays.first, [&](size_t e) { return errors.first[e]; });
        check_close(arrays.second, [&](size_t e) { return errors.second[e]; });
        // The parameter is the master as the device stored it, rounded to T.
        const std::vector<float> master = arrays.master.fetch();
        for (const ops::Chunk& chunk : arrays.chunks.host)
            for (size_t e = chunk.begin; Update<T>::kHasParam && e < chunk.begin + size_t(chunk.count); e++)
                expected_param[e] = from_float<T>(master[e]);
        check_same_bits(arrays.param, expected_param);
    }
}

TEMPLATE_TEST_CASE("elementwise_update does nothing when a gradient is not finite", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const OptimizerKind rule : kRules)
        for (const int tensor : {0, 3}) {
            Update<T> arrays(rule, tensor);
            const Update<T> expected(rule);
            ops::elementwise_update(arrays.on(OnDevice<T>()), Stream());
            arrays.check_same_state(expected);
        }
}

namespace {

// The squared norms of each tensor's chunks, the tensors as layers. `shift` as in Array.
struct TrustNorms {
    Update<float> arrays;
    Array<double> sums{"sums", Role::output, std::vector<double>(2 * arrays.chunks_of_sums(), -1.0)};
    Array<float> master, grad;

    explicit TrustNorms(OptimizerKind rule, int shift = 0, int non_finite_tensor = -1)
        : arrays(rule, non_finite_tensor),
          master("master", Role::input, arrays.master.host, shift),
          grad("grad", Role::input, arrays.grad.host, shift) {}
    template <class Side> ops::TrustSums on(Side side) {
        const ops::ElementwiseUpdate op = arrays.on(side);
        return {.rule = op.rule,
                .out = sums.on(side),
                .master = master.on(side),
                .state = {op.state[0], op.state[1]},
                .grad = grad.on(side),
                .chunks = op.chunks,
                .scalars = op.scalars,
                .grad_norm = op.grad_norm,
                .n_chunks = op.n_chunks};
    }
    void run() { ops::trust_sums(on(OnDevice<float>()), Stream()); }
};

}  // namespace

TEST_CASE("trust_sums", "[ops]") {
    for (const OptimizerKind rule : kLayerwise) {
        INFO(name_of(rule));
        TrustNorms norms(rule);
        const ops::TrustSums op = norms.on(OnHost());
        std::vector<double> error(norms.sums.host.size());  // 0 for the chunks of other ranks
        for (const ops::Chunk& chunk : norms.arrays.chunks.host) {
            double sums[] = {0, 0}, direction_error = 0;
            for (size_t e = 0; e < size_t(chunk.count); e++) {
                Bounded state[ops::kMaxStates];
                for (int k = 0; k < ops::kMaxStates && op.state[k]; k++)
                    state[k] = op.state[k].as<float>()[chunk.state_begin + e];
                const Bounded weight = element(op.master, chunk.begin + e);
                const Bounded g = Bounded(op.grad[chunk.begin + e]) * Bounded(op.grad_norm->scale);
                const Bounded direction = ref::direction_of_layer(rule, op.scalars[chunk.group], g, weight, state);
                sums[0] += weight.value * weight.value;
                sums[1] += direction.value * direction.value;
                direction_error += (2 * std::abs(direction.value) + direction.error) * direction.error;
            }
            for (size_t k = 0; k < 2; k++)
                error[size_t(2 * chunk.index) + k] = 2 * (chunk.count + 1) * 0x1p-53 * sums[k];
            error[size_t(2 * chunk.index) + 1] += direction_error;
        }
        ref::trust_sums(op);
        norms.run();
        check_close(norms.sums, [&](size_t i) { return error[i]; });  // 0 for the chunks of other ranks
    }
}

TEST_CASE("trust_sums: the same bits at every address, and no change of the state", "[ops]") {
    for (const OptimizerKind rule : kLayerwise) {
        TrustNorms expected(rule), shifted(rule, 1);
        expected.run(), shifted.run();
        check_same_bits(shifted.sums, expected.sums.fetch());
        expected.arrays.check_same_state(Update<float>(rule));
    }
}

TEST_CASE("trust_sums and trust_ratios do nothing when a gradient is not finite", "[ops]") {
    for (const OptimizerKind rule : kLayerwise) {
        TrustNorms norms(rule, 0, 3);
        norms.run();
        for (const double sum : norms.sums.fetch()) CHECK(sum == -1);
        Array<float> ratios("ratios", Role::output, std::vector<float>{-1});
        Array<ops::Layer> layers("layers", Role::input, std::vector<ops::Layer>{{0, 1, 1, 0, true}});
        const OnDevice<float> device;
        ops::trust_ratios({rule, ratios.on(device), norms.sums.on(device), layers.on(device),
                           norms.arrays.scalars.on(device), norms.arrays.grad_norm.on(device), 1},
                          Stream());
        CHECK(ratios.fetch()[0] == -1);
    }
}

// Layers of many and of few chunks, next to each other and interleaved; without weights or gradient the ratio is 1.
TEST_CASE("trust_ratios", "[ops]") {
    const std::vector<ops::Layer> layers = {{0, 1, 1, 0, true},    {1, 3, 700, 1, true},  {2, 3, 700, 0, true},
                                            {3, 3, 700, 0, false}, {2101, 1, 2, 0, true}, {2103, 1, 2, 0, true}};
    std::vector<double> values = random_values(2 * 2105, 1, 1, 1);  // positive
    values[2 * 2101] = values[2 * 2102] = values[2 * 2103 + 1] = values[2 * 2104 + 1] = 0;
    for (const OptimizerKind rule : kLayerwise) {
        INFO(name_of(rule));
        Update<float> update(rule);
        Array<double> sums("sums", Role::input, values);
        Array<ops::Layer> table("layers", Role::input, layers);
        Array<float> ratios("ratios", Role::output, std::vector<float>(layers.size(), NAN));
        ref::trust_ratios({rule, ratios.host.data(), sums.host.data(), table.host.data(), update.scalars.host.data(),
                           update.grad_norm.host.data(), int(layers.size())});
        const OnDevice<float> device;
        ops::trust_ratios({rule, ratios.on(device), sums.on(device), table.on(device), update.scalars.on(device),
                           update.grad_norm.on(device), int(layers.size())},
                          Stream());
        check_close(ratios, [&](size_t i) { return stored_error_fp32(ratios.host[i]); });
        CHECK(ratios.host[3] == 1);
        CHECK(ratios.host[4] == 1);
    }
}

namespace {

template <class T> ops::ElementwiseUpdate far(ops::ElementwiseUpdate op, const ops::Chunk* far_chunks) {
    op.master = op.master.as<float>() - kFar, op.grad -= kFar;
    for (View& state : op.state)
        if (state) state = state.as<float>() - kFar;
    if (op.param) op.param = op.param.template as<T>() - kFar;
    op.chunks = far_chunks;
    return op;
}

}  // namespace

TEMPLATE_TEST_CASE("elementwise_update beyond 2^32 elements", "[ops]", float, bf16) {
    using T = TestType;
    const OnDevice<T> device;
    for (const OptimizerKind rule : kRules) {
        Update<T> arrays(rule), expected(rule);
        Array<ops::Chunk> far_chunks("far chunks", Role::input, far(chunks_of_one_rank()));
        ops::elementwise_update(expected.on(device), Stream());
        ops::elementwise_update(far<T>(arrays.on(device), far_chunks.on(device)), Stream());
        arrays.check_same_state(expected);
    }
}

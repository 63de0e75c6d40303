// How the optimizers divide the tensors, for any number of ranks.
#include <map>
#include <set>
#include <span>

#include "kernels/shared/update_rules.h"
#include "model/gpt.h"
#include "model/matrices.h"
#include "model/update.h"
#include "test/reference/update_rules.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"
#include "test/support/torch_reference.h"

namespace {

const GptShape kShape{2, 4, 4, 300, 64, 700};

GptOptions options_of(int rank, int ranks, int zero_stage) {
    GptOptions options;
    options.shape = kShape;
    options.rank = rank;
    options.ranks = ranks;
    options.zero_stage = zero_stage;
    return options;
}

}  // namespace

TEST_CASE("weight decay applies to matrices, embeddings and the head, and not to vectors", "[model]") {
    const GptOptions options = options_of(0, 1, 0);
    const TensorLayout layout = lay_out_tensors(kShape);
    const UpdateLayout update = lay_out_update(options, layout);
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const double decay = update.groups[size_t(update.tensors[i].group)].weight_decay;
        INFO(layout.tensors[i].name);
        CHECK(decay == (logical_shape(layout, layout.tensors[i]).size() == 2 ? options.optimizer.weight_decay : 0));
    }
}

TEST_CASE("groups change the learning rate and the decay of their tensors; a later group overrides", "[model]") {
    GptOptions options = options_of(0, 1, 0);
    options.optimizer.groups = {
        {"embedding", 2, -1}, {"h.*.fc.weight", 0.5, 0}, {"vector", 1, 0.3, -1, 0.99}, {"wpe", 3, 0.2}};
    options.optimizer.groups[1].warmup_steps = 0;
    const TensorLayout layout = lay_out_tensors(kShape);
    const UpdateLayout update = lay_out_update(options, layout);
    const std::map<std::string, std::pair<double, double>> expected = {
        {"wte", {2, 0.1}},  // rate, decay
        {"wpe", {3, 0.2}},         {"h.1.fc.weight", {0.5, 0}}, {"h.1.fc_proj.weight", {1, 0.1}},
        {"h.0.fc.bias", {1, 0.3}}, {"norm_f.weight", {1, 0.3}}};
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const auto found = expected.find(layout.tensors[i].name);
        if (found == expected.end()) continue;
        const UpdateGroup& group = update.groups[size_t(update.tensors[i].group)];
        INFO(found->first);
        CHECK(std::pair(group.lr_scale, group.weight_decay) == found->second);
        CHECK(group.schedule == (found->first == "h.1.fc.weight" ? 1 : -1));
        const ops::UpdateScalars scalars = update_scalars(options.optimizer, group, 0.5, 1);
        CHECK(scalars.learning_rate == float(0.5 * group.lr_scale));
        const bool is_vector = logical_shape(layout, layout.tensors[i]).size() == 1;
        CHECK(scalars.beta1 == 0.9f);
        CHECK(scalars.beta2 == (is_vector ? 0.99f : 0.95f));
        CHECK(scalars.one_minus_beta2 == (is_vector ? float(1 - 0.99) : float(1 - 0.95)));
    }
    CHECK(unused_group(options).empty());
    options.optimizer.groups.push_back({.tensors = "h.*.fc"});
    CHECK(unused_group(options) == "h.*.fc");
}

TEST_CASE("each owned element has its own place in the optimizer's state", "[model]") {
    for (const auto& [ranks, kind] : {std::pair(1, OptimizerKind::adamw),
                                      {2, OptimizerKind::adamw},
                                      {3, OptimizerKind::adamw},
                                      {1, OptimizerKind::lamb},
                                      {3, OptimizerKind::lamb}})
        for (const int stage : {0, 1})
            for (int rank = 0; rank < ranks; rank++) {
                GptOptions options = options_of(rank, ranks, stage);
                options.optimizer.name = kind;
                const TensorLayout layout = lay_out_tensors(kShape, ranks);
                UpdateLayout update = lay_out_update(options, layout);
                const bool whole = !options.is_sharded();
                const std::vector<ops::Chunk> grid = chunk_grid(layout);
                const std::vector<ops::Chunk> chunks =
                    update_chunks(options, layout, update, whole ? grid : owned_chunks(layout, grid, rank, whole));
                std::set<size_t> places;
                size_t elements = 0;
                for (const ops::Chunk& chunk : chunks) {
                    const RuleState& rule = update.rules[size_t(update.tensors[size_t(chunk.tensor)].rule)];
                    CHECK(chunk.state_begin + size_t(chunk.count) <= rule.elements);
                    CHECK(chunk.group == update.tensors[size_t(chunk.tensor)].group);
                    const TensorPart part = owned_part(options, layout, layout.tensors[size_t(chunk.tensor)]);
                    CHECK(chunk.first == part.first + chunk.begin - part.shard_begin);
                    for (size_t e = 0; e < size_t(chunk.count); e++) places.insert(chunk.state_begin + e);
                    elements += size_t(chunk.count);
                }
                CHECK(places.size() == elements);
                size_t owned = 0;
                for (const Tensor& tensor : layout.tensors) owned += owned_part(options, layout, tensor).count;
                CHECK(elements == owned);
            }
}

TEST_CASE("each optimizer has as many arrays of state as its rule updates", "[model]") {
    for (size_t kind = 0; kind < names_of(OptimizerKind()).size(); kind++)
        if (!optimizer_row(OptimizerKind(kind)).is_of_matrices() && OptimizerKind(kind) != OptimizerKind::adafactor)
            ops::dispatch(OptimizerKind(kind), [&]<class Rule>() {
                CHECK(optimizer_row(OptimizerKind(kind)).slots.size() == size_t(Rule::kStates));
            });
}

TEST_CASE("the scalars of an update follow AdamW's formula", "[model]") {
    const OptimizerSettings settings{.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6};
    const ops::UpdateScalars scalars = update_scalars(settings, {OptimizerKind::adamw, 0.5}, 0.25, 2);
    CHECK(scalars.learning_rate == 0.25f);
    CHECK(scalars.keep == 0.875f);
    CHECK(scalars.beta2 == 0.99f);
    CHECK(scalars.one_minus_beta2 == 0.01f);
    CHECK(std::abs(scalars.step_size / (0.25 / 0.19) - 1) < 1e-6);
    CHECK(std::abs(scalars.root_bias_correction2 / std::sqrt(0.0199) - 1) < 1e-6);
}

TEST_CASE("the scalars of an update follow Adafactor's formula", "[model]") {
    OptimizerSettings settings;
    set_optimizer(settings, OptimizerKind::adafactor);
    const auto at = [&](int64_t t) { return update_scalars(settings, {OptimizerKind::adafactor, 0.5}, 0.25, t); };
    CHECK(at(1).learning_rate == 0.25f);
    CHECK(at(1).one_minus_beta2 == 1);
    CHECK(at(64).learning_rate == 0.125f);  // 1 / sqrt(t) is smaller
    CHECK(at(64).keep == 0.875f);           // not limited by 1 / sqrt(t)
    CHECK(std::abs(at(32).one_minus_beta2 / 0.0625 - 1) < 1e-6);
    CHECK(at(1).eps == 0x1p-23f);
    CHECK(at(1).clip_threshold == 1);
}

namespace {

// Trains `weights` with given gradients. Weight decay applies to the first half of the elements.
std::vector<float> trained(const OptimizerSettings& settings, std::vector<float> weights,
                           const std::vector<float>& gradients) {
    const size_t count = weights.size(), half = count / 2;
    const ops::Chunk chunks[] = {
        {.begin = 0, .count = int(half), .tensor = 0, .index = 0, .group = 0, .state_begin = 0},
        {.begin = half, .count = int(half), .tensor = 1, .index = 1, .group = 1, .state_begin = half}};
    const ops::GradNorm norm{.norm = 1, .scale = 1, .non_finite_tensor = -1, .reserved = 0};
    std::vector<float> states[ops::kMaxStates] = {std::vector<float>(count), std::vector<float>(count)};
    for (size_t step = 0; step < gradients.size() / count; step++) {
        std::vector<ops::UpdateScalars> scalars;
        for (const double decay : {0.1, 0.0})
            scalars.push_back(update_scalars(settings, {settings.name, decay}, 1e-2, int64_t(step) + 1));
        ops::ElementwiseUpdate op{.rule = settings.name,
                                  .master = weights.data(),
                                  .param = nullptr,
                                  .state = {},
                                  .grad = gradients.data() + step * count,
                                  .chunks = chunks,
                                  .scalars = scalars.data(),
                                  .grad_norm = &norm,
                                  .n_chunks = 2};
        for (size_t slot = 0; slot < optimizer_row(settings.name).slots.size(); slot++)
            op.state[slot] = states[slot].data();
        ops::elementwise_update(op, Stream());
    }
    return weights;
}

// The same in double.
std::vector<double> trained_in_double(const OptimizerSettings& settings, const std::vector<float>& initial,
                                      const std::vector<float>& gradients) {
    const size_t count = initial.size();
    std::vector<double> weights(initial.begin(), initial.end()), states[2] = {weights, weights};
    for (std::vector<double>& state : states) std::ranges::fill(state, 0);
    for (size_t step = 0; step < gradients.size() / count; step++)
        for (size_t i = 0; i < count; i++) {
            const UpdateGroup group{settings.name, i < count / 2 ? 0.1 : 0.0};
            double state[] = {states[0][i], states[1][i]};
            ref::update_element(settings.name, update_scalars(settings, group, 1e-2, int64_t(step) + 1),
                                double(gradients[step * count + i]), weights[i], state);
            states[0][i] = state[0], states[1][i] = state[1];
        }
    return weights;
}

template <class Values> double relative_error(const std::vector<float>& values, const Values& expected) {
    double error = 0, sum = 0;
    for (size_t i = 0; i < values.size(); i++) {
        error += std::pow(values[i] - double(expected[i]), 2);
        sum += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(error / sum);
}

}  // namespace

TEST_CASE("20 steps of each optimizer agree with torch.optim within 1e-6", "[model]") {
    const TorchTensors torch = load_torch_tensors("test/recorded/torch/optimizers.safetensors");
    const std::vector<float>&weights = torch.at("weights").values, &gradients = torch.at("gradients").values;
    for (const TorchOptimizer& optimizer : kTorchOptimizers) {
        INFO(optimizer.group);
        const std::vector<float>& expected = torch.at(optimizer.group).values;
        CHECK(relative_error(weights, expected) > 1e-3);
        CHECK(relative_error(trained(optimizer.settings(), weights, gradients), expected) < 1e-6);
    }
}

TEST_CASE("20 steps of Lion agree with its formula in double within 1e-6", "[model]") {
    const TorchTensors torch = load_torch_tensors("test/recorded/torch/optimizers.safetensors");
    const std::vector<float>&weights = torch.at("weights").values, &gradients = torch.at("gradients").values;
    OptimizerSettings settings;
    set_optimizer(settings, OptimizerKind::lion);
    const std::vector<double> expected = trained_in_double(settings, weights, gradients);
    CHECK(relative_error(weights, expected) > 1e-3);
    CHECK(relative_error(trained(settings, weights, gradients), expected) < 1e-6);
}

namespace {

// A step of LAMB (You et al., arXiv 1904.00962, algorithm 2) or LARS (You, Gitman, Ginsburg, arXiv 1708.03888,
// algorithm 1) on one layer. Vectors have no weight decay and a trust ratio of 1.
void textbook_step(const OptimizerSettings& settings, double rate, int t, bool is_vector, std::span<double> weights,
                   std::span<const float> gradients, std::span<double> m, std::span<double> v) {
    const double decay = is_vector ? 0 : settings.weight_decay;
    const bool is_lamb = settings.name == OptimizerKind::lamb;
    std::vector<double> direction(weights.size());
    double weight_sum = 0, direction_sum = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        const double g = gradients[i];
        if (is_lamb) {
            m[i] = settings.beta1 * m[i] + (1 - settings.beta1) * g;
            v[i] = settings.beta2 * v[i] + (1 - settings.beta2) * g * g;
            const double r = m[i] / (1 - std::pow(settings.beta1, t)) /
                             (std::sqrt(v[i] / (1 - std::pow(settings.beta2, t))) + settings.eps);
            direction[i] = r + decay * weights[i];
        } else {
            direction[i] = g;
        }
        weight_sum += weights[i] * weights[i];
        direction_sum += direction[i] * direction[i];
    }
    const double weight_norm = std::sqrt(weight_sum), direction_norm = std::sqrt(direction_sum);
    double ratio = 1;
    if (!is_vector && weight_norm > 0 && direction_norm > 0)
        ratio = is_lamb ? weight_norm / direction_norm
                        : settings.trust_coefficient * weight_norm / (direction_norm + decay * weight_norm);
    for (size_t i = 0; i < weights.size(); i++) {
        if (!is_lamb) m[i] = settings.momentum * m[i] + rate * ratio * (direction[i] + decay * weights[i]);
        weights[i] -= is_lamb ? rate * ratio * direction[i] : m[i];
    }
}

}  // namespace

// Queries, keys, values, gates and ups are separate layers.
TEST_CASE("20 steps of LAMB and LARS follow their papers within 1e-6", "[model]") {
    for (const auto& [kind, rate] : {std::pair(OptimizerKind::lamb, 0.01), std::pair(OptimizerKind::lars, 5.0)}) {
        INFO(name_of(kind));
        GptOptions options = nano_options();
        options.shape.given_kv_heads = 1;
        options.shape.gated_mlp = true;
        set_optimizer(options.optimizer, kind);
        options.optimizer.grad_clip = 0;
        Gpt gpt(options, comm_single());
        gpt.initialize(42);
        const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
        const std::vector<float> initial = values_of(gpt.master_tensors());
        std::vector<double> weights(initial.begin(), initial.end()), m(weights.size()), v(weights.size());
        for (int t = 1; t <= 20; t++) {
            const std::vector<int> ids = nano_tokens(tokens + 1, options.shape.vocab_size, unsigned(t));
            gpt.begin_step({.learning_rate = rate, .update = t});
            gpt.forward(ids.data());
            gpt.backward(ids.data() + 1, 1.0f / float(tokens));
            gpt.end_step();
            const std::vector<float> gradients = values_of(gpt.gradient_tensors());
            const std::vector<Matrix> matrices = lay_out_matrices(gpt.layout());
            size_t begin = 0;
            for (size_t i = 0; i < gpt.layout().tensors.size(); i++) {
                const Tensor& tensor = gpt.layout().tensors[i];
                const bool is_vector = logical_shape(gpt.layout(), tensor).size() == 1;
                std::vector<std::pair<size_t, size_t>> layers;  // first element and number
                for (const Matrix& matrix : matrices)
                    if (matrix.tensor == int(i)) layers.push_back({matrix.first, matrix.count()});
                if (layers.empty()) layers.push_back({0, tensor.count});
                for (const auto& [first, count] : layers)
                    textbook_step(
                        options.optimizer, rate, t, is_vector, std::span(weights).subspan(begin + first, count),
                        std::span(gradients).subspan(begin + first, count), std::span(m).subspan(begin + first, count),
                        std::span(v).subspan(begin + first, count));
                begin += tensor.count;
            }
        }
        const std::vector<float> trained = values_of(gpt.master_tensors());
        CHECK(relative_error(initial, weights) > 1e-2);
        CHECK(relative_error(trained, weights) < 1e-6);
    }
}

#include "model/update.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/tensor.h"
#include "model/factors.h"
#include "model/offload.h"
#include "model/pieces.h"
#include "model/state.h"

namespace {

bool is_in(const TensorGroup& group, const Tensor& tensor) {
    return group.tensors == name_of(tensor.row->role) || fnmatch(group.tensors.c_str(), tensor.name.c_str(), 0) == 0;
}

bool has_schedule(const TensorGroup& group) {
    return group.warmup_steps >= 0 || group.final_lr_fraction >= 0 || group.cooldown_power >= 0;
}

UpdateGroup group_of(const OptimizerSettings& settings, const Tensor& tensor) {
    const TensorRole role = tensor.row->role;
    const bool applies = role == TensorRole::matrix || !optimizer_row(settings.name).is_of_matrices();
    UpdateGroup result{.rule = applies ? settings.name : settings.scalar_name,
                       .weight_decay = role == TensorRole::vector ? 0 : settings.weight_decay};
    for (size_t number = 0; number < settings.groups.size(); number++) {
        const TensorGroup& group = settings.groups[number];
        if (!is_in(group, tensor)) continue;
        result.schedule = has_schedule(group) ? int(number) : -1;
        result.lr_scale = group.lr_scale;
        if (group.weight_decay >= 0) result.weight_decay = group.weight_decay;
        result.beta1 = group.beta1, result.beta2 = group.beta2;
    }
    return result;
}

// "h.*.qkv.weight" for a tensor of a layer.
std::string name_in_any_layer(const Tensor& tensor) {
    return std::string(tensor.layer < 0 ? "" : "h.*.") + tensor.row->name;
}

// Returns the layers of each tensor.
std::vector<std::vector<FlatRange>> tensor_layers(const TensorLayout& layout) {
    std::vector<std::vector<FlatRange>> layers(layout.tensors.size());
    for (const Matrix& matrix : lay_out_matrices(layout))
        layers[size_t(matrix.tensor)].push_back({matrix.first, matrix.first + part_elements(layout, matrix)});
    for (size_t i = 0; i < layers.size(); i++)
        if (layers[i].empty()) layers[i].push_back({0, layout.tensors[i].count});
    return layers;
}

// Appends the parts of a chunk that belong to different layers. first: the chunk's first element in its tensor.
void append_by_layer(std::vector<ops::Chunk>& chunks, const ops::Chunk& whole, const std::vector<FlatRange>& layers,
                     size_t first) {
    for (size_t number = 0; number < layers.size(); number++) {
        const size_t begin = std::max(first, layers[number].begin);
        const size_t end = std::min(first + size_t(whole.count), layers[number].end);
        if (begin >= end) continue;
        ops::Chunk& part = chunks.emplace_back(whole);
        part.begin += begin - first, part.state_begin += begin - first, part.first = uint32_t(begin);
        part.count = int(end - begin);
        part.index = whole.index * kMaxStacked + int(number);
        part.layer = whole.tensor * kMaxStacked + int(number);
    }
}

// The compute weights that an update writes: none if they are the masters.
ChunkArray rounded_masters(const GptState& s) {
    return {s.options.computes_with_masters() ? View() : s.own_param, &ops::Chunk::begin, ChunkArray::updates};
}

// Runs an op on the gradients, masters and state of a rule's chunks.
void run_on_chunks(GptState& s, const RuleState& rule, auto run_op, auto op, ChunkArray::Access access,
                   const ChunkArray& rounded) {
    op.rule = rule.rule;
    op.scalars = s.update_scalars;
    op.grad_norm = s.grad_norm;
    for (Pieces pieces(s, chunks_of(s, rule),
                       {{s.master, &ops::Chunk::begin, access},
                        {rule.slot(0), &ops::Chunk::state_begin, access},
                        {rule.slot(1), &ops::Chunk::state_begin, access},
                        own_gradients(s, ChunkArray::reads),
                        rounded});
         pieces.next();) {
        op.master = pieces[0], op.state[0] = pieces[1], op.state[1] = pieces[2];
        op.grad = pieces[3].as<float>();
        if constexpr (requires { op.param; }) op.param = pieces[4];
        op.chunks = pieces.chunks(), op.n_chunks = pieces.n_chunks();
        run(s.stream, run_op, op, pieces.note());
    }
}

void update_by_element(GptState& s, const RuleState& rule, const float* trust_ratios) {
    ops::ElementwiseUpdate op{};
    op.trust_ratios = trust_ratios;
    run_on_chunks(s, rule, ops::elementwise_update, op, ChunkArray::updates, rounded_masters(s));
}

// Computes TrustState::ratios from this rank's TrustState::sums. Without shards each rank has all sums of its part.
void find_trust_ratios(GptState& s, const RuleState& rule) {
    const TrustState& trust = s.trust;
    add_over(s, s.options.is_sharded() ? s.comms.stage : s.group.comm, trust.sums, 2 * trust.n_sums);
    run(s.stream, ops::trust_ratios,
        {.rule = rule.rule,
         .out = trust.ratios,
         .sums = trust.sums,
         .layers = trust.layers,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_layers = int(trust.host_layers.size())});
}

void update_by_layer(GptState& s, const RuleState& rule) {
    ops::TrustSums sums{};
    sums.out = s.trust.sums;
    run_on_chunks(s, rule, ops::trust_sums, sums, ChunkArray::reads, {});
    find_trust_ratios(s, rule);
    update_by_element(s, rule, s.trust.ratios);
}

void update_by_factors(GptState& s, const RuleState& rule) {
    direct_factored(s, rule);
    find_trust_ratios(s, rule);
    apply_directions(s, chunks_of(s, rule), {s.own_grad, Dtype::fp32}, false, s.trust.ratios);
}

}  // namespace

TensorPart owned_part(const GptOptions& options, const TensorLayout& layout, const Tensor& tensor) {
    if (!options.is_sharded()) return {0, tensor.count, tensor.begin};
    return part_of(layout, tensor, options.rank);
}

UpdateLayout lay_out_update(const GptOptions& options, const TensorLayout& layout) {
    UpdateLayout update;
    for (const Tensor& tensor : layout.tensors) {
        const UpdateGroup wanted = group_of(options.optimizer, tensor);
        auto group = std::ranges::find(update.groups, wanted);
        if (group == update.groups.end()) group = update.groups.insert(group, wanted);
        auto rule = std::ranges::find(update.rules, wanted.rule, &RuleState::rule);
        if (rule == update.rules.end()) rule = update.rules.insert(rule, {wanted.rule});
        update.tensors.push_back({.group = int(group - update.groups.begin()),
                                  .rule = int(rule - update.rules.begin()),
                                  .state_begin = rule->elements});
        rule->elements += round_up(owned_part(options, layout, tensor).count, kTensorAlignment);
    }
    return update;
}

std::string unused_group(const GptOptions& options) {
    if (options.optimizer.groups.empty()) return "";
    const TensorLayout layout = lay_out_tensors(options.shape);
    for (const TensorGroup& group : options.optimizer.groups)
        if (std::ranges::none_of(layout.tensors, [&](const Tensor& tensor) { return is_in(group, tensor); }))
            return group.tensors;
    return "";
}

std::string rules_text(const GptOptions& options) {
    const UpdateLayout update = lay_out_update(options, lay_out_tensors(options.shape));
    std::string text;
    for (size_t r = 0; r < update.rules.size(); r++) {
        const auto tensors = std::ranges::count(update.tensors, int(r), &UpdateLayout::Place::rule);
        text += format("%s%s of %zu tensors", text.empty() ? "" : ", ", name_of(update.rules[r].rule), size_t(tensors));
    }
    return text;
}

std::string update_table(const GptOptions& options, double learning_rate) {
    const TensorLayout layout = lay_out_tensors(options.shape);
    const UpdateLayout update = lay_out_update(options, layout);
    std::string table;
    for (size_t number = 0; number < update.groups.size(); number++) {
        const UpdateGroup& group = update.groups[number];
        std::vector<std::string> names;
        size_t tensors = 0, parameters = 0;
        for (size_t i = 0; i < layout.tensors.size(); i++) {
            if (update.tensors[i].group != int(number)) continue;
            tensors++, parameters += layout.tensors[i].count;
            const std::string name = name_in_any_layer(layout.tensors[i]);
            if (std::ranges::find(names, name) == names.end()) names.push_back(name);
        }
        std::string betas;
        for (const auto& [name, value] : {std::pair("beta1", group.beta1), {"beta2", group.beta2}})
            if (value >= 0) betas += format(", %s %g", name, value);
        table += format("%-18s rate %g, weight decay %g%s: %zu tensors, %zu parameters\n", name_of(group.rule),
                        learning_rate * group.lr_scale, group.weight_decay, betas.c_str(), tensors, parameters);
        for (const std::string& name : names) table += "    " + name + "\n";
    }
    return table;
}

std::vector<ops::Chunk> update_chunks(const GptOptions& options, const TensorLayout& layout, UpdateLayout& update,
                                      const std::vector<ops::Chunk>& chunks) {
    std::vector<ops::Chunk> sorted;
    const std::vector<std::vector<FlatRange>> layers = tensor_layers(layout);
    for (size_t r = 0; r < update.rules.size(); r++) {
        RuleState& rule = update.rules[r];
        const OptimizerRow& row = optimizer_row(rule.rule);
        rule.first_chunk = int(sorted.size());
        for (ops::Chunk chunk : chunks) {
            const UpdateLayout::Place& place = update.tensors[size_t(chunk.tensor)];
            if (place.rule != int(r)) continue;
            const TensorPart part = owned_part(options, layout, layout.tensors[size_t(chunk.tensor)]);
            chunk.group = place.group;
            chunk.state_begin =
                row.scope == UpdateScope::factors ? chunk.begin : place.state_begin + (chunk.begin - part.shard_begin);
            if (row.is_layerwise())
                append_by_layer(sorted, chunk, layers[size_t(chunk.tensor)],
                                part.first + chunk.begin - part.shard_begin);
            else
                sorted.push_back(chunk);
        }
        rule.n_chunks = int(sorted.size()) - rule.first_chunk;
    }
    return sorted;
}

bool UpdateLayout::has_layers() const {
    return std::ranges::any_of(rules, [](const RuleState& rule) { return optimizer_row(rule.rule).is_layerwise(); });
}

size_t max_update_chunks(const TensorLayout& layout, const UpdateLayout& update, size_t n_chunks) {
    return n_chunks + (update.has_layers() ? lay_out_matrices(layout).size() : 0);
}

std::vector<ops::Layer> update_layers(const TensorLayout& layout, const UpdateLayout& update,
                                      const std::vector<ops::Chunk>& grid) {
    const TensorParallel& parts = layout.tensor_parallel;
    std::vector<ops::Layer> layers;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const auto of_tensor = std::ranges::equal_range(grid, int(i), {}, &ops::Chunk::tensor);
        for (int number = 0; number < kMaxStacked; number++)
            layers.push_back({.first = (of_tensor.front().index - parts.rank) * kMaxStacked + number,
                              .stride = kMaxStacked,
                              .n_sums = int(of_tensor.size()) * parts.size,
                              .group = update.tensors[i].group,
                              .adapts = layout.tensors[i].row->role != TensorRole::vector ||
                                        update.row_of(i).scope == UpdateScope::factors});
    }
    return layers;
}

// Like torch, computes in double and rounds the results.
ops::UpdateScalars update_scalars(const OptimizerSettings& settings, const UpdateGroup& group, double learning_rate,
                                  int64_t t) {
    const float rate = float(learning_rate * group.lr_scale);
    const double beta1 = group.beta1 < 0 ? settings.beta1 : group.beta1;
    const double beta2 = group.beta2 < 0 ? settings.beta2 : group.beta2;
    // Moments start with the first update that changes weights.
    const double steps = double(std::max<int64_t>(t + 1 - optimizer_row(group.rule).first_update, 1));
    const float correction1 = float(1 - std::pow(beta1, steps));
    const float correction2 = float(1 - std::pow(beta2, steps));
    const bool is_adafactor = group.rule == OptimizerKind::adafactor;
    return {.learning_rate = is_adafactor ? std::min(rate, float(1 / std::sqrt(double(t)))) : rate,
            .weight_decay = float(group.weight_decay),
            .keep = float(1 - double(rate) * float(group.weight_decay)),
            .beta1 = float(beta1),
            .beta2 = float(beta2),
            .one_minus_beta1 = float(1 - beta1),
            .one_minus_beta2 = float(is_adafactor ? std::pow(double(t), settings.beta2_decay) : 1 - beta2),
            .step_size = float(double(rate) / correction1),
            .root_bias_correction2 = float(std::sqrt(double(correction2))),
            .eps = float(settings.eps),
            .momentum = float(settings.momentum),
            .step_momentum = settings.nesterov ? float(settings.momentum) : 1,
            .step_gradient = settings.nesterov ? 1.0f : 0,
            .alpha = float(settings.alpha),
            .one_minus_alpha = float(1 - settings.alpha),
            .bias_correction1 = correction1,
            .trust_coefficient = float(settings.trust_coefficient),
            .clip_threshold = float(settings.clip_threshold)};
}

ChunkList update_chunks(const GptState& s, int first_chunk, int n_chunks) {
    return ChunkList{s.update_chunks, s.host_update_chunks}.part(first_chunk, n_chunks);
}

ChunkList chunks_of(const GptState& s, const RuleState& rule) {
    return update_chunks(s, rule.first_chunk, rule.n_chunks);
}

ChunkArray own_gradients(const GptState& s, ChunkArray::Access access) {
    return {{s.own_grad, Dtype::fp32}, &ops::Chunk::begin, access};
}

void add_squares(GptState& s) {
    for (Pieces pieces(s, {s.own_chunks, s.host_own_chunks}, {own_gradients(s, ChunkArray::reads)}); pieces.next();)
        run(s.stream, ops::squared_sums,
            {.out = s.sums, .values = pieces[0].as<float>(), .chunks = pieces.chunks(), .n_chunks = pieces.n_chunks()},
            pieces.note());
}

void wait_outside_update(GptState& s, const Comm& comm, Ticket ticket) {
    if (ticket.number == 0) return;
    s.update_time.stop(s.stream);
    wait(ticket, comm, s.stream);
    s.update_time.start(s.stream);
}

void add_over(GptState& s, const Comm& comm, double* sums, size_t count) {
    wait_outside_update(s, comm, all_reduce_sum(sums, count, comm, s.stream));
}

void apply_directions(GptState& s, const ChunkList& chunks, View direction, bool cautious, const float* trust_ratios) {
    for (Pieces pieces(s, chunks,
                       {{s.master, &ops::Chunk::begin, ChunkArray::updates},
                        rounded_masters(s),
                        {direction, &ops::Chunk::state_begin, ChunkArray::reads}});
         pieces.next();)
        run(s.stream, ops::apply_direction,
            {.master = pieces[0],
             .param = pieces[1],
             .direction = pieces[2],
             .chunks = pieces.chunks(),
             .scalars = s.update_scalars,
             .grad_norm = s.grad_norm,
             .n_chunks = pieces.n_chunks(),
             .cautious = cautious,
             .trust_ratios = trust_ratios},
            pieces.note());
}

// average = (1 - average_weight) average + average_weight master
static void update_average(GptState& s) {
    for (Pieces pieces(
             s, {s.update_chunks, s.host_update_chunks},
             {{s.average, &ops::Chunk::begin, ChunkArray::updates}, {s.master, &ops::Chunk::begin, ChunkArray::reads}});
         pieces.next();) {
        FlatRange elements{0, owned_elements(s)};
        if (s.offload.has(s.average)) {
            elements = {elements.end, 0};  // the chunks of several optimizers are not in the order of the elements
            for (const ops::Chunk& chunk : pieces.host_chunks())
                elements = {std::min(elements.begin, chunk.begin),
                            std::max(elements.end, chunk.begin + size_t(chunk.count))};
        }
        const View average = pieces[0].from(elements.begin), master = pieces[1].from(elements.begin);
        run(s.stream, ops::scaled_add,
            {.out = average,
             .a = average,
             .b = master,
             .count = elements.end - elements.begin,
             .alpha = float(1 - s.step.average_weight),
             .beta = float(s.step.average_weight)});
    }
}

void update(GptState& s) {
    const StepSums sums = step_sums(s);
    s.update_time.start(s.stream);
    add_squares(s);
    if (s.group.comm.rank > 0)  // every rank of the group has the losses; rank 0 counts them
        clear(s.sums + sums.loss(0, 0), sums.losses, s.stream);
    add_over(s, s.comms.world, s.sums, sums.count());
    run(s.stream, ops::grad_norm_finish,
        {.out = s.grad_norm,
         .sums = s.sums,
         .loss_scale = s.loss_scale,
         .n_tensors = int(s.layout.names.size()),
         .clip = float(s.options.optimizer.grad_clip)});

    // Without shards, a rank measures only its own part of the gradients, so that each is counted once, but updates all
    // parameters.
    begin_matrices(s);
    for (const RuleState& rule : s.update.rules) {
        if (optimizer_row(rule.rule).is_layerwise()) clear(s.trust.sums, 2 * s.trust.n_sums, s.stream);
        switch (optimizer_row(rule.rule).scope) {
            case UpdateScope::element: update_by_element(s, rule, nullptr); break;
            case UpdateScope::layer: update_by_layer(s, rule); break;
            case UpdateScope::factors: update_by_factors(s, rule); break;
            case UpdateScope::matrix: break;
        }
    }
    finish_matrices(s);
    if (s.average) update_average(s);
    end_update_of_offloaded(s);
    s.update_time.stop(s.stream);
}

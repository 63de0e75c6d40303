#include "model/plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "model/activations.h"
#include "model/arena.h"
#include "model/factors.h"
#include "model/matrices.h"
#include "model/offload.h"
#include "model/state.h"
#include "model/update.h"

static size_t bytes_of(const std::vector<MemoryRegion>& regions, bool on_host) {
    size_t bytes = 0;
    for (const MemoryRegion& region : regions)
        if (region.is_on_host == on_host) bytes += region.bytes;
    return bytes;
}

size_t planned_bytes(const GptOptions& options) { return bytes_of(plan_memory(options), false); }
size_t planned_host_bytes(const GptOptions& options) { return bytes_of(plan_memory(options), true); }

std::vector<size_t> planned_bytes_of_stages(const GptOptions& options) {
    std::vector<size_t> bytes;
    for (const std::vector<MemoryRegion>& regions : plan_memory_of_stages(options))
        bytes.push_back(bytes_of(regions, false));
    return bytes;
}

// Returns the elements of the state of whole matrices that the rank owns.
static size_t state_of_matrices(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update) {
    size_t elements = 0;
    for (const Matrix& matrix : lay_out_matrices(layout))
        for (const MatrixSlot& slot : update.row_of(size_t(matrix.tensor)).matrix_slots)
            if (matrix.owner == options.stage_rank()) elements += slot_elements(slot, matrix);
    return elements;
}

OffloadTraffic planned_traffic_of_update(const GptOptions& options) {
    OffloadTraffic traffic;
    if (!options.offload_optimizer) return traffic;
    const TensorLayout layout = lay_out_rank(options);
    const UpdateLayout update = lay_out_update(options, layout);
    const size_t master = masters_are_offloaded(options) ? size_of(options.optimizer.master_type()) : 0;
    const size_t grad = options.offload_gradients ? sizeof(float) : 0;
    const size_t param = options.offload_weights && !options.computes_with_masters() ? size_of(options.precision) : 0;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const size_t count = owned_part(options, layout, layout.tensors[i]).count;
        const OptimizerRow& row = update.row_of(i);
        const size_t state = row.slots.size() * size_of(options.optimizer.state_type());
        size_t again = grad;                                                  // for the norm
        if (row.scope == UpdateScope::layer) again += master + state + grad;  // for the trust ratios
        if (row.scope == UpdateScope::factors) again += master + 2 * grad;    // for the averages and the directions
        traffic.to_device += count * (master + state + param + grad + again);
        traffic.to_host += count * (master + state + param + (row.scope == UpdateScope::factors ? grad : 0));
        if (!options.averages) continue;
        traffic.to_device += count * (sizeof(float) + master);
        traffic.to_host += count * sizeof(float);
    }
    const size_t of_matrices = state_of_matrices(options, layout, update) * sizeof(float);
    return traffic + OffloadTraffic{of_matrices, of_matrices};
}

static OffloadTraffic traffic_of_inputs(const GptOptions& options) {
    if (!options.offload_activations) return {};
    size_t layers = 0;
    for (const LayerRange& range : own_layers(options)) layers += size_t(range.count);
    const size_t input = residual_elements(options) * size_of(options.precision);
    const size_t inputs = size_t(options.micro_steps) * layers * input;
    return {inputs, inputs};
}

// Counts the elements of the buckets that are not in their slots yet.
static size_t fetched(const TensorLayout& layout, const std::vector<int>& buckets, std::array<int, kSlots>& slots) {
    size_t elements = 0;
    for (const int bucket : buckets)
        if (std::exchange(slots[size_t(slot_of(layout, bucket))], bucket) != bucket)
            elements += layout.bucket_elements(bucket);
    return elements;
}

static OffloadTraffic traffic_of_slots(const GptOptions& options) {
    if (!options.offload_weights && !options.offload_gradients) return {};
    const TensorLayout layout = lay_out_rank(options);
    std::vector<int> forward = layout.input_buckets;
    for (const std::vector<int>& more : {layout.layer_buckets, layout.output_buckets})
        forward.insert(forward.end(), more.begin(), more.end());
    const std::vector<int> backward(forward.rbegin(), forward.rend());
    std::array<int, kSlots> weights, gradients;
    weights.fill(-1), gradients.fill(-1);
    OffloadTraffic traffic;
    const size_t weight_bytes = options.offload_weights ? size_of(options.precision) : 0;
    const size_t grad_bytes = options.offload_gradients ? sizeof(float) : 0;
    for (int micro_step = 0; micro_step < options.micro_steps; micro_step++) {
        traffic.to_device += fetched(layout, forward, weights) * weight_bytes;
        traffic.to_device += fetched(layout, backward, weights) * weight_bytes;
        const size_t sums = fetched(layout, backward, gradients);
        if (micro_step > 0) traffic.to_device += sums * grad_bytes;
        traffic.to_host += layout.elements * grad_bytes;
    }
    return traffic;
}

OffloadTraffic planned_traffic_of_passes(const GptOptions& options) {
    return traffic_of_inputs(options) + traffic_of_slots(options);
}

TokenWork token_work(const GptShape& shape, int seq_len) {
    const TensorLayout layout = lay_out_tensors(shape);
    TokenWork work{int64_t(layout.parameters), 0};
    if (shape.has_head()) work.parameters -= int64_t(layout.tensors[0].count);  // wte
    for (int layer = 0; layer < shape.n_layer; layer++) work.attended += shape.attended(layer, seq_len);
    return work;
}

// A forward pass gathers the rows twice per layer and sums them twice; a backward pass does the same, and gathers the
// inputs of qkv and fc again. A recomputed layer needs all but its last sum.
std::vector<std::array<PassWork, 3>> work_of_parts(const GptOptions& options) {
    const std::vector<double> work = layer_work(options);
    const bool defers = options.pipeline.defers_weights(), recomputes = options.recompute == Recompute::block;
    const GptShape& shape = options.shape;
    std::vector<std::array<PassWork, 3>> parts;
    for (const LayerRange& range : own_layers(options)) {
        auto& [forward, backward, weights] = parts.emplace_back();
        double layers = 0, linear = 0;
        for (int layer = range.first; layer < range.end(); layer++)
            layers += 2 * work[size_t(layer)],
                linear += 2 * (work[size_t(layer)] - 2 * shape.attended(layer, options.seq_len));
        const int embeds = range.first == 0, has_head = range.end() == shape.n_layer;
        const double head = has_head ? 2 * work.back() : 0;
        forward = {layers, 4 * range.count + embeds};
        backward = {2 * layers + 3 * head + (recomputes ? layers : 0),
                    (recomputes ? 9 : 6) * range.count + embeds + 2 * has_head};
        if (defers) weights = {linear, 4 * range.count}, backward.flops_per_token -= linear;
        if (defers) backward.collectives -= 2 * range.count;
        forward.attention_flops = layers - linear, backward.attention_flops = 2 * (layers - linear);
        // Keys and values in the compute type; in backward also 3/4 of their gradients, in FP32: see attention.cpp.
        const double ring = 2.0 * shape.kv_heads() * shape.head_size() * range.count;
        forward.ring_bytes_per_token = ring * double(size_of(options.precision));
        backward.ring_bytes_per_token = ring * (double(size_of(options.precision)) + 0.75 * sizeof(float));
    }
    return parts;
}

std::string plan_row(const std::string& name, size_t bytes) {
    return format("%-22s %16zu bytes %10.1f MiB\n", name.c_str(), bytes, double(bytes) / 0x1p20);
}

size_t saved_bytes(const GptOptions& options) {
    const TensorLayout layout = lay_out_rank(options);
    const UpdateLayout update = lay_out_update(options, layout);
    size_t masters = 0, slots = 0, elements = 0;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const size_t count = layout.tensors[i].is_copy ? 0 : part_of(layout, layout.tensors[i], options.rank).count;
        masters += count, slots += count * update.row_of(i).slots.size();
        if (options.averages) elements += count;
    }
    elements += state_of_matrices(options, layout, update) + factor_elements(options, layout, update);
    const OptimizerSettings& optimizer = options.optimizer;
    return masters * size_of(optimizer.master_type()) + slots * size_of(optimizer.state_type()) +
           elements * sizeof(float);
}

std::string category_of(const MemoryRegion& region) {
    return std::string(region.category) + (region.is_on_host ? ", host" : "");
}

std::string plan_table(const GptOptions& options) {
    const std::vector<MemoryRegion> regions = plan_memory(options);
    std::vector<std::string> categories;
    for (const MemoryRegion& region : regions)
        if (const std::string category = category_of(region); !std::ranges::count(categories, category))
            categories.push_back(category);

    std::string table;
    for (const std::string& category : categories) {
        std::string rows;
        size_t bytes = 0;
        for (const MemoryRegion& region : regions) {
            if (category != category_of(region)) continue;
            rows += plan_row("    " + region.name, region.bytes);
            bytes += region.bytes;
        }
        table += plan_row(category, bytes) + rows;
    }
    table += plan_row("total", planned_bytes(options));
    if (const size_t on_host = planned_host_bytes(options)) {
        const auto [to_device, to_host] = planned_traffic(options);
        table += plan_row("total, host", on_host);
        table += format("%-22s %16zu bytes per step to the device, %zu to the host\n", "offload", to_device, to_host);
    }
    table += format("%-22s %16zu\n", "parameters", lay_out_tensors(options.shape).parameters);
    return table;
}

// Names the next key of offload.* that keeps more of a training run in host memory.
static const char* can_offload(const GptOptions& options) {
    if (!options.training) return "";
    if (!options.offload_optimizer) return ", offload.optimizer";
    if (options.ranks * options.tensor_parallel.size * options.pipeline.size > 1) return "";
    if (!options.offload_gradients && !options.deterministic_reduce) return ", offload.gradients";
    return options.offload_weights ? "" : ", offload.weights";
}

void check_fits(const GptOptions& options) {
    const size_t needed = planned_bytes(options), free_bytes = device_info().free_bytes;
    if (needed <= free_bytes || free_bytes == 0) return;  // 0: the device cannot be used, and device_alloc() fails
    fail(Exit::os,
         "not enough memory: %zu bytes needed, %zu bytes available\n%sto reduce memory, use a smaller "
         "train.batch_size (now %d) with more micro-steps, train.recompute norm or block, a smaller train.head_rows "
         "(now %d)%s%s%s",
         needed, free_bytes, plan_table(options), options.batch, options.head_rows,
         options.pipeline.size > 1 ? ", fewer layers on this stage in parallel.pipeline_layers" : "",
         can_offload(options), options.precision == Dtype::fp32 ? " or train.precision bf16" : "");
}

#include "model/offload.h"

#include <algorithm>
#include <functional>

#include "kernels/base/check.h"
#include "kernels/update_ops.h"
#include "model/state.h"

namespace {

// Bytes per parameter of the arrays that pass through a window together.
size_t window_bytes_per_element(const GptOptions& options) {
    const OptimizerSettings& optimizer = options.optimizer;
    size_t state = 0;
    for (const OptimizerKind kind : {optimizer.name, optimizer.scalar_name})
        state = std::max(state, optimizer_row(kind).slots.size() * size_of(optimizer.state_type()));
    const size_t master = size_of(optimizer.master_type());
    if (options.offload_gradients) state += sizeof(float);
    if (options.offload_weights && !options.computes_with_masters()) state += size_of(options.precision);
    return master + std::max(state, options.averages ? sizeof(float) : 0);
}

}  // namespace

bool masters_are_offloaded(const GptOptions& options) {
    return options.computes_with_masters() ? options.offload_weights : options.offload_optimizer;
}

bool OffloadState::has(ConstView array) const {
    const auto* begin = static_cast<const std::byte*>(memory.data());
    const auto* address = static_cast<const std::byte*>(array.data);
    return begin && std::less_equal<>()(begin, address) && std::less<>()(address, begin + memory.bytes());
}

void place_offload(GptState& s, Arena& arena) {
    if (!s.options.offload_optimizer) return;
    size_t longest = owned_elements(s);
    for (const RuleState& rule : s.update.rules) longest = std::max(longest, rule.elements);
    const size_t bytes = window_bytes_per_element(s.options);
    const size_t wanted = s.options.offload_window_bytes / bytes / kTensorAlignment * kTensorAlignment;
    const size_t least = size_t(ops::kChunkElements) + kTensorAlignment;
    s.offload.elements = std::min(longest, std::max(wanted, least));
    for (const int number : {0, 1})
        s.offload.windows[number] =
            arena.take<std::byte>("offload", format("window_%d", number), s.offload.elements * bytes);
}

void open_offload(GptState& s) {
    if (!s.options.offload_optimizer && !s.options.offload_activations) return;
    for (std::optional<SideStream>& copies : s.offload.copies) copies.emplace();
    for (int i = 0; i < kSlots; i++) {
        if (s.options.offload_weights) s.param_slot[i].copies.emplace();
        if (s.options.offload_gradients) s.grad_slot[i].copies.emplace();
    }
}

void end_update_of_offloaded(GptState& s) {
    for (const std::optional<SideStream>& copies : s.offload.copies)
        if (copies) wait_for(s.stream, copies->stream());
}

void copy_offloaded(GptState& s, View to, ConstView from, size_t elements, Stream copies) {
    const size_t bytes = elements * size_of(to.dtype);
    wait_for(copies, s.stream);
    copy_pinned(to.data, from.data, bytes, copies);
    (s.offload.has(to) ? s.offload.traffic.to_host : s.offload.traffic.to_device) += bytes;
}

void hold_input(const GptState& s, const Activation& input) {
    if (input.on_host) wait_for(s.stream, s.offload.stream(input.window));
}

void send_input(GptState& s, const Activation& input) {
    if (!input.on_host) return;
    copy_offloaded(s, input.on_host, input.view, residual_elements(s.options), s.offload.stream(input.window));
}

void fetch_input(GptState& s, const Activation& input) {
    if (!input.on_host) return;
    copy_offloaded(s, input.view, input.on_host, residual_elements(s.options), s.offload.stream(input.window));
}

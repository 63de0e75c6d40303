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
    return master + std::max(state, options.averages ? sizeof(float) : 0);
}

}  // namespace

bool masters_are_offloaded(const GptOptions& options) {
    return options.offload_optimizer && !options.computes_with_masters();
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
}

void end_update_of_offloaded(GptState& s) {
    for (const std::optional<SideStream>& copies : s.offload.copies)
        if (copies) wait_for(s.stream, copies->stream());
}

void hold_input(const GptState& s, const Activation& input) {
    if (input.on_host) wait_for(s.stream, s.offload.stream(input.window));
}

static void copy_input(GptState& s, const Activation& input, View to, View from, size_t& traffic) {
    if (!input.on_host) return;
    const size_t bytes = residual_elements(s.options) * size_of(input.view.dtype);
    wait_for(s.offload.stream(input.window), s.stream);
    copy_pinned(to.data, from.data, bytes, s.offload.stream(input.window));
    traffic += bytes;
}

void send_input(GptState& s, const Activation& input) {
    copy_input(s, input, input.on_host, input.view, s.offload.traffic.to_host);
}

void fetch_input(GptState& s, const Activation& input) {
    copy_input(s, input, input.view, input.on_host, s.offload.traffic.to_device);
}

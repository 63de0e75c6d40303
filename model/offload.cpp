#include "model/offload.h"

#include <algorithm>
#include <functional>

#include "kernels/base/check.h"
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

Pieces::Pieces(GptState& s, int first_chunk, int n_chunks, std::initializer_list<ChunkArray> arrays)
    : s_(s), end_(first_chunk + n_chunks), n_arrays_(arrays.size()), upcoming_{first_chunk, n_chunks} {
    require(arrays.size() <= kMaxArrays, "an op on chunks has %zu arrays, at most %zu", arrays.size(), kMaxArrays);
    std::ranges::copy(arrays, arrays_.begin());
    for (size_t i = 0; i < n_arrays_; i++) {
        views_[i] = arrays_[i].array;
        is_any_offloaded_ = is_any_offloaded_ || is_offloaded(i);
    }
    if (!is_any_offloaded_) return;
    for (const int window : {0, 1})
        wait_for(s.offload.stream(window), s.offload.stream(1 - window));  // pieces of the op before
    upcoming_ = range_from(first_chunk);
    copy(upcoming_, 1 - window_, true);
}

bool Pieces::is_offloaded(size_t number) const { return s_.offload.has(arrays_[number].array); }

// The first element in a window whose first chunk is this one. Its alignment is the same as in the array.
static size_t window_begin(const ops::Chunk& first, size_t ops::Chunk::*place) {
    return first.*place / kTensorAlignment * kTensorAlignment;
}

// Returns the longest range of chunks whose elements fit into a window.
Pieces::Range Pieces::range_from(int first) const {
    const ops::Chunk* const chunks = s_.host_update_chunks.data();
    Range range{first, 0};
    const auto fits = [&](const ops::Chunk& chunk) {
        for (size_t i = 0; i < n_arrays_; i++) {
            const size_t begin = window_begin(chunks[first], arrays_[i].place), place = chunk.*arrays_[i].place;
            if (is_offloaded(i) && (place < begin || place + size_t(chunk.count) > begin + s_.offload.elements))
                return false;
        }
        return true;
    };
    while (first + range.count < end_ && fits(chunks[first + range.count])) range.count++;
    return range;
}

View Pieces::in_window(size_t number, const Range& range, int window) const {
    size_t bytes = 0;  // of the arrays before it
    for (size_t i = 0; i < number; i++)
        if (is_offloaded(i)) bytes += s_.offload.elements * size_of(arrays_[i].array.dtype);
    View view = arrays_[number].array;
    view.data = s_.offload.windows[window] + bytes -
                window_begin(s_.host_update_chunks[size_t(range.first)], arrays_[number].place) * size_of(view.dtype);
    return view;
}

// Copies the elements of the chunks between the arrays and a window, successive ones together.
void Pieces::copy(const Range& range, int window, bool to_device) {
    if (range.count == 0) return;
    const ops::Chunk* const chunks = s_.host_update_chunks.data();
    size_t& traffic = to_device ? s_.offload.traffic.to_device : s_.offload.traffic.to_host;
    for (size_t i = 0; i < n_arrays_; i++) {
        if (!is_offloaded(i) || !(to_device || arrays_[i].is_written)) continue;
        const View host = arrays_[i].array, device = in_window(i, range, window);
        for (int next = range.first; next < range.first + range.count;) {
            const size_t begin = chunks[next].*arrays_[i].place;
            size_t end = begin;
            while (next < range.first + range.count && chunks[next].*arrays_[i].place == end)
                end += size_t(chunks[next++].count);
            const View from = (to_device ? host : device).from(begin), to = (to_device ? device : host).from(begin);
            const size_t bytes = (end - begin) * size_of(host.dtype);
            copy_pinned(to.data, from.data, bytes, s_.offload.stream(window));
            traffic += bytes;
        }
    }
}

bool Pieces::next() {
    const bool is_first = !is_started_;
    is_started_ = true;
    if (!is_any_offloaded_) {
        current_ = upcoming_;
        return is_first;
    }
    if (!is_first) {
        wait_for(s_.offload.stream(window_), s_.stream);
        copy(current_, window_, false);
    }
    current_ = upcoming_, window_ = 1 - window_;
    if (current_.count == 0) return false;
    for (size_t i = 0; i < n_arrays_; i++)
        if (is_offloaded(i)) views_[i] = in_window(i, current_, window_);
    wait_for(s_.stream, s_.offload.stream(window_));
    upcoming_ = range_from(current_.first + current_.count);
    copy(upcoming_, 1 - window_, true);
    return true;
}

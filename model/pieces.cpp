#include "model/pieces.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "model/offload.h"
#include "model/state.h"

Pieces::Pieces(GptState& s, const ChunkList& chunks, std::initializer_list<ChunkArray> arrays)
    : s_(s), chunks_(chunks), n_arrays_(arrays.size()), upcoming_{0, int(chunks.host.size())} {
    require(arrays.size() <= kMaxArrays, "an op on chunks has %zu arrays, at most %zu", arrays.size(), kMaxArrays);
    std::ranges::copy(arrays, arrays_.begin());
    for (size_t i = 0; i < n_arrays_; i++) {
        views_[i] = arrays_[i].array;
        is_any_offloaded_ = is_any_offloaded_ || is_offloaded(i);
    }
    if (!is_any_offloaded_) return;
    for (const int window : {0, 1})
        wait_for(s.offload.stream(window), s.offload.stream(1 - window));  // pieces of the op before
    upcoming_ = range_from(0);
    copy(upcoming_, 1 - window_, true);
}

bool Pieces::is_offloaded(size_t number) const { return s_.offload.has(arrays_[number].array); }

// The first element in a window whose first chunk is this one. Its alignment is the same as in the array.
static size_t window_begin(const ops::Chunk& first, size_t ops::Chunk::*place) {
    return first.*place / kTensorAlignment * kTensorAlignment;
}

// Returns the longest range of chunks whose elements fit into a window.
Pieces::Range Pieces::range_from(int first) const {
    const std::span<const ops::Chunk> chunks = chunks_.host;
    Range range{first, 0};
    const auto fits = [&](const ops::Chunk& chunk) {
        for (size_t i = 0; i < n_arrays_; i++) {
            const size_t begin = window_begin(chunks[size_t(first)], arrays_[i].place), place = chunk.*arrays_[i].place;
            if (is_offloaded(i) && (place < begin || place + size_t(chunk.count) > begin + s_.offload.elements))
                return false;
        }
        return true;
    };
    while (size_t(first + range.count) < chunks.size() && fits(chunks[size_t(first + range.count)])) range.count++;
    return range;
}

View Pieces::in_window(size_t number, const Range& range, int window) const {
    size_t bytes = 0;  // of the arrays before it
    for (size_t i = 0; i < number; i++)
        if (is_offloaded(i)) bytes += s_.offload.elements * size_of(arrays_[i].array.dtype);
    View view = arrays_[number].array;
    view.data = s_.offload.windows[window] + bytes -
                window_begin(chunks_.host[size_t(range.first)], arrays_[number].place) * size_of(view.dtype);
    return view;
}

// Copies the elements of the chunks between the arrays and a window, successive ones together.
void Pieces::copy(const Range& range, int window, bool to_device) {
    if (range.count == 0) return;
    const ops::Chunk* const chunks = chunks_.host.data();
    size_t& traffic = to_device ? s_.offload.traffic.to_device : s_.offload.traffic.to_host;
    for (size_t i = 0; i < n_arrays_; i++) {
        if (!is_offloaded(i) || (!to_device && arrays_[i].access == ChunkArray::reads)) continue;
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

OpNote Pieces::note() const {
    OpNote note;
    if (!s_.stream.trace) return note;
    for (const ops::Chunk& chunk : host_chunks()) note.elements += size_t(chunk.count);
    return note;
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

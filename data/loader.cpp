#include "data/loader.h"

#include <algorithm>

#include "data/permutation.h"
#include "kernels/check.h"

static uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Windows that cover every target of the stream: seq_len in the first, window_stride() in each that follows.
static uint64_t windows_of_pass(const TokenStream& stream, const LoaderOptions& options) {
    uint64_t targets = stream.token_count() > 0 ? stream.token_count() - 1 : 0, first = uint64_t(options.seq_len);
    if (targets <= first) return targets > 0 ? 1 : 0;
    const uint64_t all = 1 + divide_up(targets - first, options.window_stride());
    return options.max_windows > 0 ? std::min(all, options.max_windows) : all;
}

// Checks the options; returns the number of windows in an epoch.
static uint64_t checked_window_count(const TokenStream& stream, const LoaderOptions& options) {
    require(options.seq_len > 0 && options.batch > 0, "loader: seq_len %d, batch %d", options.seq_len, options.batch);
    require(0 <= options.rank && options.rank < options.world, "loader: rank %d of %d", options.rank, options.world);
    require(options.micro_steps > 0, "loader: %d micro-steps", options.micro_steps);
    require(0 <= options.stride && options.stride <= options.seq_len, "loader: stride %d", options.stride);
    bool is_single_pass = options.order == SampleOrder::once;
    uint64_t needed = is_single_pass ? 1 : options.rows_of_all_ranks();
    uint64_t windows = is_single_pass ? windows_of_pass(stream, options) : stream.window_count(options.seq_len);
    if (windows < needed)
        fail(Exit::config,
             "the data set is too small: %s (%llu tokens) gives %llu sequences of seq_len %d, but batch_size %d on %d "
             "ranks needs %llu",
             stream.description(), (unsigned long long)stream.token_count(), (unsigned long long)windows,
             options.seq_len, options.batch, options.world, (unsigned long long)needed);
    return windows;
}

Loader::Loader(const TokenStream& stream, const LoaderOptions& options, uint64_t cursor)
    : stream_(stream), options_(options), windows_(checked_window_count(stream, options)) {
    size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    for (Slot& slot : slots_) slot.inputs.resize(tokens), slot.targets.resize(tokens);
    window_.resize(size_t(options.seq_len) + 1);
    seek(cursor);
}

Batch Loader::next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return filled_ > taken_; });
    const Slot& slot = slots_[taken_ % kSlots];
    if (slot.error) std::rethrow_exception(slot.error);
    taken_++;
    cursor_ += options_.rows_of_all_ranks();
    changed_.notify_all();
    return {slot.inputs.data(), slot.targets.data()};
}

void Loader::seek(uint64_t cursor) {
    thread_ = std::jthread();  // stops the old one
    cursor_ = first_cursor_ = cursor;
    filled_ = taken_ = 0;
    thread_ = std::jthread([this](std::stop_token stop) { prefetch(stop); });
}

uint64_t Loader::batches_per_pass() const { return divide_up(windows_, options_.rows_of_all_ranks()); }

void Loader::prefetch(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    // The batch that the caller holds keeps its slot.
    auto has_free_slot = [this] { return filled_ + 1 < taken_ + kSlots; };
    while (changed_.wait(lock, stop, has_free_slot) && !stop.stop_requested()) {
        const uint64_t first = first_sample(first_cursor_, filled_);
        Slot& slot = slots_[filled_ % kSlots];
        lock.unlock();
        fill(slot, first);
        lock.lock();
        filled_++;
        changed_.notify_all();
    }
}

// The first of this rank's samples in the batch `number` after `first_cursor`.
uint64_t Loader::first_sample(uint64_t first_cursor, uint64_t number) const {
    const uint64_t micro_steps = uint64_t(options_.micro_steps), micro = number % micro_steps;
    const uint64_t step_begin = first_cursor + (number - micro) * options_.rows_of_all_ranks();
    return step_begin + (uint64_t(options_.rank) * micro_steps + micro) * uint64_t(options_.batch);
}

void Loader::fill(Slot& slot, uint64_t first) {
    const uint64_t seq_len = uint64_t(options_.seq_len);
    slot.error = nullptr;
    try {
        for (uint64_t row = 0; row < uint64_t(options_.batch); row++)
            fill_row(first + row, slot.inputs.data() + row * seq_len, slot.targets.data() + row * seq_len);
    } catch (...) {
        slot.error = std::current_exception();
    }
}

void Loader::fill_row(uint64_t sample, int32_t* inputs, int32_t* targets) {
    const bool is_single_pass = options_.order == SampleOrder::once, is_beyond = is_single_pass && sample >= windows_;
    const uint64_t seq_len = uint64_t(options_.seq_len), stride = is_single_pass ? options_.window_stride() : seq_len;
    const uint64_t window = window_of(sample), begin = window * stride;
    const uint64_t last = stream_.token_count() - 1;  // is never an input
    const size_t count = size_t(!is_beyond && begin < last ? std::min(seq_len, last - begin) : 0);
    if (count > 0) stream_.read(begin, count + 1, window_.data());
    std::copy_n(window_.data(), count, inputs);
    std::copy_n(window_.data() + 1, count, targets);
    std::fill(inputs + count, inputs + seq_len, 0);
    std::fill(targets + count, targets + seq_len, -1);
    if (window > 0) std::fill(targets, targets + (seq_len - stride), -1);  // the previous window has these
}

uint64_t Loader::window_of(uint64_t sample) const {
    if (options_.order == SampleOrder::once) return std::min(sample, windows_);
    uint64_t epoch = sample / windows_, index = sample % windows_;
    if (options_.order == SampleOrder::sequential) return index;
    return Permutation(windows_, options_.seed, uint32_t(epoch))(index);
}

#include "data/loader.h"

#include <algorithm>

#include "data/permutation.h"
#include "kernels/check.h"

static uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

static uint64_t rows_of_all_ranks(const LoaderOptions& options) {
    return uint64_t(options.batch) * uint64_t(options.world);
}

static uint64_t stride_of(const LoaderOptions& options) {
    return uint64_t(options.stride > 0 ? options.stride : options.seq_len);
}

// Windows that give every target of the stream: seq_len in the first, the stride in each that follows.
static uint64_t windows_of_pass(const TokenStream& stream, const LoaderOptions& options) {
    uint64_t targets = stream.token_count() > 0 ? stream.token_count() - 1 : 0, first = uint64_t(options.seq_len);
    if (targets <= first) return targets > 0 ? 1 : 0;
    const uint64_t all = 1 + divide_up(targets - first, stride_of(options));
    return options.max_windows > 0 ? std::min(all, options.max_windows) : all;
}

// Windows of an epoch, once it is clear that the options and the stream fit together.
static uint64_t checked_window_count(const TokenStream& stream, const LoaderOptions& options) {
    require(options.seq_len > 0 && options.batch > 0, "loader: seq_len %d, batch %d", options.seq_len, options.batch);
    require(0 <= options.rank && options.rank < options.world, "loader: rank %d of %d", options.rank, options.world);
    require(options.micro_steps > 0, "loader: %d micro-steps", options.micro_steps);
    require(0 <= options.stride && options.stride <= options.seq_len, "loader: stride %d", options.stride);
    bool is_single_pass = options.order == SampleOrder::once;
    uint64_t needed = is_single_pass ? 1 : rows_of_all_ranks(options);
    uint64_t windows = is_single_pass ? windows_of_pass(stream, options) : stream.window_count(options.seq_len);
    if (windows < needed)
        fail(Exit::config,
             "the data set is too small: %s (%llu tokens) gives %llu sequences of seq_len %d, but batch_size %d on %d "
             "ranks needs %llu",
             stream.description().c_str(), (unsigned long long)stream.token_count(), (unsigned long long)windows,
             options.seq_len, options.batch, options.world, (unsigned long long)needed);
    return windows;
}

Loader::Loader(const TokenStream& stream, const LoaderOptions& options, uint64_t cursor)
    : stream_(stream),
      options_(options),
      windows_(checked_window_count(stream, options)),
      cursor_(cursor),
      first_cursor_(cursor) {
    size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    for (Slot& slot : slots_) slot.inputs.resize(tokens), slot.targets.resize(tokens);
    window_.resize(size_t(options.seq_len) + 1);
    thread_ = std::thread([this] { prefetch(); });
}

Loader::~Loader() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

Batch Loader::next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return filled_ > taken_; });
    const Slot& slot = slots_[taken_ % kSlots];
    if (slot.error) std::rethrow_exception(slot.error);
    taken_++;
    cursor_ += rows_of_all_ranks(options_);
    changed_.notify_all();
    return {slot.inputs.data(), slot.targets.data()};
}

void Loader::seek(uint64_t cursor) {
    std::lock_guard lock(mutex_);
    cursor_ = first_cursor_ = cursor;
    filled_ = taken_ = 0;
    generation_++;
    changed_.notify_all();
}

uint64_t Loader::batches_per_pass() const { return divide_up(windows_, rows_of_all_ranks(options_)); }

void Loader::prefetch() {
    std::unique_lock lock(mutex_);
    for (;;) {
        // The batch that the caller holds keeps its slot.
        changed_.wait(lock, [this] { return stop_ || filled_ + 1 < taken_ + kSlots; });
        if (stop_) return;
        uint64_t generation = generation_;
        uint64_t first = first_sample(first_cursor_, filled_);
        Slot& slot = slots_[filled_ % kSlots];
        lock.unlock();
        fill(slot, first);
        lock.lock();
        if (generation != generation_) continue;
        filled_++;
        changed_.notify_all();
    }
}

// The first of this rank's samples in the batch `number` after `first_cursor`.
uint64_t Loader::first_sample(uint64_t first_cursor, uint64_t number) const {
    const uint64_t micro_steps = uint64_t(options_.micro_steps), micro = number % micro_steps;
    const uint64_t step_begin = first_cursor + (number - micro) * rows_of_all_ranks(options_);
    return step_begin + (uint64_t(options_.rank) * micro_steps + micro) * uint64_t(options_.batch);
}

void Loader::fill(Slot& slot, uint64_t first) {
    slot.error = nullptr;
    size_t seq_len = size_t(options_.seq_len);
    try {
        for (int row = 0; row < options_.batch; row++)
            fill_row(first + uint64_t(row), slot.inputs.data() + size_t(row) * seq_len,
                     slot.targets.data() + size_t(row) * seq_len);
    } catch (...) {
        slot.error = std::current_exception();
    }
}

void Loader::fill_row(uint64_t sample, int32_t* inputs, int32_t* targets) {
    uint64_t seq_len = uint64_t(options_.seq_len);
    uint64_t window = window_of(sample);
    uint64_t begin = window * (options_.order == SampleOrder::once ? stride_of(options_) : seq_len);
    uint64_t last = stream_.token_count() - 1;  // is never an input
    const bool is_beyond = options_.order == SampleOrder::once && sample >= windows_;
    size_t count = size_t(!is_beyond && begin < last ? std::min(seq_len, last - begin) : 0);
    if (count > 0) stream_.read(begin, count + 1, window_.data());
    std::copy_n(window_.data(), count, inputs);
    std::copy_n(window_.data() + 1, count, targets);
    std::fill(inputs + count, inputs + seq_len, 0);
    std::fill(targets + count, targets + seq_len, -1);
    if (options_.order == SampleOrder::once && window > 0)
        std::fill(targets, targets + (seq_len - stride_of(options_)), -1);  // the window before gave these
}

uint64_t Loader::window_of(uint64_t sample) const {
    if (options_.order == SampleOrder::once)
        return std::min(sample, windows_);  // beyond the end there is nothing to read
    uint64_t epoch = sample / windows_, index = sample % windows_;
    if (options_.order == SampleOrder::sequential) return index;
    return Permutation(windows_, options_.seed, uint32_t(epoch))(index);
}

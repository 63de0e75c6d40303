#include "data/shards/loader.h"

#include <algorithm>

#include "data/shards/permutation.h"
#include "kernels/base/check.h"

static uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Returns the number of windows per epoch. For order `once` the windows cover every target of the stream: seq_len
// targets in the first window, window_stride() in each later one.
static uint64_t count_windows(const TokenStream& stream, const LoaderOptions& options) {
    const uint64_t tokens = stream.token_count(), seq_len = uint64_t(options.seq_len);
    if (tokens < 2) return 0;
    if (options.order == SampleOrder::shuffled) return (tokens - 1) / seq_len;
    const uint64_t all = 1 + divide_up(tokens - std::min(tokens, seq_len + 1), options.window_stride());
    return options.max_windows > 0 ? std::min(all, options.max_windows) : all;
}

Loader::Loader(const Mixture& data, const LoaderOptions& options, uint64_t cursor, int step)
    : data_(data), options_(options) {
    require(options.order != SampleOrder::once || data.streams().size() == 1, "loader: a pass over several streams");
    for (const TokenStream& stream : data_.streams()) {
        stream_windows_.push_back(count_windows(stream, options));
        windows_ += stream_windows_.back();
        if (stream_windows_.back() == 0 && data_.streams().size() > 1)
            fail(Exit::config, "data.train: %s (%zu tokens) is too small for a sequence of seq_len %d",
                 stream.description(), stream.token_count(), options.seq_len);
    }
    const uint64_t needed = options.order == SampleOrder::once ? 1 : options.rows_of_all_ranks();
    if (windows_ < needed)
        fail(Exit::config,
             "the data set is too small: %s (%zu tokens) gives %zu sequences of seq_len %d, but batch_size %d on %d "
             "ranks needs %zu",
             data_.description(), data_.token_count(), windows_, options.seq_len, options.batch, options.world, needed);
    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    window_.resize(size_t(options.seq_len) + 1);
    for (const TokenStream& stream : data_.streams()) touched_.emplace_back(stream.shards().size());
    slots_.resize(size_t(options.micro_steps) + 2);
    for (Slot& slot : slots_) slot.inputs.resize(tokens), slot.targets.resize(tokens);
    seek(cursor, step);
}

Batch Loader::next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return filled_ > taken_; });
    const Slot& slot = slots_[taken_ % slots_.size()];
    if (slot.error) std::rethrow_exception(slot.error);
    taken_++;
    changed_.notify_all();
    return {slot.inputs.data(), slot.targets.data()};
}

std::exception_ptr Loader::wait_for_step() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return filled_ > taken_; });
    const uint64_t end = slots_[taken_ % slots_.size()].step_end;
    changed_.wait(lock, [&] { return filled_ >= end; });
    for (uint64_t number = taken_; number < end; number++)
        if (const Slot& slot = slots_[number % slots_.size()]; slot.error) return slot.error;
    return nullptr;
}

void Loader::seek(uint64_t cursor, int step) {
    thread_ = std::jthread();  // stops and joins the old thread
    first_cursor_ = step_begin_ = cursor;
    step_ = step, micro_ = 0;
    filled_ = taken_ = 0;
    thread_ = std::jthread([this](std::stop_token stop) { prefetch(stop); });
}

uint64_t Loader::batches_per_pass() const { return divide_up(windows_, options_.rows_of_all_ranks()); }

uint64_t Loader::batches_of_stream() const {
    LoaderOptions unlimited = options_;
    unlimited.max_windows = 0;
    return divide_up(count_windows(data_.streams()[0], unlimited), uint64_t(options_.batch));
}

void Loader::prefetch(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    // The slot of the batch that the caller holds is not free.
    auto has_free_slot = [this] { return filled_ + 1 < taken_ + slots_.size(); };
    while (changed_.wait(lock, stop, has_free_slot) && !stop.stop_requested()) {
        const uint64_t number = filled_;
        Slot& slot = slots_[number % slots_.size()];
        lock.unlock();
        slot.error = nullptr;
        try {
            fill(slot, number);
        } catch (...) {
            slot.error = std::current_exception();
        }
        lock.lock();
        filled_++;
        changed_.notify_all();
    }
}

// Reads this rank's rows of batch `number`.
void Loader::fill(Slot& slot, uint64_t number) {
    const uint64_t batch = uint64_t(options_.batch), seq_len = uint64_t(options_.seq_len);
    const int of_step = options_.micro_steps_of ? options_.micro_steps_of(step_) : options_.micro_steps;
    const uint64_t micro_steps = uint64_t(of_step), micro = uint64_t(micro_);
    const uint64_t first = step_begin_ + (uint64_t(options_.rank) * micro_steps + micro) * batch;
    slot.step_end = number + micro_steps - micro;
    if (++micro_ == of_step) step_++, micro_ = 0, step_begin_ += micro_steps * options_.rows_of_all_ranks();
    for (uint64_t row = 0; row < batch; row++)
        fill_row(first + row, slot.inputs.data() + row * seq_len, slot.targets.data() + row * seq_len);
    check_shards();
}

// Called after the tokens are read, to also detect a shard that changes during the read.
void Loader::check_shards() {
    for (size_t stream = 0; stream < touched_.size(); stream++) {
        std::vector<bool>& touched = touched_[stream];
        for (auto shard = std::ranges::find(touched, true); shard != touched.end();
             shard = std::find(shard, touched.end(), true)) {
            *shard = false;
            data_.streams()[stream].shards()[size_t(shard - touched.begin())].file().check_unchanged();
        }
    }
}

void Loader::fill_row(uint64_t sample, int32_t* inputs, int32_t* targets) {
    if (options_.order == SampleOrder::once) return fill_window(0, sample, inputs, targets);
    const auto [stream, index] = data_.source_of(sample, options_.seed);
    const uint64_t windows = stream_windows_[stream], seed = data_.stream_seed(stream, options_.seed);
    fill_window(stream, permuted(index % windows, windows, seed, uint32_t(index / windows)), inputs, targets);
}

void Loader::fill_window(size_t number, uint64_t window, int32_t* inputs, int32_t* targets) {
    const TokenStream& stream = data_.streams()[number];
    const uint64_t seq_len = uint64_t(options_.seq_len);
    const uint64_t stride = options_.order == SampleOrder::once ? options_.window_stride() : seq_len;
    size_t count = 0;  // targets before the end of the stream
    if (window < stream_windows_[number]) {
        const uint64_t begin = window * stride;
        count = size_t(std::min(seq_len, stream.token_count() - 1 - begin));
        for (size_t shard = stream.shard_at(begin); shard <= stream.shard_at(begin + count); shard++)
            touched_[number][shard] = true;
        stream.read(begin, count + 1, window_.data());
        std::copy_n(window_.begin(), count, inputs);
        std::copy_n(window_.begin() + 1, count, targets);
    }
    std::fill(inputs + count, inputs + seq_len, 0);
    std::fill(targets + count, targets + seq_len, -1);
    if (window > 0) std::fill(targets, targets + (seq_len - stride), -1);  // targets of the previous window
}

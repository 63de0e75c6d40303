// Micro-batches for training and evaluation, prefetched by a thread.
//
// The order of samples is a pure function of (seed, cursor). Sample s, counted over all ranks from the start of the
// run, is window permuted(s % windows) of the TokenStream, by the permutation of (seed, s / windows). In a mixture,
// sample s is sample i of one stream; the same formula applies to i with the windows and seed of that stream. A step of
// k micro-batches on each of W ranks at cursor c reads the samples [c, c + k W batch): row b of micro-batch m on rank r
// is sample c + (r k + m) batch + b. Each micro-batch advances the cursor by W batch. Between steps, the cursor is the
// complete state of the loader; with a ramp of k,
// the cursor and the number of the step.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

#include "data/shards/mixture.h"
#include "data/shards/shards.h"  // IWYU pragma: export
#include "kernels/base/batch.h"

enum class SampleOrder {
    shuffled,  // training: repeated epochs, each in a different order
    once,      // evaluation: every target of the stream exactly once, in order. The last, partial window and the rows
               // after the end are padded with target -1
};

struct LoaderOptions {
    int seq_len = 0;  // at least 1
    int batch = 0;    // rows per rank and micro-batch, at least 1
    uint64_t seed = 0;
    SampleOrder order = SampleOrder::shuffled;
    int rank = 0, world = 1;
    // For order `once`: tokens between the starts of successive windows, 1 to seq_len; 0 means seq_len. Targets that
    // the previous window covers are -1, so that each target after the first window has at least seq_len - stride
    // tokens of context.
    int stride = 0;
    int micro_steps = 1;                          // per step on each rank, at least 1; with a ramp, the most
    std::function<int(int)> micro_steps_of = {};  // of a step, with a ramp; null: micro_steps in every step
    uint64_t max_windows = 0;  // for order `once`: maximum number of windows over all ranks; 0 means all

    uint64_t window_stride() const { return uint64_t(stride > 0 ? stride : seq_len); }
    uint64_t rows_of_all_ranks() const { return uint64_t(batch) * uint64_t(world); }  // per micro-batch
};

class Loader {
public:
    // `step`, from 1, begins at `cursor`. Copies the streams; the copies share the open shards. Order `once` requires a
    // single stream. Fails with Exit::config if the streams have fewer windows in total than a micro-batch has rows on
    // all ranks (order `once`: fewer than two tokens), or if one of several streams has no window.
    Loader(const Mixture& data, const LoaderOptions& options, uint64_t cursor = 0, int step = 1);
    Loader(const TokenStream& stream, const LoaderOptions& options, uint64_t cursor = 0, int step = 1)
        : Loader(Mixture(stream), options, cursor, step) {}

    // Returns the batch at cursor(), valid until the next call of next() or seek(). Fails with Exit::data if a token is
    // outside the vocabulary, a shard has changed since it was opened, or a block differs from its checksum, and with
    // Exit::io if a read fails. Allocates no memory.
    Batch next();

    // Called between two steps: waits until the batches of the next step have been read. Returns the first error that
    // next() would throw for them, or null. This lets the ranks agree on an error before any of them starts the step.
    std::exception_ptr wait_for_step();

    // Returns the first sample, over all ranks, of the batch that next() will return.
    uint64_t cursor() const { return first_cursor_ + taken_ * options_.rows_of_all_ranks(); }
    void seek(uint64_t cursor, int step = 1);  // `step` begins there

    // For order `once`: number of micro-batches that cover every target, equal on all ranks.
    uint64_t batches_per_pass() const;

    // For order `once`: number of micro-batches of a single rank that cover the whole stream, without max_windows.
    uint64_t batches_of_stream() const;

    // Windows per epoch over all streams; for order `once`, includes the partial window.
    uint64_t windows() const { return windows_; }

private:
    struct Slot {
        std::vector<int32_t> inputs, targets;  // (batch, seq_len)
        uint64_t step_end;                     // number of the first batch of the next step
        std::exception_ptr error;
    };

    void prefetch(std::stop_token stop);
    void fill(Slot& slot, uint64_t number);
    void fill_row(uint64_t sample, int32_t* inputs, int32_t* targets);
    void fill_window(size_t stream, uint64_t window, int32_t* inputs, int32_t* targets);
    void check_shards();

    const Mixture data_;
    const LoaderOptions options_;
    std::vector<uint64_t> stream_windows_;
    uint64_t windows_ = 0;
    std::vector<Slot> slots_;    // one batch held by the caller, the batches of the next step, one being read
    uint64_t first_cursor_ = 0;  // cursor of batch 0, the first after a seek; batch k is in slot k % slots

    // Used only by the thread, and by seek() without it: the step and micro-step of the next batch, and the step's
    // first sample.
    int step_ = 1, micro_ = 0;
    uint64_t step_begin_ = 0;
    std::vector<int32_t> window_;             // (seq_len + 1)
    std::vector<std::vector<bool>> touched_;  // (streams, shards): whether the batch has tokens of the shard

    // Shared with the thread; guarded by mutex_.
    std::mutex mutex_;
    std::condition_variable_any changed_;
    uint64_t filled_ = 0;  // batches read by the thread
    uint64_t taken_ = 0;   // batches returned by next(); the caller holds the last one
    std::jthread thread_;  // last member, so that it is stopped and joined before the others are destroyed
};

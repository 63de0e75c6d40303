// Micro-batches for training and evaluation, prefetched by a thread.
//
// The order of samples is a pure function of (seed, cursor). Sample s, counted over all ranks from the start of the
// run, is window permuted(s % windows) of the TokenStream, by the permutation of (seed, s / windows). In a mixture it
// is sample i of one of the streams, and the same holds with i and that stream's windows and seed. A step of k
// micro-batches on each of W ranks that begins at cursor c reads the samples [c, c + k W batch): row b of micro-batch m
// on rank r is sample c + (r k + m) batch + b. Each micro-batch advances the cursor by W batch; between steps it is all
// of the loader's state.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>

#include "data/shards/mixture.h"
#include "kernels/base/batch.h"

enum class SampleOrder {
    shuffled,  // training: epoch after epoch, each in a different order
    once,      // evaluation: every target of the stream exactly once, in order. The last, partial window is padded
               // with target -1; rows beyond the end consist of padding
};

struct LoaderOptions {
    int seq_len = 0;  // at least 1
    int batch = 0;    // rows per rank and micro-batch, at least 1
    uint64_t seed = 0;
    SampleOrder order = SampleOrder::shuffled;
    int rank = 0, world = 1;
    // For order `once`: distance in tokens between the beginnings of windows, 1 to seq_len; 0 means seq_len. From the
    // second window on, targets of the previous window are -1: each target has at least seq_len - stride tokens before
    // it.
    int stride = 0;
    int micro_steps = 1;       // per step on each rank, at least 1
    uint64_t max_windows = 0;  // for order `once`: at most these first windows, over all ranks; 0 means all

    uint64_t window_stride() const { return uint64_t(stride > 0 ? stride : seq_len); }
    uint64_t rows_of_all_ranks() const { return uint64_t(batch) * uint64_t(world); }  // per micro-batch
};

class Loader {
public:
    // Takes copies of the streams, which share the open shards. Fails with Exit::config if the streams together have
    // fewer windows than a micro-batch has rows on all ranks, or one of several has none (for order `once`, which takes
    // one stream: if it has fewer than two tokens).
    Loader(const Mixture& data, const LoaderOptions& options, uint64_t cursor = 0);
    Loader(const TokenStream& stream, const LoaderOptions& options, uint64_t cursor = 0)
        : Loader(Mixture(stream), options, cursor) {}

    // Returns the batch at cursor(), valid until the next call of next() or seek(). Fails if reading this batch failed:
    // with Exit::data for a token outside the vocabulary, a shard that has changed since it was opened, or a block that
    // differs from its checksum, and with Exit::io for a read that failed. Allocates nothing.
    Batch next();

    // Waits until the micro_steps batches that next() will return next have been read. Returns the first error among
    // them, which next() would throw, or null. Thus ranks can agree on an error before any of them begins the step.
    std::exception_ptr wait_for_step();

    // First sample of the batch that next() will return, over all ranks.
    uint64_t cursor() const { return first_cursor_ + taken_ * options_.rows_of_all_ranks(); }
    void seek(uint64_t cursor);

    // For order `once`: number of micro-batches that have every target, the same on every rank.
    uint64_t batches_per_pass() const;

    // Of an epoch, of all streams together; for order `once` including the partial one.
    uint64_t windows() const { return windows_; }

private:
    struct Slot {
        std::vector<int32_t> inputs, targets;  // (batch, seq_len)
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
    std::vector<Slot> slots_;    // one held by the caller, those of the next step, one being read
    uint64_t first_cursor_ = 0;  // of batch 0; batches are counted since the last seek, batch k is in slot k % slots

    // The thread's.
    std::vector<int32_t> window_;             // (seq_len + 1)
    std::vector<std::vector<bool>> touched_;  // (streams, shards): those that the batch has tokens of

    // Shared with the thread, under the mutex.
    std::mutex mutex_;
    std::condition_variable_any changed_;
    uint64_t filled_ = 0;  // batches read by the thread
    uint64_t taken_ = 0;   // batches returned by next(); the caller holds the last of them
    std::jthread thread_;  // last: its destructor stops and joins it while the other members exist
};

// Micro-batches for training and evaluation, read ahead by a thread.
//
// The order of samples is a pure function of (seed, cursor). Sample s, counted over all ranks from the start of the
// run, is window permutation(seed, s / windows)(s % windows). A step of k micro-batches on each of W ranks that begins
// at cursor c reads the samples [c, c + k W batch) whatever W is: micro-batch m of rank r has row b from sample
// c + (r k + m) batch + b. The cursor moves by W batch with each micro-batch, and is a run's state between steps.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/token_stream.h"
#include "kernels/batch.h"

enum class SampleOrder {
    shuffled,    // epoch after epoch, each in an order of its own
    sequential,  // epoch after epoch, windows in order
    once,        // evaluation: every target of the stream exactly once, in order. The last, partial window is filled up
                 // with target -1, and so is every row beyond the end, for ever
};

struct LoaderOptions {
    int seq_len = 0;
    int batch = 0;  // rows per rank and micro-batch
    uint64_t seed = 0;
    SampleOrder order = SampleOrder::shuffled;
    int rank = 0, world = 1;
    // For order `once`: windows begin this many tokens apart, 1 to seq_len (0 means seq_len), and from the second on
    // only the targets that the window before did not have are given: each with at least seq_len - stride tokens before
    // it.
    int stride = 0;
    // Micro-batches of a step on each rank. A step's are handed out rank by rank: rank r gets numbers [r k, r k + k).
    int micro_steps = 1;
    uint64_t max_windows = 0;  // for order `once`: not more than these from the start, on all ranks together; 0: all
};

class Loader {
public:
    // The stream must outlive the loader. Exit::config, with the numbers, if the stream has fewer windows than the
    // ranks' micro-batches have rows (order `once` needs two tokens only).
    Loader(const TokenStream& stream, const LoaderOptions& options, uint64_t cursor = 0);
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    // The batch at cursor(), valid until the next call of next() or seek(). What went wrong in the reading thread, such
    // as a token outside the vocabulary, is thrown here, when the batch concerned is asked for. Allocates nothing.
    Batch next();

    uint64_t cursor() const { return cursor_; }  // first sample of the batch that next() will give, over all ranks
    void seek(uint64_t cursor);

    // For order `once`: micro-batches until every target has been given, the same on every rank.
    uint64_t batches_per_pass() const;

    uint64_t windows() const { return windows_; }  // of an epoch; for `once` including the partial one

private:
    struct Slot {
        std::vector<int32_t> inputs, targets;  // (batch, seq_len)
        std::exception_ptr error;
    };

    void prefetch();
    uint64_t first_sample(uint64_t first_cursor, uint64_t number) const;
    void fill(Slot& slot, uint64_t first);
    void fill_row(uint64_t sample, int32_t* inputs, int32_t* targets);
    uint64_t window_of(uint64_t sample) const;

    static constexpr uint64_t kSlots = 3;  // one in the caller's hands, one ready, one being read

    const TokenStream& stream_;
    const LoaderOptions options_;
    const uint64_t windows_;
    uint64_t cursor_;
    Slot slots_[kSlots];
    std::vector<int32_t> window_;  // (seq_len + 1), the thread's

    // Shared with the thread, under the mutex. Batches are counted since the last seek; batch k lies in slot k %
    // kSlots.
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t first_cursor_;    // of batch 0
    uint64_t filled_ = 0;      // batches read by the thread
    uint64_t taken_ = 0;       // batches handed out by next(); the last of them is in the caller's hands
    uint64_t generation_ = 0;  // counts seeks, so that the thread drops what it read for an older one
    bool stop_ = false;
    std::thread thread_;
};

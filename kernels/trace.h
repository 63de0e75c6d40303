// What ran when on a rank, while somebody takes a trace: ops, collectives, waits, and what the host did.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

#include "kernels/device.h"

// A moment on the axis of Timeline and Span.
inline double steady_ms(std::chrono::steady_clock::time_point moment = std::chrono::steady_clock::now()) {
    return std::chrono::duration<double, std::milli>(moment.time_since_epoch()).count();
}

// Where a span is shown: spans of a lane follow one another, those of the host may lie in each other.
enum class Lane { host, device, communication };

struct Span {
    Lane lane = Lane::host;
    std::string name;                 // "matmul_forward", "all_gather", "wait"
    std::string of = {};              // the parameter that an op works with: "qkv.weight"; or empty
    int layer = -1;                   // from 0, or -1
    std::string shape = {};           // of an op: "rows 512, n 2304, k 768"
    double flops = 0;                 // of an op
    double bytes = 0;                 // that an op moves, or that this rank sends
    double begin_ms = 0, end_ms = 0;  // by std::chrono::steady_clock
    int step = 0;                     // of Trace::begin_step(); 0: beside the steps
};

class Trace {
public:
    // What is recorded from now on belongs to this step, or 0: to none. Waits for the stream.
    void begin_step(int step, Stream stream) {
        timeline_.anchor(stream);
        const std::lock_guard lock(mutex_);
        step_ = step;
    }

    // A span from the moment at which the stream has done what it holds to that at which it has also done what
    // `queue()` adds. Of the thread that drives the device.
    template <class Queue> void record(Span span, Stream stream, Queue queue) {
        const size_t begin = timeline_.mark(stream);
        queue();
        const size_t end = timeline_.mark(stream);
        span.step = step_;
        marked_.push_back({std::move(span), begin, end});
    }

    // A span whose moments are known. From any thread.
    void add(Span span) {
        const std::lock_guard lock(mutex_);
        span.step = step_;
        added_.push_back(std::move(span));
    }

    // All spans since the last call, by their begin, the longer first. Waits for the device.
    std::vector<Span> take() {
        const std::vector<double> moments = timeline_.take_ms();
        const std::lock_guard lock(mutex_);
        for (Marked& marked : std::exchange(marked_, {})) {
            marked.span.begin_ms = moments[marked.begin], marked.span.end_ms = moments[marked.end];
            added_.push_back(std::move(marked.span));
        }
        std::ranges::stable_sort(added_, [](const Span& a, const Span& b) {
            return a.begin_ms != b.begin_ms ? a.begin_ms < b.begin_ms : a.end_ms > b.end_ms;
        });
        return std::exchange(added_, {});
    }

private:
    struct Marked {
        Span span;
        size_t begin, end;  // marks
    };

    Timeline timeline_;
    std::vector<Marked> marked_;
    std::mutex mutex_;  // guards what follows
    std::vector<Span> added_;
    int step_ = 0;  // changed by the thread that drives the device
};

// Trace::record() if there is a trace, else only queue().
template <class Queue> void record(Trace* trace, Span span, Stream stream, Queue queue) {
    if (trace)
        trace->record(std::move(span), stream, queue);
    else
        queue();
}

// What the host does until the end of a block, if there is a trace.
class HostSpan {
public:
    HostSpan(Trace* trace, const char* name) : trace_(trace), name_(name), begin_ms_(trace ? steady_ms() : 0) {}
    ~HostSpan() {
        if (trace_) trace_->add({.lane = Lane::host, .name = name_, .begin_ms = begin_ms_, .end_ms = steady_ms()});
    }
    HostSpan(const HostSpan&) = delete;
    HostSpan& operator=(const HostSpan&) = delete;

private:
    Trace* const trace_;
    const char* const name_;
    const double begin_ms_;
};

// What a rank sends in an all-reduce of `count` doubles: 2 (size - 1) / size of them, the least.
inline double all_reduce_bytes(size_t count, int size) {
    return 2.0 * (size - 1) / size * double(count * sizeof(double));
}

// Records the ops, collectives, waits and host activity of a rank, with their times.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

#include "kernels/device.h"

// A time in milliseconds, on the same clock as Timeline and Span.
inline double steady_ms(std::chrono::steady_clock::time_point moment = std::chrono::steady_clock::now()) {
    return std::chrono::duration<double, std::milli>(moment.time_since_epoch()).count();
}

// The row that shows a span. Spans of a lane do not overlap, but host spans may be nested.
enum class Lane { host, device, communication };

struct Span {
    Lane lane = Lane::host;
    std::string name;                 // "matmul_forward", "all_gather", "wait"
    std::string of = {};              // the op's parameter: "qkv.weight"; or empty
    int layer = -1;                   // from 0, or -1
    std::string shape = {};           // of an op: "rows 512, n 2304, k 768"
    double flops = 0;                 // of an op
    double bytes = 0;                 // moved by an op, or sent by this rank
    double begin_ms = 0, end_ms = 0;  // on std::chrono::steady_clock
    int step = 0;                     // of Trace::begin_step(); 0: outside the steps
};

class Trace {
public:
    // Assigns later spans to this step; 0: to no step. Waits for the stream.
    void begin_step(int step, Stream stream) {
        timeline_.anchor(stream);
        const std::lock_guard lock(mutex_);
        step_ = step;
    }

    // Calls `queue()` and records a span from the end of the work already on the stream to the end of the work that
    // `queue()` adds. Call only on the thread that drives the device.
    template <class Queue> void record(Span span, Stream stream, Queue queue) {
        const size_t begin = timeline_.mark(stream);
        queue();
        const size_t end = timeline_.mark(stream);
        span.step = step_;
        marked_.push_back({std::move(span), begin, end});
    }

    // Adds a span with known times. May be called from any thread.
    void add(Span span) {
        const std::lock_guard lock(mutex_);
        span.step = step_;
        added_.push_back(std::move(span));
    }

    // Returns all spans since the last call, ordered by start time, longer spans first. Waits for the device.
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
    std::mutex mutex_;  // guards the members below
    std::vector<Span> added_;
    int step_ = 0;  // changed by the thread that drives the device
};

// Calls Trace::record() if there is a trace, otherwise only queue().
template <class Queue> void record(Trace* trace, Span span, Stream stream, Queue queue) {
    if (trace)
        trace->record(std::move(span), stream, queue);
    else
        queue();
}

// Records a host span until the end of the scope, if there is a trace.
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

// Bytes that a rank sends in an all-reduce of `count` doubles: 2 (size - 1) / size of them, the minimum.
inline double all_reduce_bytes(size_t count, int size) {
    return 2.0 * (size - 1) / size * double(count * sizeof(double));
}

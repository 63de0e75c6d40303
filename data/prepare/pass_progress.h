// Progress lines for a long pass over the input, and its interruption by a signal.
#pragma once

#include <cstdint>

#include "kernels/base/check.h"
#include "runtime/io/process.h"

// One line of progress, without a newline.
using ProgressLine = std::function<void(const std::string&)>;

class PassProgress {
public:
    // `total`: bytes of the pass; 0 if unknown. `done`: bytes already processed by an earlier process.
    PassProgress(std::string label, uint64_t total, uint64_t done, const ProgressLine& line)
        : label_(std::move(label)), total_(total), begun_(done), done_(done), line_(line) {}

    // Prints a line after 2 seconds, then every 10 seconds. Fails with Exit::again after a stop signal.
    void advance(uint64_t bytes) {
        if (const int signal = stop_signal()) fail(Exit::again, "prepare: stopped by signal %d", signal);
        done_ += bytes;
        const double now = now_ms();
        if (now < next_ms_) return;
        next_ms_ = now + 10'000;
        const double seconds = (now - start_ms_) / 1000, rate = double(done_ - begun_) / seconds;
        std::string text = format("%s: %s", label_.c_str(), amount(double(done_)).c_str());
        if (total_ > 0) text += " of " + amount(double(total_));
        text += format(", %s/s", amount(rate).c_str());
        if (total_ > done_ && rate > 0) text += format(", %.0f s left", double(total_ - done_) / rate);
        line_(text);
    }

private:
    static std::string amount(double bytes) {
        return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
    }

    std::string label_;
    uint64_t total_, begun_, done_;
    const ProgressLine& line_;
    double start_ms_ = now_ms(), next_ms_ = start_ms_ + 2'000;
};

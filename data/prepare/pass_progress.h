// Lines about a long pass over the input, and its end when the user wants that.
#pragma once

#include "runtime/io/io.h"

// One line of progress, without a newline.
using ProgressLine = std::function<void(const std::string&)>;

class PassProgress {
public:
    // `total` bytes, or 0 if that is not known. `done`: in an earlier process.
    PassProgress(std::string label, uint64_t total, uint64_t done, const ProgressLine& line)
        : label_(std::move(label)), total_(total), begun_(done), done_(done), line_(line) {}

    // A line after 2 seconds and then every 10. Fails with Exit::again if a signal asked for an end.
    void advance(uint64_t bytes) {
        if (const int signal = stop_signal())
            fail(Exit::again, "prepare: stopped by signal %d", signal);
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

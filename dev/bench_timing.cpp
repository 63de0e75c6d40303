#include "dev/bench_timing.h"

#include <algorithm>
#include <chrono>

#include "kernels/device.h"

double host_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Times times_of(std::vector<double> milliseconds) {
    if (milliseconds.empty()) return {};
    std::sort(milliseconds.begin(), milliseconds.end());
    return {.median = milliseconds[milliseconds.size() / 2],
            .min = milliseconds.front(),
            .max = milliseconds.back(),
            .count = int(milliseconds.size())};
}

Times time_calls(const std::function<void()>& call, const Timing& timing) {
    constexpr int kMaxBatches = 200, kMaxCalls = 1000;
    double once = 0;  // by the host's clock, which limits the measurement
    for (int i = 0; i < timing.warm_up; i++) {
        const double start = host_ms();
        call();
        synchronize(Stream{});
        once = std::max(host_ms() - start, 1e-3);
    }
    const int calls = std::clamp(int(timing.batch_ms / once), 1, kMaxCalls);
    const int batches = std::clamp(int(timing.total_ms / (once * calls)), timing.least, kMaxBatches);
    std::vector<Stopwatch> watches(static_cast<size_t>(batches));
    for (Stopwatch& watch : watches) {
        watch.start(Stream{});
        for (int i = 0; i < calls; i++) call();
        watch.stop(Stream{});
    }
    synchronize(Stream{});
    std::vector<double> times;
    for (Stopwatch& watch : watches) times.push_back(watch.take_ms() / calls);
    return times_of(std::move(times));
}

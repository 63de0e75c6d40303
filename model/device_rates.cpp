#include "model/device_rates.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "kernels/ops.h"

namespace {

constexpr int kLaps = 4;  // the first warms up

// Returns the time of the fastest lap. `call` queues work on the stream.
double best_ms(const std::function<void()>& call) {
    double best = 0;
    for (int lap = 0; lap < kLaps; lap++) {
        Stopwatch watch;
        watch.start({});
        call();
        watch.stop({});
        synchronize({});
        const double ms = watch.take_ms();
        if (lap == 1 || (lap > 1 && ms < best)) best = ms;
    }
    return best;
}

}  // namespace

DeviceRates measure_device_rates(Dtype precision) {
    constexpr size_t kBytes = size_t(64) << 20;  // more than the second-level cache of a CPU core
    constexpr double kLongMs = 20;               // a GEMM that takes this long is large enough
    const DeviceBuffer from(kBytes), to(kBytes);
    DeviceRates rates;
    rates.bytes_per_s = 2000.0 * double(kBytes) / best_ms([&] { copy_on_device(to.data(), from.data(), kBytes, {}); });
    double ms = 0;
    // Uses the host's clock, because a simulated GPU's may stand still.
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    for (int size = 256; size <= 2048 && ms < kLongMs && std::chrono::steady_clock::now() < end; size *= 2) {
        const View out(to.data(), precision);
        const ConstView inp(from.data(), precision), weight = inp.from(size_t(size) * size_t(size));
        ms = best_ms([&] { ops::matmul_forward({out, nullptr, inp, weight, nullptr, size, size, size}, {}); });
        rates.flops_per_s = std::max(rates.flops_per_s, 2000.0 * size * double(size) * size / ms);
    }
    return rates;
}

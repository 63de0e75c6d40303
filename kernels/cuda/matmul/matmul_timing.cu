// Two passes: a few runs of every algorithm, then the finalists in steady state. The finalists alternate (A B C A B C
// ...), several runs per turn. All turns are queued before the first wait, so the GPU never idles, and changes of
// clocks, temperature and the power limit affect all algorithms alike. An idle GPU runs at low clocks, so there is a
// warm-up.
#include <algorithm>
#include <chrono>

#include "kernels/cuda/matmul/matmul_timing.h"
#include "kernels/device.h"

namespace {

constexpr int kFirstRuns = 3;
constexpr double kFirstMs = 300;  // time limit of the choice of finalists; the library ranks the others lower
constexpr size_t kFinalists = 6;
constexpr double kTurnMs = 2, kFinalMs = 110;      // approximate length of a turn, and of all turns
constexpr int kMaxRunsPerTurn = 8;                 // for GEMMs so small that launches dominate
constexpr int kTurns = 9, kMinTurns = 3;           // per finalist
constexpr int kWarmUpRuns = 256, kWarmUpLap = 16;  // bounds for small GEMMs, which do not warm up a GPU
constexpr std::chrono::milliseconds kWarmUp{100};

int runs_of_turn(double ms) { return std::clamp(int(kTurnMs / std::max(ms, 1e-3)), 1, kMaxRunsPerTurn); }

double median_of(std::vector<double> values) {
    const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
    std::ranges::nth_element(values, middle);
    return *middle;
}

// Milliseconds per call of each of `calls`, in turns. `ms` are estimates.
std::vector<double> take_turns(const std::vector<std::function<void()>>& calls, const std::vector<double>& ms,
                               Stream stream) {
    double round_ms = 0;
    for (const double one : ms) round_ms += runs_of_turn(one) * one;
    const int turns = std::clamp(int(kFinalMs / std::max(round_ms, 1e-3)), kMinTurns, kTurns);
    std::vector<Stopwatch> watches(size_t(turns) * calls.size());
    for (size_t i = 0; i < watches.size(); i++) {
        watches[i].start(stream);
        for (int n = 0; n < runs_of_turn(ms[i % calls.size()]); n++) calls[i % calls.size()]();
        watches[i].stop(stream);
    }
    synchronize(stream);
    std::vector<std::vector<double>> times(calls.size());
    for (size_t i = 0; i < watches.size(); i++) times[i % calls.size()].push_back(watches[i].take_ms());
    std::vector<double> medians;
    for (size_t i = 0; i < calls.size(); i++) medians.push_back(median_of(times[i]) / runs_of_turn(ms[i]));
    return medians;
}

double time_few(const std::function<void()>& call, Stream stream) {
    std::vector<Stopwatch> watches(kFirstRuns);
    call();
    for (Stopwatch& watch : watches) {
        watch.start(stream);
        call();
        watch.stop(stream);
    }
    synchronize(stream);
    std::vector<double> ms;
    for (Stopwatch& watch : watches) ms.push_back(watch.take_ms());
    return median_of(ms);
}

void warm_up(const std::function<void()>& call, Stream stream) {
    const auto end = std::chrono::steady_clock::now() + kWarmUp;
    for (int runs = 0; runs < kWarmUpRuns && std::chrono::steady_clock::now() < end; runs += kWarmUpLap) {
        for (int i = 0; i < kWarmUpLap; i++) call();
        synchronize(stream);
    }
}

std::function<void()> call_of(const RunAlgorithm& run, const MatmulAlgorithm& algorithm) {
    return [&run, algorithm] { check_cublas(run(algorithm), "cublasLtMatmul"); };
}

// Returns at most `most` algorithms that run, in the library's order, with the times of a few runs.
std::vector<TimedAlgorithm> contenders_of(const std::vector<MatmulAlgorithm>& algorithms, const RunAlgorithm& run,
                                          Stream stream, size_t most) {
    std::vector<TimedAlgorithm> contenders;
    double spent_ms = 0;
    for (size_t i = 0; i < algorithms.size() && contenders.size() < most && spent_ms < kFirstMs; i++) {
        const cublasStatus_t status = run(algorithms[i]);
        if (is_refusal(status)) continue;
        check_cublas(status, "cublasLtMatmul");
        const auto call = call_of(run, algorithms[i]);
        if (contenders.empty()) warm_up(call, stream);
        const double ms = time_few(call, stream);
        contenders.push_back({i, algorithms[i], ms});
        spent_ms += (kFirstRuns + 2) * ms;
    }
    return contenders;
}

}  // namespace

std::vector<TimedAlgorithm> time_algorithms(const std::vector<MatmulAlgorithm>& algorithms, const RunAlgorithm& run,
                                            Stream stream, size_t most) {
    std::vector<TimedAlgorithm> finalists = contenders_of(algorithms, run, stream, most);
    if (finalists.empty()) return finalists;
    std::ranges::stable_sort(finalists.begin() + 1, finalists.end(), {}, &TimedAlgorithm::ms);
    finalists.resize(std::min(finalists.size(), kFinalists));
    std::ranges::sort(finalists, {}, &TimedAlgorithm::rank);
    std::vector<std::function<void()>> calls;
    std::vector<double> ms;
    for (const TimedAlgorithm& finalist : finalists) {
        calls.push_back(call_of(run, finalist.algorithm));
        ms.push_back(finalist.ms);
    }
    const std::vector<double> steady_ms = take_turns(calls, ms, stream);
    for (size_t i = 0; i < finalists.size(); i++) finalists[i].ms = steady_ms[i];
    return finalists;
}

const TimedAlgorithm& fastest_of(const std::vector<TimedAlgorithm>& timed) {
    const double least = std::ranges::min(timed, {}, &TimedAlgorithm::ms).ms;
    return *std::ranges::find_if(timed, [&](const TimedAlgorithm& one) { return one.ms <= 1.01 * least; });
}

double time_turns(const std::function<void()>& call, Stream stream) {
    return take_turns({call}, {time_few(call, stream)}, stream)[0];
}

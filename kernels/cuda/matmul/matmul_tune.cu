// Times the algorithms of a GEMM in two passes.
//
// The first pass runs every proposal a few times. The second pass times the finalists in steady state. They alternate
// (A B C A B C ...), several GEMMs per turn. All turns are queued before the first wait, so the GPU never idles, and
// changes of clocks, temperature and the power limit affect all finalists alike. The fastest median wins; if the middle
// halves of two finalists' times overlap, the one that the library ranks higher wins.
//
// An idle GPU runs at low clocks, then briefly at clocks that it cannot sustain. So there is a warm-up before the first
// timing, and again if the last timing is older than kStaysWarm. All times are bounded: a GEMM takes at most
// kFirstMs + kFinalMs plus a few runs, a warm-up takes kWarmUp.
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul_epilogue.h"
#include "kernels/cuda/matmul/matmul_tune.h"

namespace {

constexpr int kFirstRuns = 3;
constexpr float kFirstMs = 300;  // time limit of the first pass; the library ranks the remaining proposals lower
constexpr size_t kFinalists = 6;
constexpr float kTurnMs = 2;                       // approximate length of a turn
constexpr int kMostRunsOfTurn = 8;                 // for GEMMs so small that launches dominate
constexpr int kTurns = 9, kLeastTurns = 3;         // per finalist
constexpr float kFinalMs = 110;                    // approximate length of all turns
constexpr int kWarmUpRuns = 256, kWarmUpLap = 16;  // upper bound, because small GEMMs do not warm up a GPU
constexpr std::chrono::milliseconds kWarmUp{300}, kStaysWarm{500};

// Copies of the GEMM's matrices with random elements, in memory that the destructor frees. Fails with Exit::os if
// memory is insufficient.
class Stage {
public:
    Stage(const Product& product, Stream stream) : product_(product), stream_(stream) {
        const size_t m = size_t(product.m), n = size_t(product.n), k = size_t(product.k);
        const bool gradient = product.epilogue == Epilogue::bias_gradient;
        product_.a = random_array(product.in, m * k, 1);
        product_.b = random_array(product.in, n * k, 2);
        product_.d = random_array(product.out, m * n, 3);
        if (product.bias) product_.bias = random_array(product.out, gradient ? n : m, 4);
        if (product.aux) product_.aux = random_array(product.out, m * n, 5);
        if (gradient) sums_ = DeviceBuffer(column_sums_scratch_bytes(product.k, product.n));
    }

    const Product& product() const { return product_; }

    void sum_columns() const {
        column_sums({.out = static_cast<float*>(product_.bias),
                     .scratch = static_cast<float*>(sums_.data()),
                     .values = ConstView(product_.b, product_.in),
                     .rows = product_.k,
                     .cols = product_.n,
                     .accumulate = false},
                    stream_);
    }

private:
    void* random_array(Dtype dtype, size_t count, unsigned seed) {
        void* memory = arrays_.emplace_back(count * size_of(dtype)).data();
        random_fill({.out = View(memory, dtype), .count = count, .seed = seed}, stream_);
        return memory;
    }

    Product product_;
    Stream stream_;
    std::vector<DeviceBuffer> arrays_;
    DeviceBuffer sums_;
};

// Measures times between marks on a stream. set() does not wait; read() waits for the last mark.
class Marks {
public:
    explicit Marks(Stream stream) : stream_(stream) {}

    void set() {
        if (used_ == events_.size()) events_.push_back(make_event());
        check_cuda(cudaEventRecord(events_[used_++].get(), cuda_stream(stream_)), "cudaEventRecord");
    }

    // Returns the milliseconds between successive marks and clears the marks.
    std::vector<float> read() {
        check_cuda(cudaEventSynchronize(events_[used_ - 1].get()), "timing a GEMM");
        std::vector<float> times(used_ - 1);
        for (size_t i = 0; i + 1 < used_; i++)
            check_cuda(cudaEventElapsedTime(&times[i], events_[i].get(), events_[i + 1].get()), "cudaEventElapsedTime");
        used_ = 0;
        return times;
    }

    // Returns the times of `laps` laps of `runs` runs each, without waits in between.
    template <class Work> std::vector<float> laps_of(int laps, int runs, Work work) {
        set();
        for (int lap = 0; lap < laps; lap++) {
            for (int i = 0; i < runs; i++) work();
            set();
        }
        return read();
    }

private:
    Stream stream_;
    std::vector<Event> events_;
    size_t used_ = 0;
};

// The quartiles of the times.
struct Quartiles {
    float low, median, high;
};

Quartiles quartiles_of(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    const size_t n = times.size();
    return {times[n / 4], times[n / 2], times[n - 1 - n / 4]};
}

float median_of(std::vector<float> times) { return quartiles_of(std::move(times)).median; }

int runs_of_turn(float ms) { return std::clamp(int(kTurnMs / std::max(ms, 1e-3f)), 1, kMostRunsOfTurn); }

using Clock = std::chrono::steady_clock;

// The time of this process's last measurement.
Clock::time_point& last_timing() {
    static Clock::time_point when;
    return when;
}

template <class Run> void warm_up(Marks& marks, Run run) {
    const Clock::time_point begin = Clock::now();
    if (begin - last_timing() < kStaysWarm) return;
    for (int runs = 0; Clock::now() - begin < kWarmUp && runs < kWarmUpRuns; runs += kWarmUpLap)
        marks.laps_of(1, kWarmUpLap, run);
}

struct Contender {
    int index;  // of the proposal
    float first_ms;
    std::vector<float> turns;  // milliseconds per run
};

// Returns the proposals that run, with their first times, in the library's order.
template <class Run> std::vector<Contender> first_pass(size_t proposals, Marks& marks, Run run) {
    std::vector<Contender> contenders;
    float spent_ms = 0;
    for (size_t i = 0; i < proposals && spent_ms < kFirstMs; i++) {
        const cublasStatus_t status = run(i);
        if (is_refusal(status)) continue;
        check_cublas(status, "cublasLtMatmul");
        if (contenders.empty()) warm_up(marks, [&] { run(i); });
        const std::vector<float> times = marks.laps_of(kFirstRuns, 1, [&] { run(i); });
        contenders.push_back({.index = int(i), .first_ms = median_of(times), .turns = {}});
        spent_ms += float(kFirstRuns + 1) * contenders.back().first_ms;
    }
    return contenders;
}

// Returns the fastest contenders, in the library's order.
std::vector<Contender> finalists_of(std::vector<Contender> contenders) {
    auto is_faster = [](const Contender& left, const Contender& right) { return left.first_ms < right.first_ms; };
    auto is_earlier = [](const Contender& left, const Contender& right) { return left.index < right.index; };
    std::stable_sort(contenders.begin(), contenders.end(), is_faster);
    contenders.resize(std::min(contenders.size(), kFinalists));
    std::sort(contenders.begin(), contenders.end(), is_earlier);
    return contenders;
}

template <class Run> void take_turns(std::vector<Contender>& finalists, Marks& marks, Run run) {
    float round_ms = 0;
    for (const Contender& finalist : finalists) round_ms += float(runs_of_turn(finalist.first_ms)) * finalist.first_ms;
    const int turns = std::clamp(int(kFinalMs / std::max(round_ms, 1e-3f)), kLeastTurns, kTurns);
    marks.set();
    for (int turn = 0; turn < turns; turn++)
        for (const Contender& finalist : finalists) {
            for (int i = 0; i < runs_of_turn(finalist.first_ms); i++) run(size_t(finalist.index));
            marks.set();
        }
    const std::vector<float> times = marks.read();
    for (size_t i = 0; i < times.size(); i++) {
        Contender& finalist = finalists[i % finalists.size()];
        finalist.turns.push_back(times[i] / float(runs_of_turn(finalist.first_ms)));
    }
}

// Returns the first finalist, in the library's order, that is not measurably slower than the fastest.
TimedAlgorithm winner_of(const std::vector<Contender>& finalists) {
    Quartiles best = quartiles_of(finalists.front().turns);
    for (const Contender& finalist : finalists)
        if (const Quartiles its = quartiles_of(finalist.turns); its.median < best.median) best = its;
    for (const Contender& finalist : finalists)
        if (const Quartiles its = quartiles_of(finalist.turns); its.low <= best.high)
            return {.index = finalist.index, .ms = its.median};
    return {};
}

}  // namespace

TimedAlgorithm fastest_of(const std::vector<MatmulAlgorithm>& proposals, ProductDescription& description,
                          const Product& product, cublasLtHandle_t handle, const MatmulWorkspace& workspace,
                          Stream stream) {
    std::optional<Stage> stage;
    try {
        stage.emplace(product, stream);
    } catch (const Error&) {
        return {.is_short_of_memory = true};
    }
    Marks marks(stream);
    auto run = [&](size_t i) { return description.run(handle, proposals[i], stage->product(), workspace, stream); };
    std::vector<Contender> contenders = first_pass(proposals.size(), marks, run);
    TimedAlgorithm answer;
    if (!contenders.empty()) {
        contenders = finalists_of(std::move(contenders));
        take_turns(contenders, marks, [&](size_t i) { check_cublas(run(i), "cublasLtMatmul"); });
        answer = winner_of(contenders);
    }
    if (product.epilogue == Epilogue::bias_gradient) {
        auto sum_columns = [&] { stage->sum_columns(); };
        const float once_ms = median_of(marks.laps_of(kFirstRuns, 1, sum_columns));
        answer.apart_ms =
            median_of(marks.laps_of(kLeastTurns, runs_of_turn(once_ms), sum_columns)) / float(runs_of_turn(once_ms));
    }
    last_timing() = Clock::now();
    return answer;
}

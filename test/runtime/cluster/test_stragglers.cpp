// The ranks and stages that compute longer than the others: simulated runs with the noise of real machines.
#include <cmath>
#include <functional>
#include <optional>
#include <random>

#include "runtime/cluster/stragglers.h"
#include "test/support/catch.h"

namespace {

std::vector<std::string> names_of(const Grid& grid) {
    std::vector<std::string> names;
    for (int rank = 0; rank < grid.size(); rank++) names.push_back("rank " + std::to_string(rank));
    return names;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The noise of a rank's time in a step, as factors.
struct Noise {
    double spread = 0;                                    // standard deviation of the logarithm, each step on its own
    double tail = 0;                                      // probability that a step takes 1 + Pareto(1.5) times as long
    double bursts = 0;                                    // probability that a burst of slow steps begins
    int burst_steps = 0;                                  // its length, at most
    double drift = 0;                                     // standard deviation of a factor that changes over 50 steps
    double common = 0;                                    // spread of a factor that all ranks share
    std::function<double(int rank, int step)> more = {};  // a further factor
};

// A run of ranks that all compute 1 s per step, times `work`, with noise.
class SimulatedRun {
public:
    SimulatedRun(const Grid& grid, const Noise& noise, unsigned seed)
        : noise_(noise), random_(seed), states_(size_t(grid.size())), monitor_(grid, names_of(grid)) {}

    // Returns the sentences of the step.
    std::vector<std::string> step(const std::function<double(int rank)>& work) {
        std::vector<double> ms;
        const double common = std::exp(noise_.common * normal());
        for (size_t rank = 0; rank < states_.size(); rank++) {
            State& state = states_[rank];
            if (state.burst_left > 0)
                state.burst_left--;
            else if (uniform() < noise_.bursts)
                state.burst_left = 1 + int(uniform() * noise_.burst_steps), state.burst = 1.3 + 2 * uniform();
            state.drift += (noise_.drift * std::sqrt(1 - 0.98 * 0.98)) * normal() - 0.02 * state.drift;
            double factor = common * std::exp(noise_.spread * normal() + state.drift);
            if (state.burst_left > 0) factor *= state.burst;
            if (uniform() < noise_.tail) factor *= std::pow(1 - uniform(), -1 / 1.5);
            if (noise_.more) factor *= noise_.more(int(rank), steps_);
            ms.push_back(1000 * work(int(rank)) * factor);
        }
        return monitor_.add_step(++steps_, ms);
    }
    const StragglerMonitor& monitor() const { return monitor_; }

private:
    struct State {
        int burst_left = 0;
        double burst = 1, drift = 0;
    };
    double normal() { return normal_(random_); }
    double uniform() { return std::uniform_real_distribution<double>()(random_); }

    const Noise noise_;
    std::mt19937 random_;
    std::normal_distribution<double> normal_;
    std::vector<State> states_;
    StragglerMonitor monitor_;
    int steps_ = 0;
};

const Grid kGrids[] = {{.data = 2},
                       {.data = 3},
                       {.data = 8},
                       {.data = 64},
                       {.pipeline = 2},
                       {.data = 2, .tensor = 2, .pipeline = 4},
                       {.data = 4, .pipeline = 3}};

// A quiet GPU, a busy machine, one with bursts of other programs, and a rank 0 that logs and saves more than others.
const Noise kNoises[] = {
    {.spread = 0.01, .tail = 0.001},
    {.spread = 0.08, .common = 0.1},
    {.spread = 0.04, .tail = 0.05, .bursts = 0.003, .burst_steps = 8, .drift = 0.02, .common = 0.1},
    {.spread = 0.03, .tail = 0.02, .bursts = 0.01, .burst_steps = 5, .drift = 0.02},
    {.spread = 0.03,
     .tail = 0.01,
     .more = [](int rank, int step) { return rank == 0 ? (step % 50 < 8 ? 4.0 : 1.04) : 1.0; }},
};

// Adds steps until one names a straggler; returns its sentence and number, counted from 1.
std::optional<std::pair<std::string, int>> first_named(SimulatedRun& run, const std::function<double(int)>& work,
                                                       int steps) {
    for (int step = 1; step <= steps; step++)
        if (const auto news = run.step(work); !news.empty()) return std::pair(news.front(), step);
    return std::nullopt;
}

double even(int) { return 1; }

}  // namespace

TEST_CASE("stragglers: nobody is named in 10,000 steps of noise", "[stragglers]") {
    for (const Grid& grid : kGrids)
        for (size_t i = 0; i < std::size(kNoises); i++)
            for (unsigned seed = 0; seed < (grid.size() > 3 ? 1 : 2) && (grid.size() < 64 || i == 2); seed++) {
                SimulatedRun run(grid, kNoises[i], seed);
                const auto named = first_named(run, even, 10000);
                INFO(grid.size() << " ranks, noise " << i << ", seed " << seed);
                CHECK((named ? named->first : "") == "");
            }
}

TEST_CASE("stragglers: a rank 1.3 times slower is named within 20 steps", "[stragglers]") {
    const Noise noises[] = {{}, {.spread = 0.01, .tail = 0.001}, {.spread = 0.05, .tail = 0.02, .common = 0.02}};
    for (const Grid& grid : kGrids) {
        if (grid.size() == grid.pipeline) continue;  // a rank alone in its stage
        for (const Noise& noise : noises)
            for (unsigned seed = 0; seed < (grid.size() < 64 ? 100 : 20); seed++) {
                SimulatedRun run(grid, noise, seed);
                CHECK(!first_named(run, even, 50));
                const int slow = int(seed) % grid.size();
                const auto named = first_named(
                    run, [&](int rank) { return rank == slow ? 1.3 : 1.0; }, 20);
                INFO(grid.size() << " ranks, spread " << noise.spread << ", seed " << seed);
                REQUIRE(named);
                CHECK(named->first.starts_with("warning: rank " + std::to_string(slow) + " is slow: it computed 1."));
            }
    }
}

TEST_CASE("stragglers: a stage 1.3 times slower is named within 20 steps", "[stragglers]") {
    for (const Grid& grid : kGrids) {
        if (grid.pipeline == 1) continue;
        for (unsigned seed = 0; seed < 100; seed++) {
            SimulatedRun run(grid, {.spread = 0.05, .tail = 0.02, .common = 0.02}, seed);
            const int slow = int(seed) % grid.pipeline;
            const auto work = [&](int rank) { return grid.place_of(rank).pipeline == slow ? 1.3 : 1.0; };
            const auto named = first_named(run, work, 20);
            INFO(grid.size() << " ranks, " << grid.pipeline << " stages, seed " << seed);
            REQUIRE(named);
            CHECK(named->first.starts_with("warning: pipeline stage " + std::to_string(slow) + " (rank"));
            CHECK(contains(named->first, "plan CONFIG --measured RUN"));
        }
    }
}

TEST_CASE("stragglers: the sentences name steps, ranks and what they are compared with", "[stragglers]") {
    StragglerMonitor ranks({.data = 3}, {"rank 0 on a", "rank 1 on b", "rank 2 on c"});
    std::vector<std::string> news;
    const auto add = [&](StragglerMonitor& monitor, int first, int last, const std::vector<double>& ms) {
        for (int step = first; step <= last; step++)
            for (std::string& sentence : monitor.add_step(step, ms)) news.push_back(sentence);
    };
    // 19 of 20 slow steps change the 5 % quantile. The median of 1000 and 1200 is 1100.
    add(ranks, 1, 20, {1000, 1200, 1100});
    add(ranks, 21, 38, {1000, 1200, 1650});
    CHECK(news.empty());
    add(ranks, 39, 39, {1000, 1200, 1650});
    CHECK(news == std::vector<std::string>{"warning: rank 2 on c is slow: it computed 1.50 times as long as the median "
                                           "of the other ranks in steps 20 to 39"});
    news.clear();
    add(ranks, 40, 60, {1000, 1200, 1650});  // is not repeated
    CHECK(news.empty());
    // A step that does not count is ignored.
    add(ranks, 61, 90, {1000, 0, 1100});
    CHECK(news.empty());
    add(ranks, 91, 120, {1000, 1200, 1100});
    CHECK(news ==
          std::vector<std::string>{"rank 2 on c is no longer slow: it computed 1.00 times as long as the median "
                                   "of the other ranks in steps 52 to 101"});
    news.clear();

    // One slow rank of two does not make its stage slow; both do.
    StragglerMonitor stages({.data = 2, .pipeline = 2}, {"rank 0", "rank 1", "rank 2", "rank 3"});
    add(stages, 1, 20, {1000, 1000, 1000, 1400});
    CHECK(news == std::vector<std::string>{"warning: rank 3 is slow: it computed 1.40 times as long as the median of "
                                           "the other ranks of its stage in steps 1 to 20"});
    CHECK(stages.window().stage_ms == std::vector<double>{1000, 1000});
    news.clear();
    add(stages, 21, 40, {1000, 1000, 1500, 1400});
    REQUIRE(news.size() == 2);
    CHECK(news[0] ==
          "rank 3 is no longer slow: it computed 0.93 times as long as the median of the other ranks of "
          "its stage in steps 11 to 30");
    CHECK(
        news[1].starts_with("warning: pipeline stage 1 (ranks 2, 3) is slow: it computed 1.40 times as long as the "
                            "median of the other stages in steps 20 to 39; `train_gpt plan"));
}

TEST_CASE("stragglers: short steps are compared together", "[stragglers]") {
    StragglerMonitor monitor({.data = 2}, {"rank 0", "rank 1"});
    // Steps of 100 ms alternate between 1 and 3 times the other rank's time: an entry has three or more.
    int windows = 0, entry_steps = 0;
    std::string first;
    for (int step = 1; step <= 100 && first.empty(); step++) {
        const auto news = monitor.add_step(step, std::vector<double>{50, step % 2 == 0 ? 50.0 : 150.0});
        windows += monitor.has_new_window();
        if (!news.empty()) first = news[0], entry_steps = step;
    }
    CHECK(windows == 1);
    CHECK(entry_steps == 60);  // entries of three steps: 50 + 150 + 50 or 150 + 50 + 150 ms
    CHECK(contains(first, "rank 1 is slow: it computed 2."));
    CHECK(monitor.window().stage_ms == std::vector<double>{50});
}

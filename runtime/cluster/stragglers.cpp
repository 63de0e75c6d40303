#include "runtime/cluster/stragglers.h"

#include <algorithm>
#include <numeric>

#include "kernels/base/check.h"
#include "runtime/cluster/rendezvous.h"

namespace {

// Returns the value that `index` values are not greater than.
double nth_smallest(std::vector<double> values, size_t index) {
    std::ranges::nth_element(values, values.begin() + ptrdiff_t(index));
    return values[index];
}

// Returns for each time the median of the others; for a single time itself.
std::vector<double> medians_of_others(const std::vector<double>& times) {
    const size_t count = times.size();
    if (count == 1) return times;
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t(0));
    std::ranges::sort(order, {}, [&](size_t index) { return times[index]; });
    std::vector<double> medians(count);
    for (size_t place = 0; place < count; place++) {
        const auto other = [&](size_t nth) { return times[order[nth < place ? nth : nth + 1]]; };
        medians[order[place]] = (other((count - 2) / 2) + other((count - 1) / 2)) / 2;
    }
    return medians;
}

// times: (steps of the window, ranks or stages).
std::vector<Slowness> slowness_of(const std::vector<std::vector<double>>& times) {
    const size_t steps = times.size();
    std::vector<std::vector<double>> others;
    for (const std::vector<double>& step : times) others.push_back(medians_of_others(step));
    std::vector<Slowness> slowness;
    for (size_t i = 0; i < times[0].size(); i++) {
        std::vector<double> own, other;
        for (size_t step = 0; step < steps; step++) own.push_back(times[step][i]), other.push_back(others[step][i]);
        slowness.push_back({.multiple = nth_smallest(own, steps / 2) / nth_smallest(other, steps / 2),
                            .at_least = nth_smallest(own, steps / 20) / nth_smallest(other, steps - 1 - steps / 4)});
    }
    return slowness;
}

}  // namespace

StragglerMonitor::StragglerMonitor(const Grid& grid, std::vector<std::string> names)
    : grid_(grid),
      names_(std::move(names)),
      ring_(kWindow),
      sums_(size_t(grid.size())),
      slow_ranks_(size_t(grid.size())),
      slow_stages_(size_t(grid.pipeline)) {}

std::vector<std::string> StragglerMonitor::add_step(int step, std::span<const double> compute_ms) {
    has_new_window_ = false;
    if (std::ranges::any_of(compute_ms, [](double ms) { return !(ms > 0); })) return {};
    if (steps_++ == 0) first_step_ = step, std::ranges::fill(sums_, 0.0);
    for (size_t rank = 0; rank < sums_.size(); rank++) sums_[rank] += compute_ms[rank];
    if (std::ranges::max(sums_) < kEntry_ms) return {};
    Entry& entry = ring_[entries_++ % kWindow];
    entry = {first_step_, step, sums_};
    for (double& ms : entry.ms) ms /= steps_;
    steps_ = 0;
    if (entries_ < kWindow) return {};
    has_new_window_ = entries_ % kWindow == 0;
    const StragglerWindow last = window();
    std::vector<std::string> news;
    for (size_t rank = 0; rank < last.ranks.size(); rank++) note(last, last.ranks[rank], rank, false, news);
    for (size_t stage = 0; stage < last.stages.size(); stage++) note(last, last.stages[stage], stage, true, news);
    return news;
}

StragglerWindow StragglerMonitor::window() const {
    StragglerWindow window;
    window.first_step = ring_[entries_ % kWindow].first_step;
    window.last_step = ring_[(entries_ - 1) % kWindow].last_step;
    const size_t stages = size_t(grid_.pipeline), each = sums_.size() / stages;
    std::vector<std::vector<double>> of_stages(kWindow);
    for (size_t stage = 0; stage < stages; stage++) {
        std::vector<std::vector<double>> of_ranks;
        for (size_t i = 0; i < kWindow; i++) {
            const auto first = ring_[i].ms.begin() + ptrdiff_t(stage * each);
            of_ranks.emplace_back(first, first + ptrdiff_t(each));
            of_stages[i].push_back(nth_smallest(of_ranks.back(), (each - 1) / 2));
        }
        std::ranges::copy(slowness_of(of_ranks), std::back_inserter(window.ranks));
        std::vector<double> of_stage;
        for (const std::vector<double>& entry : of_stages) of_stage.push_back(entry[stage]);
        window.stage_ms.push_back(nth_smallest(of_stage, kWindow / 2));
    }
    window.stages = slowness_of(of_stages);
    return window;
}

// Adds a sentence if the rank or stage has become slow or has recovered.
void StragglerMonitor::note(const StragglerWindow& window, const Slowness& slowness, size_t index, bool is_stage,
                            std::vector<std::string>& news) {
    char& is_slow = (is_stage ? slow_stages_ : slow_ranks_)[index];
    if (is_slow ? slowness.multiple >= kRecovered : slowness.multiple < kSlow || slowness.at_least < kCertain) return;
    is_slow = !is_slow;
    const int each = grid_.size() / grid_.pipeline;
    std::string name = names_[index];
    if (is_stage && each > 1) {
        std::vector<int> ranks(static_cast<size_t>(each));
        std::iota(ranks.begin(), ranks.end(), int(index) * each);
        name = "ranks " + text_of_ranks(ranks);
    }
    if (is_stage) name = format("pipeline stage %zu (%s)", index, name.c_str());
    const char* const others = is_stage ? "stages" : grid_.pipeline > 1 ? "ranks of its stage" : "ranks";
    const std::string multiple =
        format("it computed %.2f times as long as the median of the other %s in steps %d to %d", slowness.multiple,
               others, window.first_step, window.last_step);
    if (!is_slow)
        news.push_back(name + " is no longer slow: " + multiple);
    else
        news.push_back("warning: " + name + " is slow: " + multiple +
                       (is_stage ? "; `train_gpt plan CONFIG --measured RUN` balances parallel.pipeline_layers" : ""));
}

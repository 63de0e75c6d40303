#include "runtime/cluster/watch.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "kernels/check.h"

namespace {

constexpr std::array<const char*, 5> kPhaseNames{"start", "step", "evaluation", "save", "end"};

double patience_s(const WatchSettings& settings, Phase phase) {
    const double by_phase[] = {settings.start_s, settings.step_s, settings.evaluation_s, settings.save_s,
                               settings.end_s};
    return by_phase[int(phase)];
}

double seconds_between(TimePoint from, TimePoint to) { return std::chrono::duration<double>(to - from).count(); }

std::optional<Hang> find_silent(const std::vector<WatchedRank>& ranks, double silence_s, TimePoint now) {
    const auto silent = std::min_element(ranks.begin(), ranks.end(),
                                         [](const WatchedRank& a, const WatchedRank& b) { return a.heard < b.heard; });
    const double quiet_s = seconds_between(silent->heard, now);
    if (quiet_s <= silence_s) return std::nullopt;
    return Hang{silent->member.rank,
                format("%s hangs: nothing was heard of it for %.1f s (limit %g s); it was last %s",
                       silent->member.text().c_str(), quiet_s, silence_s, silent->report.text().c_str())};
}

}  // namespace

std::string RankReport::text() const {
    std::string text = format("in phase %s", kPhaseNames[size_t(phase)]);
    if (step >= 0) text += format(", step %lld", (long long)step);
    if (collective == 0) return text + ", before its first collective";
    return text + format(", last collective %llu (%s)", (unsigned long long)collective, collective_name.c_str());
}

RankReport Progress::report() const {
    return {phase.load(std::memory_order_relaxed), step.load(std::memory_order_relaxed),
            ticks.load(std::memory_order_relaxed), collective.load(std::memory_order_relaxed),
            collective_name.load(std::memory_order_relaxed)};
}

std::optional<Hang> find_hang(const std::vector<WatchedRank>& all, const WatchSettings& settings, TimePoint now) {
    std::vector<WatchedRank> ranks;
    for (const WatchedRank& rank : all)
        if (!rank.is_excused) ranks.push_back(rank);
    if (ranks.empty()) return std::nullopt;
    if (const auto silent = find_silent(ranks, settings.silence_s, now)) return silent;

    const auto last = std::min_element(ranks.begin(), ranks.end(), [](const WatchedRank& a, const WatchedRank& b) {
        return std::tie(a.report.collective, a.moved) < std::tie(b.report.collective, b.moved);
    });
    const auto ahead = std::max_element(ranks.begin(), ranks.end(), [](const WatchedRank& a, const WatchedRank& b) {
        return a.report.collective < b.report.collective;
    });
    double stood_s = seconds_between(last->moved, now), limit_s = patience_s(settings, last->report.phase);
    if (stood_s <= limit_s) {
        // It moves, but the others may have waited for it beyond all measure.
        limit_s = std::max({settings.start_s, settings.step_s, settings.evaluation_s, settings.save_s, settings.end_s});
        for (const WatchedRank& rank : ranks) stood_s = std::max(stood_s, seconds_between(rank.moved, now));
        if (stood_s <= limit_s) return std::nullopt;
    }
    std::string sentence = format("%s hangs: no progress for %.1f s (limit %g s) %s", last->member.text().c_str(),
                                  stood_s, limit_s, last->report.text().c_str());
    if (ahead->report.collective > last->report.collective)
        sentence += format("; others have reached collective %llu (%s)", (unsigned long long)ahead->report.collective,
                           ahead->report.collective_name.c_str());
    else if (ranks.size() > 1)
        sentence += "; no rank is ahead of it, it has stood still for longest";
    return Hang{last->member.rank, sentence};
}

#include "runtime/cluster/hang_detector.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "kernels/check.h"

namespace {

constexpr std::array<const char*, 5> kPhaseNames{"start", "step", "evaluation", "save", "end"};

std::vector<MonitoredRank> suspects(std::vector<MonitoredRank> ranks) {
    std::erase_if(ranks, [](const MonitoredRank& rank) { return rank.has_left || rank.request; });
    return ranks;
}

}  // namespace

std::string RankStatus::text() const {
    std::string text = format("in phase %s", kPhaseNames[size_t(phase)]);
    if (step >= 0) text += format(", step %lld", (long long)step);
    if (collective == 0) return text + ", before its first collective";
    return text + format(", last collective %llu (%s)", (unsigned long long)collective, collective_name.c_str());
}

std::optional<EndOfRun> find_silent_rank(const std::vector<MonitoredRank>& all, double silence_s, TimePoint now) {
    const std::vector<MonitoredRank> ranks = suspects(all);
    const auto silent = std::ranges::min_element(ranks, {}, &MonitoredRank::last_heard);
    if (silent == ranks.end()) return std::nullopt;
    const double silent_s = seconds_between(silent->last_heard, now);
    if (silent_s <= silence_s) return std::nullopt;
    return EndOfRun{silent->member.rank, Exit::hang,
                    format("%s hangs: no heartbeat for %.1f s (limit %g s); it was last %s",
                           silent->member.text().c_str(), silent_s, silence_s, silent->status.text().c_str())};
}

std::optional<EndOfRun> find_hang(const std::vector<MonitoredRank>& all, const ControlSettings& settings,
                                  TimePoint now) {
    const std::vector<MonitoredRank> ranks = suspects(all);
    if (ranks.empty()) return std::nullopt;
    if (const auto silent = find_silent_rank(ranks, settings.silence_s, now)) return silent;

    const auto collective_of = [](const MonitoredRank& rank) { return rank.status.collective; };
    const auto position_of = [](const MonitoredRank& rank) {
        return std::tuple(rank.status.collective, rank.last_progress);
    };
    const auto last = std::ranges::min_element(ranks, {}, position_of);
    const auto ahead = std::ranges::max_element(ranks, {}, collective_of);
    const double limits_s[] = {settings.start_s, settings.step_s, settings.evaluation_s, settings.save_s,
                               settings.end_s};
    double stalled_s = seconds_between(last->last_progress, now), limit_s = limits_s[int(last->status.phase)];
    if (stalled_s <= limit_s) {
        // It makes progress, but the others may have waited for it longer than any phase may take.
        const auto stalled = std::ranges::min_element(ranks, {}, &MonitoredRank::last_progress);
        stalled_s = seconds_between(stalled->last_progress, now), limit_s = std::ranges::max(limits_s);
        if (stalled_s <= limit_s) return std::nullopt;
    }
    std::string sentence = format("%s hangs: no progress for %.1f s (limit %g s) %s", last->member.text().c_str(),
                                  stalled_s, limit_s, last->status.text().c_str());
    if (collective_of(*ahead) > collective_of(*last))
        sentence += format("; others have reached collective %llu (%s)", (unsigned long long)collective_of(*ahead),
                           ahead->status.collective_name.c_str());
    else if (ranks.size() > 1)
        sentence += "; no rank is ahead of it, it has made no progress for longest";
    return EndOfRun{last->member.rank, Exit::hang, sentence};
}

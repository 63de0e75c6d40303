#include "runtime/cluster/rank_monitor.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <tuple>

#include "runtime/io/joined.h"

namespace {

constexpr const char* kPhaseNames[] = {"start", "step", "evaluation", "save"};

std::vector<MonitoredRank> suspects(std::vector<MonitoredRank> ranks) {
    std::erase_if(ranks, [](const MonitoredRank& rank) { return rank.has_left || rank.request; });
    return ranks;
}

constexpr size_t kMaxNamed = 4;  // ranks or texts in an error message

std::string name_of(const TextRequest& request) {
    return (request.must_be_same ? "require_same of \"" : "all_gather of \"") + request.what + "\"";
}

std::string shortened(const std::string& text) {
    return text.size() <= 100 ? text : text.substr(0, 100) + format("... (%zu bytes)", text.size());
}

TextReply compare(const std::vector<MonitoredRank>& ranks) {
    std::map<std::string, std::vector<Member>> members_with;  // by text
    for (const MonitoredRank& rank : ranks) members_with[rank.request->text].push_back(rank.member);
    if (members_with.size() == 1) return {};
    std::string texts;
    for (const auto& [text, members] : members_with | std::views::take(kMaxNamed))
        texts += format("%s%s %s has \"%s\"", texts.empty() ? "" : "; ", members.size() == 1 ? "rank" : "each of ranks",
                        text_of_members(members).c_str(), shortened(text).c_str());
    if (members_with.size() > kMaxNamed) texts += format("; and %zu more", members_with.size() - kMaxNamed);
    std::ranges::replace_if(
        texts, [](char c) { return c == '\n' || c == '\r'; }, ' ');
    return {Exit::config, ranks[0].request->what + " differs between ranks: " + texts};
}

}  // namespace

std::string RankStatus::text() const {
    std::string text = format("in phase %s", kPhaseNames[size_t(phase)]);
    if (step >= 0) text += format(", step %ld", step);
    if (collective == 0) return text + ", before its first collective";
    return text + format(", last collective %lu (%s)", collective, collective_name.c_str());
}

std::string RankStatus::packed() const {
    return pack(phase, step, ticks, collective, collective_name.substr(0, 100), waits, idle_ms);
}

bool RankStatus::unpack_from(std::string_view fields) {
    return unpack(fields, phase, step, ticks, collective, collective_name, waits, idle_ms) && phase >= Phase::start &&
           phase <= Phase::save;
}

void MonitoredRank::note(const RankStatus& heartbeat, TimePoint now) {
    // A reply of the control channel may be later progress.
    if (heartbeat.ticks != status.ticks)
        last_progress = std::max(last_progress, now - seconds(double(heartbeat.idle_ms) / 1000));
    last_heard = now;
    status = heartbeat;
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

    const bool has_stages = settings.grid.pipeline > 1;
    const auto number_of = [&](const MonitoredRank& rank) {
        return has_stages ? uint64_t(rank.status.waits) : rank.status.collective;
    };
    const auto position_of = [&](const MonitoredRank& rank) { return std::tuple(number_of(rank), rank.last_progress); };
    const auto last = std::ranges::min_element(ranks, {}, position_of);
    const auto ahead = std::ranges::max_element(ranks, {}, number_of);
    const double limits_s[] = {settings.start_s, settings.step_s, settings.step_s, settings.save_s};
    double stalled_s = seconds_between(last->last_progress, now), limit_s = limits_s[int(last->status.phase)];
    if (stalled_s <= limit_s) {
        // This rank makes progress, but the others may have waited for it longer than any phase may take.
        const auto stalled = std::ranges::min_element(ranks, {}, &MonitoredRank::last_progress);
        stalled_s = seconds_between(stalled->last_progress, now), limit_s = std::ranges::max(limits_s);
        if (stalled_s <= limit_s) return std::nullopt;
    }
    std::string sentence = format("%s hangs: no progress for %.1f s (limit %g s) %s", last->member.text().c_str(),
                                  stalled_s, limit_s, last->status.text().c_str());
    if (has_stages && last->status.waits < ahead->status.waits)
        sentence += "; others wait for a collective, and it does not";
    else if (number_of(*ahead) > number_of(*last))
        sentence += format("; others have reached collective %lu (%s)", number_of(*ahead),
                           ahead->status.collective_name.c_str());
    else if (ranks.size() > 1)
        sentence +=
            format("; %sit has gone longest without progress", has_stages ? "" : "no rank is ahead of it, and ");
    return EndOfRun{last->member.rank, Exit::hang, sentence};
}

std::optional<TextReply> reply_to_requests(const std::vector<MonitoredRank>& ranks, double timeout_s, TimePoint now) {
    const MonitoredRank* first = nullptr;
    std::vector<int> missing;
    for (const MonitoredRank& rank : ranks)
        if (!rank.request)
            missing.push_back(rank.member.rank);
        else if (!first || rank.requested < first->requested)
            first = &rank;
    if (!first) return std::nullopt;
    const std::string name = name_of(*first->request);
    for (const MonitoredRank& rank : ranks)
        if (rank.request && name_of(*rank.request) != name)
            return TextReply{Exit::internal, rank.member.text() + " calls " + name_of(*rank.request) + " while " +
                                                 first->member.text() + " calls " + name};
    if (missing.empty()) {
        if (first->request->must_be_same) return compare(ranks);
        TextReply reply;
        for (const MonitoredRank& rank : ranks) append_field(reply.text, rank.request->text);
        return reply;
    }
    if (now <= first->requested + seconds(timeout_s)) return std::nullopt;
    const std::string named = joined(missing | std::views::take(kMaxNamed), ", ",
                                     [&](int rank) { return ranks[size_t(rank)].member.text(); });
    return TextReply{Exit::hang,
                     format("%zu of %zu ranks did not call %s within %g s: missing %s: %s%s", missing.size(),
                            ranks.size(), name.c_str(), timeout_s, text_of_ranks(missing).c_str(), named.c_str(),
                            missing.size() > kMaxNamed ? ", ..." : "")};
}

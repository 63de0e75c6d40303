#include "runtime/cluster/text_collective.h"

#include <algorithm>
#include <map>
#include <ranges>

namespace {

constexpr size_t kMostNamed = 4;  // ranks or texts in an error message

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
    for (const auto& [text, members] : members_with | std::views::take(kMostNamed))
        texts += format("%s%s %s has \"%s\"", texts.empty() ? "" : "; ", members.size() == 1 ? "rank" : "each of ranks",
                        text_of_members(members).c_str(), shortened(text).c_str());
    if (members_with.size() > kMostNamed) texts += format("; and %zu more", members_with.size() - kMostNamed);
    std::ranges::replace_if(
        texts, [](char c) { return c == '\n' || c == '\r'; }, ' ');
    return {Exit::config, ranks[0].request->what + " differs between ranks: " + texts};
}

}  // namespace

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
    std::string named;
    for (size_t i = 0; i < std::min(missing.size(), kMostNamed); ++i)
        named += (i ? ", " : "") + ranks[size_t(missing[i])].member.text();
    return TextReply{Exit::hang,
                     format("%zu of %zu ranks did not call %s within %g s: missing %s: %s%s", missing.size(),
                            ranks.size(), name.c_str(), timeout_s, text_of_ranks(missing).c_str(), named.c_str(),
                            missing.size() > kMostNamed ? ", ..." : "")};
}

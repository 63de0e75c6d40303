#include "runtime/cluster/text_collective.h"

#include <algorithm>
#include <map>

#include "runtime/cluster/wire_format.h"

namespace {

constexpr size_t kMostNamed = 4;  // ranks or texts in an error message

std::string name_of(const TextRequest& request) {
    const bool is_gather = request.operation == TextOperation::all_gather;
    return (is_gather ? "all_gather of \"" : "require_same of \"") + request.what + "\"";
}

std::string shortened(const std::string& text) {
    return text.size() <= 100 ? text : text.substr(0, 100) + format("... (%zu bytes)", text.size());
}

}  // namespace

void TextCollective::add(int rank, TextRequest request, TimePoint now) {
    if (first_ < 0) first_ = rank, since_ = now;
    requests_[size_t(rank)] = std::move(request);
}

std::optional<TextReply> TextCollective::reply(TimePoint now, double timeout_s) {
    if (first_ < 0) return std::nullopt;
    const std::optional<TextReply> reply = decide(now, timeout_s);
    if (reply) {
        requests_.assign(requests_.size(), std::nullopt);
        first_ = -1;
    }
    return reply;
}

std::optional<TextReply> TextCollective::decide(TimePoint now, double timeout_s) const {
    const TextRequest& first = *requests_[size_t(first_)];
    std::vector<int> missing;
    for (const Member& member : members_) {
        const std::optional<TextRequest>& request = requests_[size_t(member.rank)];
        if (!request)
            missing.push_back(member.rank);
        else if (request->operation != first.operation || request->what != first.what)
            return TextReply{Exit::internal,
                             format("%s calls %s while %s calls %s", member.text().c_str(), name_of(*request).c_str(),
                                    members_[size_t(first_)].text().c_str(), name_of(first).c_str())};
    }
    if (missing.empty()) {
        if (first.operation == TextOperation::require_same) return compare();
        TextReply reply;
        for (const std::optional<TextRequest>& request : requests_) append_field(reply.text, request->text);
        return reply;
    }
    if (now <= since_ + seconds(timeout_s)) return std::nullopt;
    std::string named;
    for (size_t i = 0; i < std::min(missing.size(), kMostNamed); ++i)
        named += (i ? ", " : "") + members_[size_t(missing[i])].text();
    return TextReply{Exit::hang,
                     format("%zu of %zu ranks did not call %s within %g s: missing %s: %s%s", missing.size(),
                            members_.size(), name_of(first).c_str(), timeout_s, text_of_ranks(missing).c_str(),
                            named.c_str(), missing.size() > kMostNamed ? ", ..." : "")};
}

TextReply TextCollective::compare() const {
    std::vector<std::string> texts;  // each different one, in the order of the lowest rank that has it
    std::map<std::string, std::vector<int>> ranks_with;
    for (const Member& member : members_) {
        const std::string& text = requests_[size_t(member.rank)]->text;
        if (!ranks_with.contains(text)) texts.push_back(text);
        ranks_with[text].push_back(member.rank);
    }
    if (texts.size() == 1) return {};
    std::string sentence = requests_[0]->what + " differs between ranks: ";
    for (size_t i = 0; i < std::min(texts.size(), kMostNamed); ++i) {
        const std::vector<int>& ranks = ranks_with[texts[i]];
        std::string hosts;
        for (size_t k = 0; k < ranks.size() && hosts.size() < 100; ++k) {
            const std::string& host = members_[size_t(ranks[k])].host;
            if (hosts.find(host) == std::string::npos) hosts += (hosts.empty() ? "" : ", ") + host;
        }
        sentence += format("%s%s %s (on %s) has \"%s\"", i ? "; " : "", ranks.size() == 1 ? "rank" : "each of ranks",
                           text_of_ranks(ranks).c_str(), hosts.c_str(), shortened(texts[i]).c_str());
    }
    if (texts.size() > kMostNamed) sentence += format("; and %zu more", texts.size() - kMostNamed);
    for (char& c : sentence)
        if (c == '\n' || c == '\r') c = ' ';
    return {Exit::config, sentence};
}

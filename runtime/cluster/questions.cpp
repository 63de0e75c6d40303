#include "runtime/cluster/questions.h"

#include <algorithm>
#include <array>
#include <map>

#include "runtime/cluster/message.h"

namespace {

std::string name_of(const Asked& asked) {
    const std::array<const char*, 3> names{"all_gather", "broadcast", "require_same"};
    const size_t index = size_t(asked.question) - 1;
    return std::string(index < names.size() ? names[index] : "?") + " of \"" + asked.what + "\"";
}

std::string shortened(const std::string& text) {
    return text.size() <= 100 ? text : text.substr(0, 100) + format("... (%zu bytes)", text.size());
}

}  // namespace

void Questions::take(int rank, Asked asked, TimePoint now) {
    std::optional<Asked>& place = asked_[size_t(rank)];
    if (count_ == 0) first_ = rank, since_ = now;
    if (!place) ++count_;
    place = std::move(asked);
}

std::optional<Answer> Questions::answer(TimePoint now, double limit_s) {
    if (count_ == 0) return std::nullopt;
    std::optional<Answer> answer;
    const Asked& first = *asked_[size_t(first_)];
    std::vector<int> missing;
    for (size_t rank = 0; rank < asked_.size() && !answer; ++rank) {
        if (!asked_[rank])
            missing.push_back(int(rank));
        else if (asked_[rank]->question != first.question || asked_[rank]->what != first.what)
            answer = Answer{Exit::internal, format("%s asks for %s while %s asks for %s", members_[rank].text().c_str(),
                                                   name_of(*asked_[rank]).c_str(),
                                                   members_[size_t(first_)].text().c_str(), name_of(first).c_str())};
    }
    if (!answer && missing.empty()) answer = answer_of_all();
    if (!answer && now > since_ + seconds(limit_s)) {
        std::string who;
        for (size_t i = 0; i < std::min<size_t>(missing.size(), 4); ++i)
            who += (i ? ", " : "") + members_[size_t(missing[i])].text();
        answer =
            Answer{Exit::hang, format("%zu of %zu ranks did not come to %s within %g s: missing %s: %s%s",
                                      missing.size(), members_.size(), name_of(first).c_str(), limit_s,
                                      text_of_ranks(missing).c_str(), who.c_str(), missing.size() > 4 ? ", ..." : "")};
    }
    if (answer) {
        asked_.assign(asked_.size(), std::nullopt);
        count_ = 0;
    }
    return answer;
}

Answer Questions::answer_of_all() const {
    if (asked_[0]->question == Question::broadcast) return {Exit::ok, asked_[0]->text};
    if (asked_[0]->question == Question::require_same) return differing();
    FieldWriter texts;
    for (const auto& asked : asked_) texts.text(asked->text);
    return {Exit::ok, texts.fields()};
}

Answer Questions::differing() const {
    std::map<std::string, std::vector<int>> ranks_with;
    for (const Member& member : members_) ranks_with[asked_[size_t(member.rank)]->text].push_back(member.rank);
    if (ranks_with.size() == 1) return {};
    // Rank 0's text first, then up to three others.
    std::vector<std::pair<std::string, std::vector<int>>> groups(ranks_with.begin(), ranks_with.end());
    std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.second[0] < b.second[0]; });
    std::string sentence = asked_[0]->what + " differs between ranks: ";
    for (size_t i = 0; i < std::min<size_t>(groups.size(), 4); ++i) {
        const auto& [text, ranks] = groups[i];
        std::string hosts;
        for (size_t k = 0; k < ranks.size() && hosts.size() < 100; ++k) {
            const std::string& host = members_[size_t(ranks[k])].host;
            if (hosts.find(host) == std::string::npos) hosts += (hosts.empty() ? "" : ", ") + host;
        }
        sentence += format("%s%s %s (on %s) has \"%s\"", i ? "; " : "", ranks.size() == 1 ? "rank" : "each of ranks",
                           text_of_ranks(ranks).c_str(), hosts.c_str(), shortened(text).c_str());
    }
    if (groups.size() > 4) sentence += format("; and %zu more", groups.size() - 4);
    for (char& c : sentence)
        if (c == '\n' || c == '\r') c = ' ';
    return {Exit::config, sentence};
}

// What rank 0 does when the ranks ask something of each other: it collects one text per rank and decides the answer, or
// why there is none, in one place, so that it is the same for all.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "runtime/cluster/rendezvous.h"

enum class Question : uint64_t { all_gather = 1, broadcast, require_same };

struct Asked {
    Question question = Question::all_gather;
    std::string what;  // the matter
    std::string text;  // this rank's
};

struct Answer {
    Exit code = Exit::ok;
    std::string text;  // all_gather: the texts as fields; broadcast: rank 0's; not ok: a sentence
};

// One question after the other: a rank asks the next one only when it has the answer of the last.
class Questions {
public:
    explicit Questions(const std::vector<Member>& members) : members_(members), asked_(members.size()) {}

    void take(int rank, Asked asked, TimePoint now);
    bool has_asked(int rank) const { return asked_[size_t(rank)].has_value(); }

    // The answer once all have asked. No answer, but a reason, when two ranks ask for different things and when some
    // have not asked `limit_s` after the first. Then the next question may come.
    std::optional<Answer> answer(TimePoint now, double limit_s);

private:
    Answer answer_of_all() const;
    Answer differing() const;

    std::vector<Member> members_;
    std::vector<std::optional<Asked>> asked_;
    size_t count_ = 0;
    int first_ = 0;  // who asked first
    TimePoint since_;
};

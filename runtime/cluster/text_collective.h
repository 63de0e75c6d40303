// Rank 0's side of a collective of the control channel: collects one text per rank and decides the reply, which is the
// same for all ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "runtime/cluster/rendezvous.h"

enum class TextOperation : uint64_t { all_gather, require_same };

struct TextRequest {
    TextOperation operation = TextOperation::all_gather;
    std::string what;  // the subject, for errors
    std::string text;  // this rank's
};

struct TextReply {
    Exit code = Exit::ok;
    std::string text;  // all_gather: the texts by rank, each as a field; if not ok: the error message
};

// One collective at a time: a rank sends its next request after it has received the reply to the last.
class TextCollective {
public:
    explicit TextCollective(const std::vector<Member>& members) : members_(members), requests_(members.size()) {}

    void add(int rank, TextRequest request, TimePoint now);
    bool has_request(int rank) const { return requests_[size_t(rank)].has_value(); }

    // Returns the reply once every rank has sent its request; then the next collective may begin. Returns an error
    // without waiting for the rest if two requests differ in operation or subject (Exit::internal) or `timeout_s` has
    // passed since the first (Exit::hang), and if require_same finds different texts (Exit::config).
    std::optional<TextReply> reply(TimePoint now, double timeout_s);

private:
    std::optional<TextReply> decide(TimePoint now, double timeout_s) const;
    TextReply compare() const;

    std::vector<Member> members_;
    std::vector<std::optional<TextRequest>> requests_;
    int first_ = -1;  // the rank whose request came first; -1: none yet
    TimePoint since_;
};

// Rank 0's side of a collective of the control channel: decides the reply, which is the same for all ranks.
#pragma once

#include <optional>
#include <vector>

#include "runtime/cluster/hang_detector.h"

// Returns the reply once every rank has sent its request. Returns an error without waiting for the rest if two requests
// differ in operation or subject (Exit::internal) or `timeout_s` has passed since the first (Exit::hang), and if
// require_same finds different texts (Exit::config). After a reply the caller removes the requests.
std::optional<TextReply> reply_to_requests(const std::vector<MonitoredRank>& ranks, double timeout_s, TimePoint now);

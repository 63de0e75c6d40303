
#include <thread>

#include "runtime/cluster/rank_monitor.h"
#include "runtime/cluster/wire_format.h"
#include "test/support/catch.h"

namespace {

const TimePoint kNow = Clock::now();

MonitoredRank rank_with(int rank, uint64_t collective, double progress_ago_s, Phase phase = Phase::step) {
    RankStatus status;
    status.phase = phase;
    status.step = 9;
    status.collective = collective;
    status.collective_name = "all_reduce";
    return {{rank, "host" + std::to_string(rank), 100 + rank}, status, kNow, kNow - seconds(progress_ago_s)};
}

MonitoredRank silent(MonitoredRank rank, double heard_ago_s) {
    rank.last_heard = kNow - seconds(heard_ago_s);
    return rank;
}

MonitoredRank left(MonitoredRank rank) {
    rank.has_left = true;
    return rank;
}

MonitoredRank waiting(MonitoredRank rank) {
    rank.request = TextRequest{};
    return rank;
}

MonitoredRank in_collective(MonitoredRank rank) {
    rank.status.waits = true;
    return rank;
}

// The rank to blame, or -1.
int blamed(const std::vector<MonitoredRank>& ranks, const Grid& grid = {}) {
    const auto hang = find_hang(ranks, {.grid = grid}, kNow);
    return hang ? hang->rank : -1;
}

std::vector<MonitoredRank> three_ranks() {
    return {{{0, "a", 10}, {}, kNow, kNow}, {{1, "a", 11}, {}, kNow, kNow}, {{2, "b", 12}, {}, kNow, kNow}};
}

}  // namespace

TEST_CASE("hang detector: blames by missing heartbeats, by collective, by phase", "[control]") {
    // Healthy, and just within the limits of 60 s without a heartbeat and 120 s per step.
    CHECK(blamed({rank_with(0, 5, 0), rank_with(1, 5, 119), silent(rank_with(2, 5, 1), 59)}) == -1);
    // Missing heartbeats come first; of several silent ranks, the one silent for longest is blamed.
    CHECK(blamed({rank_with(0, 4, 130), silent(rank_with(1, 5, 1), 61), silent(rank_with(2, 5, 1), 62)}) == 2);
    // No progress anywhere: blames the rank that did not start the collective, although others have waited longer.
    CHECK(blamed({rank_with(0, 6, 130), rank_with(1, 5, 121), rank_with(2, 6, 140)}) == 1);
    // The same collective everywhere: blames the rank without progress for longest.
    CHECK(blamed({rank_with(0, 6, 130), rank_with(1, 6, 131), rank_with(2, 6, 129)}) == 1);
    // The others exceed their own limit waiting for a rank that saves or makes progress: not yet a hang.
    CHECK(blamed({rank_with(0, 5, 500, Phase::save), rank_with(1, 6, 490)}) == -1);
    CHECK(blamed({rank_with(0, 5, 901, Phase::save), rank_with(1, 6, 899)}) == 0);
    CHECK(blamed({rank_with(0, 5, 1), rank_with(1, 6, 899)}) == -1);
    CHECK(blamed({rank_with(0, 5, 1), rank_with(1, 6, 901)}) == 0);
    CHECK(blamed({rank_with(0, 0, 299, Phase::start), rank_with(1, 0, 1)}) == -1);
    CHECK(blamed({rank_with(0, 0, 301, Phase::start), rank_with(1, 0, 1)}) == 0);
    // A rank that has left, or waits for others in a collective of the control channel, is never blamed.
    for (const auto& excused : {left, waiting}) {
        CHECK(blamed({excused(silent(rank_with(0, 1, 999), 999)), rank_with(1, 5, 1)}) == -1);
        CHECK(blamed({excused(rank_with(0, 1, 999)), rank_with(1, 5, 121)}) == 1);
        CHECK(blamed({excused(rank_with(0, 1, 999))}) == -1);
    }
}

TEST_CASE("hang detector: stages are compared by their waits and their progress", "[control]") {
    const Grid stages{.pipeline = 3};
    // The numbers of collectives do not matter.
    CHECK(blamed({rank_with(0, 9, 131), rank_with(1, 5, 130), rank_with(2, 7, 129)}, stages) == 0);
    // A rank that waits is blamed only if all do.
    CHECK(blamed({in_collective(rank_with(0, 5, 140)), rank_with(1, 9, 121), in_collective(rank_with(2, 1, 150))},
                 stages) == 1);
    CHECK(blamed({in_collective(rank_with(0, 9, 130)), in_collective(rank_with(1, 9, 131))}, stages) == 1);
    // The others may wait for a rank that computes or saves, but not for ever.
    CHECK(blamed({in_collective(rank_with(0, 5, 130)), rank_with(1, 9, 119)}, stages) == -1);
    CHECK(blamed({in_collective(rank_with(0, 5, 500)), rank_with(1, 9, 490, Phase::save)}, stages) == -1);
    CHECK(blamed({in_collective(rank_with(0, 5, 901)), rank_with(1, 9, 1)}, stages) == 1);
    // A stopped rank is silent, whatever it was doing.
    CHECK(blamed({rank_with(0, 5, 130), silent(in_collective(rank_with(1, 5, 1)), 61)}, stages) == 1);

    const auto sentence = [&](const std::vector<MonitoredRank>& ranks) {
        return find_hang(ranks, {.grid = stages}, kNow)->sentence;
    };
    const std::string words =
        "rank 0 on host0 (pid 100) hangs: no progress for 130.0 s (limit 120 s) in phase step, step 9, last "
        "collective 6 (all_reduce); ";
    CHECK(sentence({rank_with(0, 6, 130), in_collective(rank_with(1, 5, 140))}) ==
          words + "others wait for a collective, and it does not");
    CHECK(sentence({rank_with(0, 6, 130), rank_with(1, 7, 121)}) == words + "it has gone longest without progress");
}

TEST_CASE("hang detector: a heartbeat reports when the last progress was", "[control]") {
    RankActivity activity;
    activity.note_collective(7, "exchange");
    activity.note_wait(true);
    std::this_thread::sleep_for(seconds(0.2));
    RankStatus status;
    REQUIRE(status.unpack_from(activity.now().packed()));
    CHECK(status.waits);
    CHECK(status.idle_ms >= 200);
    CHECK(status.idle_ms < 60000);
    activity.note_wait(false);
    CHECK_FALSE(activity.now().waits);
    activity.note_progress();
    CHECK(activity.now().idle_ms < status.idle_ms);

    // Heartbeats of two ranks that arrive at the same time.
    status.idle_ms = 700;
    MonitoredRank rank = rank_with(0, 5, 10);
    rank.note(status, kNow);
    CHECK(rank.last_heard == kNow);
    CHECK(rank.last_progress == kNow - seconds(0.7));
    status.idle_ms = 1700, rank.note(status, kNow + seconds(1));  // the same progress
    CHECK(rank.last_progress == kNow - seconds(0.7));
    // A reply of the control channel is later progress.
    rank.last_progress = kNow + seconds(2);
    status.ticks++, status.idle_ms = 1000, rank.note(status, kNow + seconds(2.5));
    CHECK(rank.last_progress == kNow + seconds(2));
}

TEST_CASE("hang detector: the message names rank, host, pid, limit and status", "[control]") {
    const std::string late = find_hang({rank_with(0, 6, 130), rank_with(1, 5, 121)}, {}, kNow)->sentence;
    CHECK(late ==
          "rank 1 on host1 (pid 101) hangs: no progress for 121.0 s (limit 120 s) in phase step, step 9, last "
          "collective 5 (all_reduce); others have reached collective 6 (all_reduce)");
    const std::string equal = find_hang({rank_with(0, 0, 130), rank_with(1, 0, 121)}, {}, kNow)->sentence;
    CHECK(equal ==
          "rank 0 on host0 (pid 100) hangs: no progress for 130.0 s (limit 120 s) in phase step, step 9, before "
          "its first collective; no rank is ahead of it, and it has gone longest without progress");
    const std::string quiet = find_hang({rank_with(0, 5, 0), silent(rank_with(1, 5, 0), 61)}, {}, kNow)->sentence;
    CHECK(quiet ==
          "rank 1 on host1 (pid 101) hangs: no heartbeat for 61.0 s (limit 60 s); it was last in phase "
          "step, step 9, last collective 5 (all_reduce)");
}

TEST_CASE("hang detector: the status in words", "[control]") {
    RankStatus status;
    CHECK(status.text() == "in phase start, before its first collective");
    status.phase = Phase::save, status.step = 12, status.collective = 3, status.collective_name = "barrier";
    CHECK(status.text() == "in phase save, step 12, last collective 3 (barrier)");
}

TEST_CASE("text collective: replies once all ranks have sent the same request", "[control]") {
    std::vector<MonitoredRank> ranks = three_ranks();
    CHECK_FALSE(reply_to_requests(ranks, 10, kNow));
    for (const size_t rank : {2, 0}) {
        ranks[rank].request = {false, "w", std::to_string(rank)};
        ranks[rank].requested = kNow;
        CHECK_FALSE(reply_to_requests(ranks, 10, kNow));
    }
    ranks[1].request = {false, "w", ""};
    const auto reply = reply_to_requests(ranks, 10, kNow);
    REQUIRE(reply);
    CHECK(reply->code == Exit::ok);
    CHECK(reply->text == pack("0", "", "2"));
}

TEST_CASE("text collective: different texts, different requests and missing ranks are errors", "[control]") {
    std::vector<MonitoredRank> ranks = three_ranks();
    const auto call = [&](size_t rank, bool must_be_same, const char* what, const std::string& text) {
        ranks[rank].request = {must_be_same, what, text};
        ranks[rank].requested = kNow;
        return reply_to_requests(ranks, 10, kNow);
    };
    call(1, true, "data", "x");
    call(0, true, "data", "x");
    const auto differing = call(2, true, "data", std::string(200, 'y'));
    REQUIRE(differing);
    CHECK(differing->code == Exit::config);
    CHECK(differing->text == "data differs between ranks: each of ranks 0, 1 on a has \"x\"; rank 2 on b has \"" +
                                 std::string(100, 'y') + "... (200 bytes)\"");

    ranks = three_ranks();
    call(1, false, "data", "x");
    const auto other_subject = call(2, false, "state", "x");
    REQUIRE(other_subject);
    CHECK(other_subject->code == Exit::internal);
    const auto other_operation = call(2, true, "data", "x");
    REQUIRE(other_operation);
    CHECK(other_operation->code == Exit::internal);
    CHECK(
        other_operation->text ==
        "rank 2 on b (pid 12) calls require_same of \"data\" while rank 1 on a (pid 11) calls all_gather of \"data\"");

    // The time counts from the first request.
    ranks = three_ranks();
    call(1, false, "data", "x");
    CHECK_FALSE(reply_to_requests(ranks, 10, kNow + seconds(9.9)));
    const auto late = reply_to_requests(ranks, 10, kNow + seconds(10.1));
    REQUIRE(late);
    CHECK(late->code == Exit::hang);
    CHECK(late->text ==
          "2 of 3 ranks did not call all_gather of \"data\" within 10 s: missing 0, 2: rank 0 on a (pid "
          "10), rank 2 on b (pid 12)");
    ranks[0].request = ranks[1].request, ranks[0].requested = kNow + seconds(5);
    CHECK_FALSE(reply_to_requests(ranks, 10, kNow + seconds(9.9)));
    CHECK(reply_to_requests(ranks, 10, kNow + seconds(10.1)));
}

#include <string>

#include "runtime/cluster/questions.h"
#include "runtime/cluster/watch.h"
#include "test/catch.h"

namespace {

const TimePoint kNow = Clock::now();

WatchedRank rank_with(int rank, uint64_t collective, double moved_ago_s, Phase phase = Phase::step) {
    RankReport report;
    report.phase = phase;
    report.step = 9;
    report.collective = collective;
    report.collective_name = "all_reduce";
    return {{rank, "host" + std::to_string(rank), 100 + rank}, report, kNow, kNow - seconds(moved_ago_s), false};
}

WatchedRank silent(WatchedRank rank, double heard_ago_s) {
    rank.heard = kNow - seconds(heard_ago_s);
    return rank;
}

WatchedRank excused(WatchedRank rank) {
    rank.is_excused = true;
    return rank;
}

// The rank to blame, or -1.
int blamed(const std::vector<WatchedRank>& ranks) {
    const auto hang = find_hang(ranks, {}, kNow);
    return hang ? hang->rank : -1;
}

std::vector<Member> members() { return {{0, "a", 10}, {1, "a", 11}, {2, "b", 12}}; }

}  // namespace

TEST_CASE("watch: who hangs, by silence, by collectives, by phase", "[control]") {
    // Healthy, and just within the limits of 60 s silence and 120 s step.
    CHECK(blamed({rank_with(0, 5, 0), rank_with(1, 5, 119), silent(rank_with(2, 5, 1), 59)}) == -1);
    // Silence counts before everything else; among silent ones the longest.
    CHECK(blamed({rank_with(0, 4, 130), silent(rank_with(1, 5, 1), 61), silent(rank_with(2, 5, 1), 62)}) == 2);
    // All stand still: the one that did not arrive, although others have waited for longer.
    CHECK(blamed({rank_with(0, 6, 130), rank_with(1, 5, 121), rank_with(2, 6, 140)}) == 1);
    // The same collective everywhere: the one that stands still for longest.
    CHECK(blamed({rank_with(0, 6, 130), rank_with(1, 6, 131), rank_with(2, 6, 129)}) == 1);
    // Others wait beyond their own limit for one that saves, or that moves: not yet.
    CHECK(blamed({rank_with(0, 5, 500, Phase::save), rank_with(1, 6, 490)}) == -1);
    CHECK(blamed({rank_with(0, 5, 901, Phase::save), rank_with(1, 6, 899)}) == 0);
    CHECK(blamed({rank_with(0, 5, 1), rank_with(1, 6, 899)}) == -1);
    CHECK(blamed({rank_with(0, 5, 1), rank_with(1, 6, 901)}) == 0);
    CHECK(blamed({rank_with(0, 0, 299, Phase::start), rank_with(1, 0, 1)}) == -1);
    CHECK(blamed({rank_with(0, 0, 301, Phase::start), rank_with(1, 0, 1)}) == 0);
    // Who has left, or waits for an answer, is no suspect.
    CHECK(blamed({excused(silent(rank_with(0, 1, 999), 999)), rank_with(1, 5, 1)}) == -1);
    CHECK(blamed({excused(rank_with(0, 1, 999)), rank_with(1, 5, 121)}) == 1);
    CHECK(blamed({excused(rank_with(0, 1, 999))}) == -1);
}

TEST_CASE("watch: the sentence names rank, host, pid, limit and place", "[control]") {
    const std::string late = find_hang({rank_with(0, 6, 130), rank_with(1, 5, 121)}, {}, kNow)->sentence;
    CHECK(late ==
          "rank 1 on host1 (pid 101) hangs: no progress for 121.0 s (limit 120 s) in phase step, step 9, last "
          "collective 5 (all_reduce); others have reached collective 6 (all_reduce)");
    const std::string equal = find_hang({rank_with(0, 0, 130), rank_with(1, 0, 121)}, {}, kNow)->sentence;
    CHECK(equal ==
          "rank 0 on host0 (pid 100) hangs: no progress for 130.0 s (limit 120 s) in phase step, step 9, before "
          "its first collective; no rank is ahead of it, it has stood still for longest");
    const std::string quiet = find_hang({rank_with(0, 5, 0), silent(rank_with(1, 5, 0), 61)}, {}, kNow)->sentence;
    CHECK(quiet ==
          "rank 1 on host1 (pid 101) hangs: nothing was heard of it for 61.0 s (limit 60 s); it was last in phase "
          "step, step 9, last collective 5 (all_reduce)");
}

TEST_CASE("watch: what the trainer notes is what is reported", "[control]") {
    Progress progress;
    CHECK(progress.report().text() == "in phase start, before its first collective");
    progress.phase = Phase::save, progress.step = 12, progress.collective = 3, progress.collective_name = "barrier";
    CHECK(progress.report().text() == "in phase save, step 12, last collective 3 (barrier)");
}

TEST_CASE("questions: answers come when all have asked the same, and one question follows another", "[control]") {
    Questions questions(members());
    for (const int round : {1, 2}) {
        for (const int rank : {2, 0}) {
            questions.take(rank, {Question::all_gather, "w", std::to_string(rank * round)}, kNow);
            CHECK_FALSE(questions.answer(kNow, 10));
        }
        CHECK(questions.has_asked(2));
        CHECK_FALSE(questions.has_asked(1));
        questions.take(1, {Question::all_gather, "w", ""}, kNow);
        const auto answer = questions.answer(kNow, 10);
        REQUIRE(answer);
        CHECK(answer->code == Exit::ok);
        CHECK(answer->text == FieldWriter().text("0").text("").text(std::to_string(2 * round)).fields());
        CHECK_FALSE(questions.has_asked(2));
    }
}

TEST_CASE("questions: differing texts, differing questions, and ranks that do not come", "[control]") {
    Questions questions(members());
    const auto ask = [&](int rank, Question question, const char* what, const std::string& text) {
        questions.take(rank, {question, what, text}, kNow);
        return questions.answer(kNow, 10);
    };
    ask(1, Question::require_same, "data", "x");
    ask(0, Question::require_same, "data", "x");
    const auto differing = ask(2, Question::require_same, "data", std::string(200, 'y'));
    REQUIRE(differing);
    CHECK(differing->code == Exit::config);
    CHECK(differing->text == "data differs between ranks: each of ranks 0, 1 (on a) has \"x\"; rank 2 (on b) has \"" +
                                 std::string(100, 'y') + "... (200 bytes)\"");

    ask(1, Question::broadcast, "data", "x");
    const auto other = ask(2, Question::broadcast, "state", "x");
    REQUIRE(other);
    CHECK(other->code == Exit::internal);

    questions.take(1, {Question::broadcast, "data", "x"}, kNow);
    CHECK_FALSE(questions.answer(kNow + seconds(9.9), 10));
    const auto late = questions.answer(kNow + seconds(10.1), 10);
    REQUIRE(late);
    CHECK(late->code == Exit::hang);
    CHECK(late->text ==
          "2 of 3 ranks did not come to broadcast of \"data\" within 10 s: missing 0, 2: rank 0 on a (pid "
          "10), rank 2 on b (pid 12)");
}

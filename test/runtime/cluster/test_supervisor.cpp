#include <sys/wait.h>
#include <unistd.h>

#include "runtime/cluster/supervisor.h"
#include "test/support/catch.h"

namespace {

bool contains(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

ControlSettings quick() {
    ControlSettings settings;
    settings.start_s = settings.step_s = settings.silence_s = 20;
    return settings;
}

// The first hang report, or "" after `limit_s` seconds without one.
std::string hang_of(RankReports& reports, double limit_s) {
    for (const TimePoint end = Clock::now() + seconds(limit_s); Clock::now() < end; ::usleep(10'000))
        if (const auto sentence = reports.find_hang()) return *sentence;
    return "";
}

}  // namespace

TEST_CASE("supervisor: exit codes that may be restarted", "[supervisor]") {
    for (const int code :
         {71, 74, 75, 76, 80, 128 + SIGKILL, 128 + SIGSEGV, 128 + SIGBUS, 128 + SIGABRT, 128 + SIGHUP}) {
        INFO("exit code " << code);
        CHECK(may_restart(code));
    }
    for (const int code : {0, 1, 64, 65, 66, 70, 73, 77, 78, 79, 81, 99, 127, 128, 130, 143, 255}) {
        INFO("exit code " << code);
        CHECK(!may_restart(code));
    }
}

TEST_CASE("supervisor: a final exit is not restarted, with the reason", "[supervisor]") {
    RestartPolicy policy;
    const Restart restart = policy.decide({.code = 78, .has_committed = true});
    CHECK(!restart.is_due);
    CHECK(restart.sentence ==
          "the run ended with exit code 78 (the configuration is wrong), which a restart would not fix: not restarted");
    CHECK(!policy.decide({.code = 0}).is_due);
    CHECK(policy.decide({.code = 0}).sentence == "");
}

TEST_CASE("supervisor: the back-off doubles, and the third unsuccessful restart is the last", "[supervisor]") {
    RestartPolicy policy;
    const RunEnd in_vain{.code = 137};
    CHECK(policy.decide(in_vain).after_s == 1);
    CHECK(policy.decide(in_vain).after_s == 2);
    CHECK(policy.decide(in_vain).after_s == 4);
    const Restart last = policy.decide(in_vain);
    CHECK(!last.is_due);
    CHECK(contains(last.sentence, "exit code 137 (killed by signal 9, Killed)"));
    CHECK(contains(last.sentence, "giving up after 3 restarts in a row that committed no checkpoint"));
}

TEST_CASE("supervisor: a new checkpoint resets the count", "[supervisor]") {
    RestartPolicy policy;
    for (int round = 0; round < 50; round++) {
        CHECK(policy.decide({.code = 76, .has_committed = true}).after_s == 1);
        CHECK(policy.decide({.code = 80}).after_s == 2);
        CHECK(policy.decide({.code = 75}).after_s == 4);
    }
    CHECK(!policy.decide({.code = 74}).is_due);
}

TEST_CASE("supervisor: a requested stop is final", "[supervisor]") {
    RestartPolicy policy;
    for (const int code : {75, 76, 137, 0}) {
        const Restart restart = policy.decide({.code = code, .stop_signal = SIGTERM, .has_committed = true});
        CHECK(!restart.is_due);
        CHECK(restart.sentence == "");
    }
}

TEST_CASE("supervisor: a rank is healthy until its heartbeats stop", "[supervisor]") {
    ControlSettings settings = quick();
    RankReports reports(0, 1, true, settings);
    RankEnvironment environment;
    environment.supervisor = reports.name();
    auto activity = std::make_shared<RankActivity>();
    {
        const std::jthread reporter = start_reports(environment, activity, 0.02);
        CHECK(hang_of(reports, 0.3) == "");
    }
    settings.silence_s = 0.2;
    RankReports strict(0, 1, true, settings);
    environment.supervisor = strict.name();
    {
        const std::jthread reporter = start_reports(environment, activity, 0.02);
        CHECK(hang_of(strict, 0.1) == "");
        activity->note_step(1);
        activity->note_step(2);
        CHECK(hang_of(strict, 0.1) == "");
    }
    const std::string sentence = hang_of(strict, 20);
    CHECK(contains(sentence, "hangs: no heartbeat"));
    CHECK(contains(sentence, "in phase step, step 2"));
    CHECK(contains(sentence, std::to_string(::getpid())));
}

TEST_CASE("supervisor: only a single rank is checked for progress; several check each other", "[supervisor]") {
    ControlSettings settings = quick();
    settings.step_s = 0.2;
    for (const bool is_alone : {true, false}) {
        RankReports reports(0, 1, is_alone, settings);
        RankEnvironment environment;
        environment.supervisor = reports.name();
        auto activity = std::make_shared<RankActivity>();
        activity->note_step(1);
        activity->note_step(2);
        const std::jthread reporter = start_reports(environment, activity, 0.02);
        CHECK(contains(hang_of(reports, is_alone ? 20 : 1), "hangs: no progress") == is_alone);
    }
}

TEST_CASE("supervisor: ranks that do not start are reported", "[supervisor]") {
    ControlSettings settings = quick();
    settings.start_s = 0.2;
    RankReports reports(8, 3, false, settings);
    RankEnvironment environment;
    environment.rank = 9;
    environment.supervisor = reports.name();
    const std::jthread reporter = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
    CHECK(hang_of(reports, 20) == "2 of 3 ranks did not start within 0.2 s (parallel.start_timeout_s): missing 8, 10");
}

TEST_CASE("supervisor: reports of other ranks and of an earlier start do not count", "[supervisor]") {
    ControlSettings settings = quick();
    settings.start_s = 0.4;
    const std::string none = "2 of 2 ranks did not start within 0.4 s (parallel.start_timeout_s): missing 2, 3";
    RankReports reports(2, 2, false, settings);
    RankEnvironment environment;
    environment.supervisor = reports.name();
    for (const int rank : {0, 4}) {
        environment.rank = rank;
        const std::jthread reporter = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
        environment.rank = rank + 1;
        const std::jthread other = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
        CHECK(hang_of(reports, 20) == none);
        reports.begin();
    }
    environment.rank = 2;
    {
        const std::jthread reporter = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
        ::usleep(100'000);
    }
    reports.begin();
    CHECK(hang_of(reports, 20) == none);
}

TEST_CASE("supervisor: a launcher still running long after a rank has ended is hanging", "[supervisor]") {
    ControlSettings settings = quick();
    settings.silence_s = 1.5;
    RankReports reports(0, 2, false, settings);
    RankEnvironment environment;
    environment.supervisor = reports.name();
    const std::jthread reporter = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
    const pid_t other = ::fork();
    if (other == 0) {
        environment.rank = 1;
        const std::jthread short_lived = start_reports(environment, std::make_shared<RankActivity>(), 0.02);
        ::usleep(300'000);
        ::_exit(0);
    }
    CHECK(hang_of(reports, 0.2) == "");
    REQUIRE(::waitpid(other, nullptr, 0) == other);
    CHECK(hang_of(reports, 1) == "");
    const std::string sentence = hang_of(reports, 20);
    CHECK(contains(sentence, "rank 1 on "));
    CHECK(contains(sentence, "(pid " + std::to_string(other) + ") ended "));
    CHECK(contains(sentence, "but the launcher of the ranks is still running"));

    reports.begin();
    CHECK(hang_of(reports, 0.5) == "");
}

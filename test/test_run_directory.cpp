#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <set>
#include <vector>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/io.h"
#include "test/catch.h"
#include "test/expect_error.h"
#include "test/temporary_directory.h"
#include "test/toy_checkpoint.h"

namespace {

// Does something in another process, which does not outlive this one. Its exit status is 1 for an Error.
template <class Action> pid_t in_child(Action action) {
    pid_t child = ::fork();
    if (child != 0) return child;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
        action();
        ::_exit(0);
    } catch (const Error&) {
        ::_exit(1);
    }
}

int exit_status(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("a run directory has one user at a time") {
    TemporaryDirectory run;
    {
        RunLock lock(run.path());
        CHECK_THAT(read_file(run / "lock"), ContainsSubstring("pid " + std::to_string(::getpid()) + ","));
        expect_error(Exit::cannot_create, {run.path(), "in use", "pid " + std::to_string(::getpid())},
                     [&] { RunLock second(run.path()); });
        CHECK(exit_status(in_child([&] { RunLock second(run.path()); })) == 1);
        RunLock moved = std::move(lock);
        CHECK(exit_status(in_child([&] { RunLock second(run.path()); })) == 1);
    }
    CHECK(exit_status(in_child([&] { RunLock second(run.path()); })) == 0);
    expect_error(Exit::cannot_create, {"absent"}, [&] { RunLock lock(run / "absent"); });
}

TEST_CASE("a killed process holds no lock") {
    TemporaryDirectory run;
    int ready[2];
    REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
    pid_t child = in_child([&] {
        RunLock lock(run.path());
        if (::write(ready[1], "x", 1) == 1) ::pause();
    });
    char byte;
    REQUIRE(::read(ready[0], &byte, 1) == 1);
    expect_error(Exit::cannot_create, {"pid " + std::to_string(child)}, [&] { RunLock lock(run.path()); });
    ::kill(child, SIGKILL);
    CHECK(exit_status(child) == -1);
    RunLock lock(run.path());
    CHECK_THAT(read_file(run / "lock"), !ContainsSubstring("pid " + std::to_string(child) + ","));
    ::close(ready[0]), ::close(ready[1]);
}

TEST_CASE("of several starts at once exactly one gets the directory") {
    for (int round = 0; round < 25; round++) {
        TemporaryDirectory parent;
        int start[2], release[2];
        REQUIRE(::pipe2(start, O_CLOEXEC) == 0);
        REQUIRE(::pipe2(release, O_CLOEXEC) == 0);
        std::vector<pid_t> children;
        int results[2];
        REQUIRE(::pipe2(results, O_CLOEXEC) == 0);
        for (int i = 0; i < 4; i++)
            children.push_back(in_child([&] {
                ::close(start[1]), ::close(release[1]);
                char byte = 'w';
                while (::read(start[0], &byte, 1) > 0) continue;  // all begin when the parent closes its end
                std::optional<RunDirectory> run;
                try {
                    run = open_run_directory(parent / "run", StartMode::automatic);
                    byte = 'w';
                } catch (const Error&) {
                    byte = 'l';
                }
                if (::write(results[1], &byte, 1) != 1) ::_exit(2);
                while (::read(release[0], &byte, 1) > 0) continue;
            }));
        ::close(start[1]);
        int winners = 0;
        for (size_t i = 0; i < children.size(); i++) {
            char byte = 0;
            REQUIRE(::read(results[0], &byte, 1) == 1);
            winners += byte == 'w';
        }
        ::close(release[1]);
        for (pid_t child : children) CHECK(exit_status(child) == 0);
        for (int end : {start[0], release[0], results[0], results[1]}) ::close(end);
        CHECK(winners == 1);
    }
}

TEST_CASE("what a start does follows from the flag and from what is there") {
    using enum StartMode;
    using enum RunDirState;
    auto decide = [](StartMode mode, RunDirState state) { return decide_start(mode, state, "runs/x"); };
    for (RunDirState nothing : {absent, empty}) {
        CHECK(decide(only_new, nothing) == StartAction::start);
        CHECK(decide(automatic, nothing) == StartAction::start);
        CHECK(decide(fresh, nothing) == StartAction::start);
        expect_error(Exit::no_input, {"--resume", "runs/x"}, [&] { decide(resume, nothing); });
    }
    expect_error(Exit::usage, {"runs/x", "--resume", "--auto", "--fresh"}, [&] { decide(only_new, occupied); });
    CHECK(decide(resume, occupied) == StartAction::resume);
    CHECK(decide(automatic, occupied) == StartAction::resume_or_start);
    CHECK(decide(fresh, occupied) == StartAction::move_aside_and_start);
}

TEST_CASE("opening a run directory moves an older run aside only if asked to, and deletes nothing") {
    TemporaryDirectory parent;
    std::string dir = parent / "deep/er/run";
    expect_error(Exit::no_input, {"does not exist"}, [&] { open_run_directory(dir, StartMode::resume); });
    CHECK(list_directory(parent.path()).empty());

    {
        RunDirectory run = open_run_directory(dir, StartMode::only_new);
        CHECK(run.action == StartAction::start);
        CHECK(run.moved_to == "");
        CHECK(state_of_run_dir(dir) == RunDirState::empty);
        overwrite(dir + "/metrics.jsonl", "first");
        expect_error(Exit::cannot_create, {"in use"}, [&] { open_run_directory(dir, StartMode::fresh); });
        CHECK(read_file(dir + "/metrics.jsonl") == "first");
    }
    expect_error(Exit::usage, {dir}, [&] { open_run_directory(dir, StartMode::only_new); });
    CHECK(open_run_directory(dir, StartMode::resume).action == StartAction::resume);
    CHECK(open_run_directory(dir, StartMode::automatic).action == StartAction::resume_or_start);
    {
        RunDirectory run = open_run_directory(dir + "//", StartMode::fresh);
        CHECK(run.moved_to == dir + ".old-1");
        CHECK(read_file(dir + ".old-1/metrics.jsonl") == "first");
        CHECK(state_of_run_dir(dir) == RunDirState::empty);
        expect_error(Exit::cannot_create, {"in use"}, [&] { RunLock second(dir); });
        RunLock of_the_old(dir + ".old-1");
        overwrite(dir + "/metrics.jsonl", "second");
    }
    CHECK(open_run_directory(dir, StartMode::fresh).moved_to == dir + ".old-2");
    CHECK(read_file(dir + ".old-1/metrics.jsonl") == "first");
    CHECK(read_file(dir + ".old-2/metrics.jsonl") == "second");

    overwrite(parent / "file", "");
    for (StartMode mode : {StartMode::only_new, StartMode::resume, StartMode::automatic, StartMode::fresh})
        expect_error(Exit::cannot_create, {"file is not a directory"},
                     [&] { open_run_directory(parent / "file", mode); });
}

TEST_CASE("run ids differ") {
    std::set<std::string> ids;
    for (int i = 0; i < 1000; i++) ids.insert(new_run_id());
    CHECK(ids.size() == 1000);
    CHECK(ids.begin()->size() == 32);
}

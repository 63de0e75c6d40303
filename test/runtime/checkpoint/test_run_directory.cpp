#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "runtime/io/files.h"
#include "runtime/io/lock.h"
#include "runtime/io/process.h"
#include "test/support/expect_error.h"
#include "test/support/system_faults.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

// Runs an action in a child process that dies with this one. Its exit status is 1 if an Error is thrown.
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
        DirectoryLock lock(run.path());
        CHECK_THAT(read_file(run / "lock"), ContainsSubstring("pid " + std::to_string(::getpid()) + ","));
        expect_error(Exit::cannot_create, {run.path(), "in use", "pid " + std::to_string(::getpid())},
                     [&] { DirectoryLock(run.path()); });
        CHECK(exit_status(in_child([&] { DirectoryLock(run.path()); })) == 1);
        const DirectoryLock moved = std::move(lock);
        CHECK(exit_status(in_child([&] { DirectoryLock(run.path()); })) == 1);
    }
    CHECK(exit_status(in_child([&] { DirectoryLock(run.path()); })) == 0);
    expect_error(Exit::cannot_create, {"absent"}, [&] { DirectoryLock(run / "absent"); });
}

TEST_CASE("a lock reports that its directory has been moved or removed") {
    TemporaryDirectory parent;
    const std::string run = parent / "run";
    make_directories(run);
    DirectoryLock lock(run);
    CHECK(lock.is_in_place());
    std::filesystem::rename(run, parent / "moved");
    CHECK_FALSE(lock.is_in_place());
    make_directories(run);
    CHECK_FALSE(lock.is_in_place());
    DirectoryLock second(run);  // another run has started there
    CHECK_FALSE(lock.is_in_place());
    CHECK(second.is_in_place());
    std::filesystem::remove_all(run);
    std::filesystem::rename(parent / "moved", run);
    CHECK(lock.is_in_place());
    std::filesystem::remove_all(run);
    CHECK_FALSE(lock.is_in_place());
}

TEST_CASE("a file missing in a directory that has been moved is not reported as a missing input") {
    TemporaryDirectory parent;
    const std::string run = parent / "run";
    make_directories(run);
    DirectoryLock lock(run);
    const auto look = [&] { read_file(run + "/absent"); };
    const auto move_and = [&](const std::function<void()>& action) {
        return [&, action] {
            std::filesystem::rename(run, parent / "moved");
            action();
        };
    };
    lock.guard([] {});
    expect_error(Exit::no_input, {"absent"}, [&] { lock.guard(look); });
    expect_error(Exit::io, {run, "moved or removed"}, [&] { lock.guard(move_and(look)); });
    std::filesystem::rename(parent / "moved", run);
    expect_error(Exit::io, {run, "moved or removed"}, [&] { lock.guard(move_and([] {})); });
    DirectoryLock none;
    none.guard([] {});
    expect_error(Exit::no_input, {"absent"}, [&] { none.guard(look); });
}

TEST_CASE("without file system locks the lock's holder is known by its process and its timestamps") {
    for (const int error : {ENOSYS, EOPNOTSUPP, ENOLCK}) {
        const SystemFault fault(SystemCall::lock, "/lock", error);
        TemporaryDirectory run;
        int ready[2];
        REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
        const pid_t child = in_child([&] {
            const DirectoryLock lock(run.path());
            if (::write(ready[1], "x", 1) == 1) ::pause();
        });
        char byte;
        REQUIRE(::read(ready[0], &byte, 1) == 1);
        expect_error(Exit::cannot_create, {run.path(), "in use", "pid " + std::to_string(child)},
                     [&] { DirectoryLock(run.path()); });
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
        { DirectoryLock lock(run.path()); }

        std::ofstream(run / "lock") << "pid 1, host elsewhere, boot 0\n";
        expect_error(Exit::cannot_create, {run.path(), "in use", "host elsewhere", "last updated it", "60 s"},
                     [&] { DirectoryLock(run.path()); });
        const timespec long_ago[2] = {{::time(nullptr) - 61, 0}, {::time(nullptr) - 61, 0}};
        ::utimensat(AT_FDCWD, (run / "lock").c_str(), long_ago, 0);
        { DirectoryLock lock(run.path()); }
        for (const int end : ready) ::close(end);
    }
    TemporaryDirectory run;
    const SystemFault fault(SystemCall::lock, "/lock", EIO);
    expect_error(Exit::cannot_create, {"cannot lock", run.path()}, [&] { DirectoryLock(run.path()); });
}

TEST_CASE("a killed process holds no lock") {
    TemporaryDirectory run;
    int ready[2];
    REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
    pid_t child = in_child([&] {
        const DirectoryLock lock(run.path());
        if (::write(ready[1], "x", 1) == 1) ::pause();
    });
    char byte;
    REQUIRE(::read(ready[0], &byte, 1) == 1);
    expect_error(Exit::cannot_create, {"pid " + std::to_string(child)}, [&] { DirectoryLock(run.path()); });
    ::kill(child, SIGKILL);
    CHECK(exit_status(child) == -1);
    const DirectoryLock lock(run.path());
    CHECK_THAT(read_file(run / "lock"), !ContainsSubstring("pid " + std::to_string(child) + ","));
    ::close(ready[0]), ::close(ready[1]);
}

TEST_CASE("exactly one of several starts at once gets the directory") {
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
                while (::read(start[0], &byte, 1) > 0) continue;  // all start when the parent closes its end
                DirectoryLock lock;
                try {
                    lock = open_run_directory(parent / "run", StartMode::automatic);
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

TEST_CASE("the flag and the directory's contents decide whether a start is rejected") {
    using enum StartMode;
    using enum RunDirState;
    auto check = [](StartMode mode, RunDirState state) { check_start(mode, state, "runs/x"); };
    for (RunDirState nothing : {absent, empty}) {
        for (StartMode mode : {only_new, automatic, fresh}) CHECK_NOTHROW(check(mode, nothing));
        expect_error(Exit::no_input, {"--resume", "runs/x"}, [&] { check(resume, nothing); });
    }
    expect_error(Exit::usage, {"runs/x", "--resume", "--auto", "--fresh"}, [&] { check(only_new, occupied); });
    for (StartMode mode : {resume, automatic, fresh}) CHECK_NOTHROW(check(mode, occupied));
}

TEST_CASE("opening a run directory moves an older run aside only on request, and deletes nothing") {
    TemporaryDirectory parent;
    std::string dir = parent / "deep/er/run";
    expect_error(Exit::no_input, {"does not exist"}, [&] { open_run_directory(dir, StartMode::resume); });
    CHECK(list_directory(parent.path()).empty());

    {
        const DirectoryLock lock = open_run_directory(dir, StartMode::only_new);
        CHECK(list_directory(parent / "deep/er") == std::vector<std::string>{"run"});
        CHECK(state_of_run_dir(dir) == RunDirState::empty);
        overwrite(dir + "/metrics.jsonl", "first");
        expect_error(Exit::cannot_create, {"in use"}, [&] { open_run_directory(dir, StartMode::fresh); });
        CHECK(read_file(dir + "/metrics.jsonl") == "first");
    }
    expect_error(Exit::usage, {dir}, [&] { open_run_directory(dir, StartMode::only_new); });
    for (StartMode mode : {StartMode::resume, StartMode::automatic}) {
        open_run_directory(dir, mode);
        CHECK(read_file(dir + "/metrics.jsonl") == "first");
    }
    {
        const DirectoryLock lock = open_run_directory(dir + "//", StartMode::fresh);
        CHECK(read_file(dir + ".old-1/metrics.jsonl") == "first");
        CHECK(state_of_run_dir(dir) == RunDirState::empty);
        expect_error(Exit::cannot_create, {"in use"}, [&] { DirectoryLock{dir}; });
        const DirectoryLock of_the_old(dir + ".old-1");
        overwrite(dir + "/metrics.jsonl", "second");
    }
    open_run_directory(dir, StartMode::fresh);
    CHECK(read_file(dir + ".old-1/metrics.jsonl") == "first");
    CHECK(read_file(dir + ".old-2/metrics.jsonl") == "second");

    overwrite(parent / "file", "");
    for (StartMode mode : {StartMode::only_new, StartMode::resume, StartMode::automatic, StartMode::fresh})
        expect_error(Exit::cannot_create, {"file is not a directory"},
                     [&] { open_run_directory(parent / "file", mode); });
}

TEST_CASE("run ids differ") {
    std::set<std::string> ids;
    for (int i = 0; i < 1000; i++) ids.insert(random_hex(16));
    CHECK(ids.size() == 1000);
    CHECK(ids.begin()->size() == 32);
}

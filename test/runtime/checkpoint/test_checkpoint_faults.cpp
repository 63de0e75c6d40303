#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

// Limits this process's files to `bytes`: writes fail with EFBIG, as they fail with ENOSPC on a full disk.
class FileSizeLimit {
public:
    explicit FileSizeLimit(size_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
        ::getrlimit(RLIMIT_FSIZE, &before_);
        rlimit limit = before_;
        limit.rlim_cur = bytes;
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileSizeLimit() {
        ::setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }

private:
    void (*handler_)(int);
    rlimit before_{};
};

const std::vector<std::vector<size_t>> kShapes = {{101}, {3}};

ToyModel model_of_step(int64_t step) { return ToyModel(uint64_t(step), kShapes); }

bool holds_its_step(const Checkpoint& checkpoint) {
    ToyModel loaded(0, kShapes);
    checkpoint.load(loaded.tensors());
    return loaded == model_of_step(checkpoint.manifest().info.step);
}

// Tries to save `step`; true if it was committed. A failure must have code Exit::io and leave no files.
bool try_tensors(const std::string& run_dir, int64_t step) {
    auto before = list_directory(checkpoints_directory(run_dir));
    try {
        save_toy(run_dir, step, model_of_step(step));
        return true;
    } catch (const Error& error) {
        require(error.code == Exit::io, "exit code %d: %s", int(error.code), error.what());
        require(list_directory(checkpoints_directory(run_dir)) == before, "something is left over");
        return false;
    }
}

constexpr int kMayNot = 77;  // exit status of a child that lacks the permission for the test

void stay_quiet(const std::string&) {}

[[noreturn]] void save_until_killed(const std::string& run_dir, int64_t step, int report) {
    for (;; step++) {
        save_toy(run_dir, step, model_of_step(step));
        if (::write(report, &step, sizeof step) != sizeof step) ::_exit(1);
        apply_retention(run_dir, "run-a", {.keep = 2});
    }
}

// Starts a child that saves from `step` until it has reported `commits`, kills it a little later (`more`), and returns
// the last step that it reported.
int64_t save_and_kill(const std::string& run_dir, int64_t step, int commits, std::chrono::nanoseconds more) {
    int reports[2];
    REQUIRE(::pipe2(reports, O_CLOEXEC) == 0);
    pid_t child = ::fork();
    if (child == 0) {
        try {
            save_until_killed(run_dir, step, reports[1]);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            ::_exit(1);
        }
    }
    ::close(reports[1]);
    int64_t committed = step - 1;
    auto listen = [&] { return ::read(reports[0], &committed, sizeof committed) == sizeof committed; };
    for (int i = 0; i < commits; i++) CHECK(listen());
    std::this_thread::sleep_for(more);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    while (listen()) continue;
    ::close(reports[0]);
    return committed;
}

// Starts a child that saves one step and deletes an older one, and kills it at its `stop`-th system call entry or
// exit. False if it ended before; empty if this process may not use ptrace.
std::optional<bool> save_and_kill_at(const std::string& run_dir, int64_t step, int stop) {
    pid_t child = ::fork();
    if (child == 0) {
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kMayNot);
        ::raise(SIGSTOP);
        save_toy(run_dir, step, model_of_step(step));
        apply_retention(run_dir, "run-a", {.keep = 1});
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kMayNot) return {};
    for (int i = 0; i < stop && WIFSTOPPED(status); i++) {
        ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
        ::waitpid(child, &status, 0);
    }
    if (!WIFSTOPPED(status)) {
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
        return false;
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    return true;
}

// Saves on a file system of `bytes` and checks the result: 0 if it is as expected, 1 if it is not, or kMayNot.
int save_on_full_disk(const std::string& directory, size_t bytes) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", directory.c_str(), "tmpfs", 0, ("size=" + std::to_string(bytes)).c_str()) != 0)
        return kMayNot;
    try {
        save_toy(directory, 1, model_of_step(1));
    } catch (const Error&) {
        return 0;  // not even one checkpoint fits
    }
    int64_t step = 2;
    while (try_tensors(directory, step)) step++;
    auto found = find_newest_valid(directory, stay_quiet);
    return found && found->manifest().info.step == step - 1 && holds_its_step(*found) ? 0 : 1;
}

}  // namespace

TEST_CASE("a save that fails at any byte of any file leaves only the older checkpoint") {
    TemporaryDirectory run;
    save_toy(run.path(), 1, model_of_step(1));
    size_t failed = 0;
    bool committed = false;
    for (size_t bytes = 0; !committed; bytes += 13) {
        REQUIRE(bytes < 10'000);
        {
            FileSizeLimit limit(bytes);
            committed = try_tensors(run.path(), 2);
        }
        failed += !committed;
        auto found = find_newest_valid(run.path(), stay_quiet);
        REQUIRE(found);
        REQUIRE(found->manifest().info.step == (committed ? 2 : 1));
        REQUIRE(holds_its_step(*found));
    }
    CHECK(failed > 60);  // in the shard, in its record and in the manifest
}

TEST_CASE("a full disk loses only the checkpoint that does not fit") {
    TemporaryDirectory place;
    for (size_t pages = 1; pages <= 24; pages++) {
        pid_t child = ::fork();
        if (child == 0) {
            int result = 2;
            try {
                result = save_on_full_disk(place.path(), pages * 4096);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s\n", error.what());
            }
            ::_exit(result);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        REQUIRE(WIFEXITED(status));
        if (WEXITSTATUS(status) == kMayNot) {
            WARN("skipped: this process may not mount a file system");
            return;
        }
        INFO(pages << " pages");
        CHECK(WEXITSTATUS(status) == 0);
    }
}

TEST_CASE("whenever a process is killed, the newest checkpoint that it committed exists") {
    TemporaryDirectory run;
    std::chrono::duration<double> save_time(save_toy(run.path(), 1, model_of_step(1)).seconds);
    int64_t next = 2;
    for (uint64_t trial = 0; trial < 60; trial++) {
        float fraction = uniform_from_bits(philox(11, 0, trial).word[0]);
        auto more = std::chrono::duration_cast<std::chrono::nanoseconds>(1.5 * fraction * save_time);
        int64_t committed = save_and_kill(run.path(), next, int(trial % 3), more);
        std::string reports;
        auto found = find_newest_valid(run.path(), [&](const std::string& sentence) { reports += sentence + "\n"; });
        INFO("trial " << trial << ", committed " << committed << "\n" << reports);
        CHECK(reports.empty());
        REQUIRE(found);
        int64_t step = found->manifest().info.step;
        CHECK(step >= committed);
        CHECK(step <= committed + 1);  // committed, but killed before reporting it
        CHECK(holds_its_step(*found));
        CHECK(committed_steps(run.path()).size() <= 3);  // killed before retention: one more than kept
        apply_retention(run.path(), found->manifest().info.run_id, {.keep = 2});  // like the next process's first save
        CHECK(committed_steps(run.path()).size() <= 2);
        next = step + 1;
    }
}

TEST_CASE("a save and a deletion may be killed at any system call") {
    TemporaryDirectory run;
    save_toy(run.path(), 1, model_of_step(1));
    int64_t newest = 1;
    int stop = 1;
    for (bool was_killed = true; was_killed; stop++) {
        auto result = save_and_kill_at(run.path(), newest + 1, stop);
        if (!result) {
            WARN("skipped: this process may not trace another one");
            return;
        }
        was_killed = *result;
        std::string reports;
        auto found = find_newest_valid(run.path(), [&](const std::string& sentence) { reports += sentence + "\n"; });
        INFO("killed at stop " << stop << "\n" << reports);
        CHECK(reports.empty());
        REQUIRE(found);
        int64_t step = found->manifest().info.step;
        REQUIRE(step >= newest);
        REQUIRE(step <= newest + 1);
        CHECK(holds_its_step(*found));
        newest = step;
        apply_retention(run.path(), "run-a", {.keep = 1});  // the next child starts from the same state
        REQUIRE(stop < 2000);
    }
    CHECK(stop > 100);
    CHECK(newest > 2);
}

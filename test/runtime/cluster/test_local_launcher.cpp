#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/local_launcher.h"
#include "runtime/io/json.h"
#include "test/support/catch.h"
#include "test/support/rank_processes.h"

// The cases whose names begin with "child:" are not tests. The ranks that launch_local_ranks() starts from this program
// run them and terminate with _exit.
namespace {

ControlSettings quick() {
    ControlSettings settings;
    settings.heartbeat_s = 0.1;
    return settings;
}

[[noreturn]] void sleep_for_ever() {
    ::alarm(60);  // in case a failed test leaves the process running
    for (;;) ::pause();
}

// Appears in the command line of every process that this test run starts for `child`, and in no other.
std::string mark_of(const std::string& child) {
    static const pid_t test = ::getpid();
    return child + " for " + std::to_string(test);
}

// Starts a process that calls launch_local_ranks(), whose ranks run a case, and that exits with the result.
int start(RankProcesses& launchers, const std::string& child, int count = 3, const LocalNode& node = {}) {
    return launchers.start({}, [=, mark = mark_of(child)](const RankEnvironment&) {
        return launch_local_ranks(count, {"test", "child: " + child, "-o", "/dev/null", "-n", mark},
                                  {.grace_s = 1, .term_s = 0.5, .node = node});
    });
}

int code_of(const std::string& child) {
    RankProcesses launchers(1);
    const int code = launchers.wait(start(launchers, child));
    INFO("printed: " << launchers.printed(0));
    CHECK(launchers.printed(0) == "");
    return code;
}

int count_processes(const std::string& child) {
    const std::string mark = mark_of(child);
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
        std::ifstream file(entry.path() / "cmdline");
        const std::string command(std::istreambuf_iterator<char>(file), {});
        count += command.find(mark) != std::string::npos;
    }
    return count;
}

void wait_until_gone(const std::string& child) {
    for (const TimePoint deadline = Clock::now() + seconds(10); count_processes(child) > 0; ::usleep(20'000))
        if (Clock::now() > deadline) break;
    CHECK(count_processes(child) == 0);
}

volatile std::sig_atomic_t* seen_signals() {
    static volatile std::sig_atomic_t seen = 0;
    return &seen;
}

}  // namespace

TEST_CASE("child: meets and leaves", "[.child]") {
    const RankEnvironment environment = find_rank_environment();
    ControlChannel control(environment, quick());
    const bool is_sound = environment.launcher == "torchrun" && environment.size == 3 &&
                          environment.local_rank == environment.rank && environment.local_size == 3 &&
                          environment.token.size() == 32 && ::getpgrp() == ::getpid();
    const std::vector<std::string> ranks = control.all_gather(std::to_string(environment.rank), "ranks");
    control.leave();
    char byte;
    ::_exit(is_sound && ranks == std::vector<std::string>{"0", "1", "2"} && ::read(0, &byte, 1) == 0 ? 0 : 1);
}

TEST_CASE("child: is one of two nodes with two ranks each", "[.child]") {
    const RankEnvironment environment = find_rank_environment();
    ControlChannel control(environment, quick());
    const bool is_sound = environment.launcher == "torchrun" && environment.size == 4 && environment.local_size == 2 &&
                          environment.local_rank == environment.rank % 2 && environment.listen_fd == -1;
    const std::vector<std::string> ranks = control.all_gather(std::to_string(environment.rank), "ranks");
    control.leave();
    ::_exit(is_sound && ranks == std::vector<std::string>{"0", "1", "2", "3"} ? 0 : 1);
}

TEST_CASE("child: one dies", "[.child]") {
    const RankEnvironment environment = find_rank_environment();
    ControlChannel control(environment, quick());
    control.require_same("", "start");
    if (environment.rank == 1) std::raise(SIGKILL);
    sleep_for_ever();
}

TEST_CASE("child: one exits with code 65", "[.child]") {
    const RankEnvironment environment = find_rank_environment();
    ControlChannel control(environment, quick());
    control.require_same("", "start");
    if (environment.rank != 2) sleep_for_ever();
    control.leave_with_error(Exit::data, "bad shard");
    ::_exit(65);
}

TEST_CASE("child: one is stopped", "[.child]") {
    const RankEnvironment environment = find_rank_environment();
    ControlSettings settings = quick();
    settings.silence_s = 1.2;
    ControlChannel control(environment, settings);
    control.require_same("", "start");
    if (environment.rank == 1) std::raise(SIGSTOP);
    sleep_for_ever();
}

TEST_CASE("child: one fails and nobody listens", "[.child]") {
    for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, SIG_IGN);
    // An exit code that is less informative than a signal.
    if (find_rank_environment().rank == 0) ::_exit(int(Exit::peer_lost));
    if (::fork() == 0) sleep_for_ever();  // a child of the rank must be killed, too
    sleep_for_ever();
}

TEST_CASE("child: each ends after the one before", "[.child]") {
    const int rank = find_rank_environment().rank;
    const std::string children = format("/proc/%d/task/%d/children", ::getppid(), ::getppid());
    // The first of the remaining ranks is this one.
    for (pid_t first = 0; first != ::getpid(); ::usleep(5000)) std::ifstream(children) >> first;
    ::_exit(rank == 0 ? 65 : 74);
}

TEST_CASE("child: all exit with code 75 on a signal", "[.child]") {
    ControlChannel control(find_rank_environment(), quick());
    std::signal(SIGUSR1, [](int) { *seen_signals() = *seen_signals() + 1; });
    std::signal(SIGTERM, [](int) { *seen_signals() = *seen_signals() + 10; });
    control.require_same("", "handlers");
    if (find_rank_environment().rank == 0) {
        ::kill(::getppid(), SIGUSR1);
        ::usleep(200'000);
        ::kill(::getppid(), SIGTERM);
    }
    for (const TimePoint deadline = Clock::now() + seconds(10); *seen_signals() < 11 && Clock::now() < deadline;)
        ::usleep(10'000);
    ::usleep(100'000);  // a further signal must not arrive
    control.leave();
    ::_exit(*seen_signals() == 11 ? 75 : 1);
}

TEST_CASE("child: waits for ever", "[.child]") { sleep_for_ever(); }

TEST_CASE("local launcher: ranks connect and have a rank, a token and an empty stdin", "[control]") {
    CHECK(code_of("meets and leaves") == 0);
}

TEST_CASE("local launcher: the ranks of several machines form one run", "[control]") {
    const std::string child = "is one of two nodes with two ranks each";
    RankProcesses launchers(1);
    const int port = address_of(listen_on_loopback()).port();
    for (const int node : {1, 0}) start(launchers, child, 2, {node, 2, "127.0.0.1", port});
    for (const int node : {0, 1}) {
        CHECK(launchers.wait(node) == 0);
        CHECK(launchers.printed(node) == "");
    }
}

TEST_CASE("local launcher: returns the most informative exit code and leaves no process", "[control]") {
    struct Case {
        const char* child;
        int code;
        std::vector<std::string> words;
    };
    const std::vector<Case> cases = {
        {"one dies", 128 + SIGKILL, {"rank 0 ends: rank 1 on ", "rank 2 ends: rank 1 on ", "was killed by signal 9"}},
        {"one exits with code 65", 65, {"rank 0 ends: rank 2 on ", "bad shard"}},
        {"one is stopped", 80, {"rank 0 ends: rank 1 on ", "no heartbeat"}},
        {"one fails and nobody listens", 76, {}},
        {"each ends after the one before", 65, {}}};
    RankProcesses launchers(1);
    for (const Case& one : cases) start(launchers, one.child);
    for (size_t i = 0; i < cases.size(); ++i) {
        INFO(cases[i].child);
        CHECK(launchers.wait(int(i)) == cases[i].code);
        const std::string printed = launchers.printed(int(i));
        INFO("printed: " << printed);
        for (const std::string& word : cases[i].words) CHECK(printed.find(word) != std::string::npos);
        wait_until_gone(cases[i].child);
    }
}

TEST_CASE("local launcher: signals reach every rank once", "[control]") {
    CHECK(code_of("all exit with code 75 on a signal") == 75);
}

TEST_CASE("local launcher: ranks do not outlive it", "[control]") {
    RankProcesses launcher(1);
    const int process = start(launcher, "waits for ever");
    for (const TimePoint deadline = Clock::now() + seconds(10); count_processes("waits for ever") < 3;)
        if (::usleep(20'000), Clock::now() > deadline) break;
    CHECK(count_processes("waits for ever") == 3);
    launcher.kill(process, SIGKILL);
    CHECK(launcher.wait(process) == 128 + SIGKILL);
    wait_until_gone("waits for ever");
}

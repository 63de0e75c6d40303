#include "runtime/cluster/child_program.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "kernels/base/check.h"
#include "runtime/cluster/socket.h"
#include "runtime/io/process.h"

namespace {

constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
constexpr double kRound_s = 0.1;  // maximum between two checks of the program
constexpr double kRepeat_s = 1;   // between two stop requests
constexpr double kTermination_s = 10;

std::vector<pid_t> children_of(pid_t pid) {
    std::vector<pid_t> pids;
    std::error_code ignored;
    for (const auto& thread : std::filesystem::directory_iterator(format("/proc/%d/task", int(pid)), ignored)) {
        std::ifstream file(thread.path() / "children");
        for (pid_t child; file >> child;) pids.push_back(child);
    }
    return pids;
}

// Returns whether the process exists and is not a zombie.
bool is_alive(pid_t pid) {
    std::string stat;
    std::getline(std::ifstream(format("/proc/%d/stat", int(pid))), stat);
    const size_t name_end = stat.rfind(") ");
    return name_end != std::string::npos && stat[name_end + 2] != 'Z';
}

// Kills all descendants: a process whose parent has died becomes a child of this one. Processes in an uninterruptible
// system call may survive.
void kill_children() {
    for (const TimePoint deadline = Clock::now() + seconds(kTermination_s); Clock::now() < deadline; ::usleep(10'000)) {
        const std::vector<pid_t> left = children_of(::getpid());
        if (left.empty()) return;
        for (const pid_t pid : left) ::kill(pid, SIGKILL);
        while (::waitpid(-1, nullptr, WNOHANG) > 0) {}
    }
}

// Returns the program's exit code if it has ended.
std::optional<int> code_of_ended(pid_t pid) {
    int status = 0;
    if (::waitpid(pid, &status, WNOHANG) != pid) return std::nullopt;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

StopSignals::StopSignals() {
    sigemptyset(&waited_for_);
    for (const int signal : kStopSignals) sigaddset(&waited_for_, signal);
    for (const int signal : {SIGCHLD, SIGHUP, SIGPIPE}) sigaddset(&waited_for_, signal);
    ::sigprocmask(SIG_BLOCK, &waited_for_, &before_);
    std::signal(SIGCHLD, SIG_DFL);  // if it is ignored, the exit codes of children are lost
}

int StopSignals::wait(double limit_s) {
    const TimePoint deadline = Clock::now() + seconds(limit_s);
    for (;;) {
        const auto left = std::max(Clock::duration(0), deadline - Clock::now());
        const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
        const timespec time{time_t(whole.count()), long(std::chrono::nanoseconds(left - whole).count())};
        const int signal = ::sigtimedwait(&waited_for_, nullptr, &time);
        if (std::ranges::count(kStopSignals, signal)) {
            if (received_ == 0) received_ = signal;
            return signal;
        }
        if (signal == SIGCHLD || Clock::now() >= deadline) return 0;
    }
}

pid_t start_child(const std::string& name, int last_signal, const StopSignals& signals,
                  const std::function<void()>& execute) {
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid < 0) fail(Exit::os, "cannot start %s: %s", name, std::strerror(errno));
    if (pid > 0) {
        ::setpgid(pid, pid);  // also here, so that the group exists before the first signal to it
        return pid;
    }
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, last_signal);
    if (::getppid() != parent) ::_exit(128 + last_signal);  // it was killed before the line above
    const int null = ::open("/dev/null", O_RDONLY);
    if (null > STDIN_FILENO) ::dup2(null, STDIN_FILENO), ::close(null);
    ::sigprocmask(SIG_SETMASK, &signals.mask_before(), nullptr);
    execute();
    ::_exit(int(Exit::os));
}

int run_child(std::vector<std::string> command, StopSignals& signals,
              const std::function<std::optional<std::string>()>& find_hang, int output) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    const pid_t pid = start_child(command[0], SIGTERM, signals, [&] {
        ::dup2(output, STDOUT_FILENO);
        ::execvp(command[0].c_str(), argv_of(command).data());
        std::fprintf(stderr, "train_gpt: cannot start %s: %s\n", command[0].c_str(), std::strerror(errno));
        if (errno == ENOENT) ::_exit(int(Exit::no_input));
    });
    std::optional<int> code;
    std::optional<TimePoint> next_request, killed_at;
    while (!(code = code_of_ended(pid))) {
        const TimePoint now = Clock::now();
        if (const int signal = signals.wait(kRound_s); signal == 0) {
        } else if (!next_request) {
            next_request = now;
        } else if (signal == SIGINT || signal == SIGTERM) {
            ::kill(pid, signal);
            if (!killed_at) killed_at = now + seconds(kTermination_s);
        }
        if (next_request && !killed_at && now >= *next_request) {
            ::kill(pid, SIGUSR1);
            next_request = now + seconds(kRepeat_s);
        }
        const std::optional<std::string> hang = find_hang ? find_hang() : std::nullopt;
        if (hang) std::fprintf(stderr, "train_gpt: %s\n", hang->c_str());
        if (hang || (killed_at && now > *killed_at)) {
            ::kill(-pid, SIGKILL);
            ::waitpid(pid, nullptr, 0);
            code = hang ? int(Exit::hang) : 128 + SIGKILL;
            break;
        }
    }
    kill_children();
    const bool had_not_begun = next_request && !killed_at && *code == 128 + SIGUSR1;
    return had_not_begun ? int(Exit::again) : *code;
}

std::function<std::optional<std::string>()> find_childless_launcher(const std::string& name, double limit_s) {
    return [name, limit_s, last_seen = std::optional<TimePoint>()]() mutable -> std::optional<std::string> {
        const TimePoint now = Clock::now();
        for (const pid_t launcher : children_of(::getpid()))
            if (std::ranges::any_of(children_of(launcher), is_alive)) last_seen = now;
        if (!last_seen || now <= *last_seen + seconds(limit_s)) return std::nullopt;
        return format("all ranks have ended, but %s did not end within %g s", name.c_str(), limit_s);
    };
}

std::vector<char*> argv_of(std::vector<std::string>& arguments) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    return pointers;
}

Subprocess::Subprocess(std::vector<std::string> command) : start_ms_(now_ms()) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail(Exit::os, "cannot create a pipe: %s", std::strerror(errno));
    output_ = FileDescriptor(ends[0]);
    const FileDescriptor input(ends[1]);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, input, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, input, STDERR_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setpgroup(&attributes, 0);
    const int error = ::posix_spawn(&pid_, command[0].c_str(), &files, &attributes, argv_of(command).data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (error != 0) fail(Exit::os, "cannot start %s: %s", command[0], std::strerror(error));
}

Subprocess::~Subprocess() {
    if (pid_ == 0) return;
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

Subprocess::Result Subprocess::wait(double limit_s) {
    Result result;
    for (bool is_open = true; is_open;) {
        const double left_ms = start_ms_ + 1000 * limit_s - now_ms();
        if (left_ms <= 0) break;
        pollfd end{.fd = output_, .events = POLLIN, .revents = 0};
        if (::poll(&end, 1, int(std::min(left_ms + 1, 1e6))) <= 0) continue;  // a signal, or the limit
        char bytes[4096];
        const ssize_t count = ::read(output_, bytes, sizeof bytes);
        if (count > 0) result.output.append(bytes, size_t(count));
        is_open = count > 0 || (count < 0 && errno == EINTR);
    }
    // Without output the program has ended, or ends soon.
    while (!(result.code = code_of_ended(pid_)) && now_ms() < start_ms_ + 1000 * limit_s) ::usleep(1000);
    ::kill(-pid_, SIGKILL);  // also what it has started
    if (!result.code) ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
    return result;
}

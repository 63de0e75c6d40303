#include "runtime/cluster/local_ranks.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "kernels/check.h"
#include "runtime/cluster/sha256.h"
#include "runtime/cluster/socket.h"

namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

struct LocalRank {
    pid_t pid = 0;
    bool has_ended = false;
    bool was_told = false;  // by us, to end: then its code says nothing
};

// Blocks what the waiting below takes one by one; as before when destroyed.
class BlockedSignals {
public:
    BlockedSignals() {
        sigemptyset(&set_);
        // A terminal or a pipe that closes ends no run: as in the trainer, these two are taken and forgotten.
        for (const int signal : {SIGCHLD, SIGHUP, SIGPIPE}) sigaddset(&set_, signal);
        for (const int signal : kForwarded) sigaddset(&set_, signal);
        ::sigprocmask(SIG_BLOCK, &set_, &before_);
        // Where SIGCHLD is ignored, children vanish with their exit codes.
        struct sigaction plain {};
        plain.sa_handler = SIG_DFL;
        ::sigaction(SIGCHLD, &plain, &child_before_);
    }
    ~BlockedSignals() {
        ::sigaction(SIGCHLD, &child_before_, nullptr);
        ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    }
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

    const sigset_t& before() const { return before_; }

    // The next signal; 0 if there is none for `wait_s`.
    int next(double wait_s) const {
        const auto nanoseconds = (long long)(std::max(0.0, wait_s) * 1e9);
        const timespec limit{time_t(nanoseconds / 1'000'000'000), long(nanoseconds % 1'000'000'000)};
        return std::max(0, ::sigtimedwait(&set_, nullptr, &limit));
    }

private:
    sigset_t set_, before_;
    struct sigaction child_before_;
};

using Texts = std::vector<std::string>;

// Our environment, with the rank's place instead of what an outer launcher has set. `secrets`: what only ranks that
// share this process have in common.
Texts environment_of(int local_rank, int count, const LocalNode& at, const Texts& secrets) {
    Texts own = {"RANK=" + std::to_string(at.node * count + local_rank),
                 "WORLD_SIZE=" + std::to_string(at.nodes * count),
                 "LOCAL_RANK=" + std::to_string(local_rank),
                 "LOCAL_WORLD_SIZE=" + std::to_string(count),
                 "MASTER_ADDR=" + at.master_host,
                 "MASTER_PORT=" + std::to_string(at.master_port)};
    own.insert(own.end(), secrets.begin(), secrets.end());
    const size_t count_own = own.size();
    for (char** variable = ::environ; *variable; ++variable) {
        const std::string_view text = *variable;
        const std::string_view name = text.substr(0, text.find('='));
        const auto is_same = [&](const std::string& ours) { return ours.starts_with(std::string(name) + "="); };
        const bool is_replaced = std::any_of(own.begin(), own.begin() + long(count_own), is_same);
        if (!is_replaced && !name.starts_with("TORCHELASTIC_") && name != "TRAIN_GPT_LISTEN_FD") own.emplace_back(text);
    }
    return own;
}

std::vector<char*> pointers(Texts& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
}

// The child's life up to its program. Only what is safe between fork and exec.
[[noreturn]] void become_rank(pid_t parent, const sigset_t& mask, int listen_fd, bool keeps_socket,
                              char* const* command, char* const* environment) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(128 + SIGKILL);  // it was killed before the line above
    if (keeps_socket) ::fcntl(listen_fd, F_SETFD, 0);
    const int nothing = ::open("/dev/null", O_RDONLY);
    if (nothing > 0) ::dup2(nothing, 0), ::close(nothing);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execve("/proc/self/exe", command, environment);
    ::_exit(int(Exit::os));
}

class LocalRanks {
public:
    explicit LocalRanks(const LocalRanksSettings& settings) : settings_(settings) {}

    void start(int count, Texts command) {
        LocalNode at = settings_.place;
        Socket listener;
        Texts secrets;
        if (at.nodes == 1) {
            listener = listen_on_loopback();
            if (!listener) fail(Exit::os, "cannot listen at 127.0.0.1: %s", std::strerror(errno));
            at.master_host = "127.0.0.1", at.master_port = address_of(listener).port();
            secrets = {"TRAIN_GPT_TOKEN=" + hexadecimal(random_bytes(16)),
                       "TRAIN_GPT_LISTEN_FD=" + std::to_string(listener.fd())};
        }
        const pid_t parent = ::getpid();
        for (int rank = 0; rank < count; ++rank) {
            Texts environment = environment_of(rank, count, at, secrets);
            const std::vector<char*> arguments = pointers(command), variables = pointers(environment);
            const pid_t pid = ::fork();
            if (pid == 0)
                become_rank(parent, signals_.before(), listener.fd(), listener && rank == 0, arguments.data(),
                            variables.data());
            if (pid < 0) {
                const int error = errno;
                signal_all(SIGKILL);
                while (::waitpid(-1, nullptr, 0) > 0) {}
                fail(Exit::os, "cannot start rank %d of %d: %s", rank, count, std::strerror(error));
            }
            ::setpgid(pid, pid);  // here too, so that a signal to the group finds one at once
            ranks_.push_back({pid});
        }
    }

    int wait() {
        while (!all_have_ended()) {
            const int signal = signals_.next(std::min(1.0, seconds_to_next_stage()));
            if (std::find(std::begin(kForwarded), std::end(kForwarded), signal) != std::end(kForwarded))
                signal_all(signal);
            collect();
            if (has_failed_ && seconds_to_next_stage() <= 0) {
                signal_all(stage_ == 0 ? SIGTERM : SIGKILL);
                for (LocalRank& rank : ranks_) rank.was_told = rank.was_told || !rank.has_ended;
                ++stage_;
                stage_ends_ = Clock::now() + seconds(settings_.term_s);
            }
        }
        return telling_code();
    }

private:
    double seconds_to_next_stage() const {
        return has_failed_ ? std::chrono::duration<double>(stage_ends_ - Clock::now()).count() : 1;
    }

    bool all_have_ended() const {
        return std::all_of(ranks_.begin(), ranks_.end(), [](const LocalRank& rank) { return rank.has_ended; });
    }

    void signal_all(int signal) {
        for (const LocalRank& rank : ranks_)
            if (!rank.has_ended) ::kill(signal == SIGKILL ? -rank.pid : rank.pid, signal);
    }

    void collect() {
        for (size_t i = 0; i < ranks_.size(); ++i) {
            LocalRank& rank = ranks_[i];
            siginfo_t info{};
            if (rank.has_ended || ::waitid(P_PID, id_t(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) continue;
            if (info.si_pid != rank.pid) continue;
            ::kill(-rank.pid, SIGKILL);  // whatever it has started, while the number of its group is still its own
            int status = 0;
            ::waitpid(rank.pid, &status, 0);
            rank.has_ended = true;
            if (!rank.was_told) note_end(int(i), rank.pid, status);
        }
    }

    // A rank has ended by itself.
    void note_end(int local_rank, pid_t pid, int status) {
        codes_.push_back(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
        if (WIFSIGNALED(status))
            std::fprintf(stderr, "train_gpt: rank %d (pid %d) was killed by signal %d (%s)\n",
                         settings_.place.node * int(ranks_.size()) + local_rank, int(pid), WTERMSIG(status),
                         ::strsignal(WTERMSIG(status)));
        if (has_failed_ || codes_.back() == int(Exit::ok) || codes_.back() == int(Exit::again)) return;
        has_failed_ = true;
        stage_ends_ = Clock::now() + seconds(settings_.grace_s);
    }

    int telling_code() const {
        const auto is_own_fault = [](int code) {
            return code != int(Exit::ok) && code != int(Exit::again) && code != int(Exit::peer_lost);
        };
        const auto own = std::find_if(codes_.begin(), codes_.end(), is_own_fault);
        if (own != codes_.end()) return *own;
        for (const Exit code : {Exit::peer_lost, Exit::again})
            if (std::find(codes_.begin(), codes_.end(), int(code)) != codes_.end()) return int(code);
        return int(Exit::ok);
    }

    LocalRanksSettings settings_;
    BlockedSignals signals_;
    std::vector<LocalRank> ranks_;
    std::vector<int> codes_;  // of ranks that ended by themselves, in order; 128 + signal where one killed it
    bool has_failed_ = false;
    int stage_ = 0;  // 0: others have their grace; 1: they were asked to end; 2: they were killed
    TimePoint stage_ends_;
};

}  // namespace

int start_local_ranks(int count, const std::vector<std::string>& command, const LocalRanksSettings& settings) {
    require(count >= 1 && !command.empty(), "%d local ranks, %zu arguments", count, command.size());
    LocalRanks ranks(settings);
    ranks.start(count, command);
    return ranks.wait();
}

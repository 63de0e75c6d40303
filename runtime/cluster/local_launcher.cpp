#include "runtime/cluster/local_launcher.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "kernels/check.h"
#include "runtime/cluster/socket.h"
#include "runtime/io/io.h"

namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

struct LocalRank {
    pid_t pid = 0;
    bool has_ended = false;
    bool was_signalled = false;  // by this process, to end it: its exit code then says nothing
};

class LocalRanks {
public:
    LocalRanks(int count, const LocalLauncherSettings& settings) : count_(count), settings_(settings) {
        sigemptyset(&waited_for_);
        for (const int signal : kForwarded) sigaddset(&waited_for_, signal);
        // SIGHUP and SIGPIPE are ignored: as in the trainer, a closed terminal or pipe ends no run.
        for (const int signal : {SIGCHLD, SIGHUP, SIGPIPE}) sigaddset(&waited_for_, signal);
        ::sigprocmask(SIG_BLOCK, &waited_for_, &mask_before_);
        std::signal(SIGCHLD, SIG_DFL);  // if it is ignored, the exit codes of children are lost
    }

    void start(std::vector<std::string> command) {
        LocalNode& node = settings_.node;
        Socket listener;
        std::string token;
        if (node.nodes == 1) {
            listener = listen_on_loopback();
            if (!listener) fail(Exit::os, "cannot listen at 127.0.0.1: %s", std::strerror(errno));
            node.master_host = "127.0.0.1", node.master_port = address_of(listener).port();
            token = random_hex(16);
        }
        const pid_t parent = ::getpid();
        for (int local_rank = 0; local_rank < count_; ++local_rank) {
            const pid_t pid = ::fork();
            if (pid == 0) become_rank(local_rank, parent, listener, token, command);
            if (pid < 0) {
                const int error = errno;
                signal_all(SIGKILL);
                while (::waitpid(-1, nullptr, 0) > 0) {}
                fail(Exit::os, "cannot start rank %d of %d: %s", local_rank, count_, std::strerror(error));
            }
            ::setpgid(pid, pid);  // also here, so that the group exists before the first signal to it
            ranks_.push_back({pid});
        }
    }

    // Returns the exit code of launch_local_ranks().
    int wait() {
        while (!std::ranges::all_of(ranks_, &LocalRank::has_ended)) {
            const timespec round{0, 100'000'000};
            const int signal = ::sigtimedwait(&waited_for_, nullptr, &round);
            if (std::ranges::count(kForwarded, signal)) signal_all(signal);
            for (int local_rank = 0; local_rank < count_; ++local_rank) collect(local_rank);
            if (!has_failed_ || Clock::now() < stage_ends_) continue;
            signal_all(is_terminating_ ? SIGKILL : SIGTERM);
            for (LocalRank& rank : ranks_) rank.was_signalled |= !rank.has_ended;
            is_terminating_ = true;
            stage_ends_ = Clock::now() + seconds(settings_.term_s);
        }
        for (const int code : codes_)
            if (is_failure(code) && code != int(Exit::peer_lost)) return code;
        for (const Exit code : {Exit::peer_lost, Exit::again})
            if (std::ranges::count(codes_, int(code))) return int(code);
        return int(Exit::ok);
    }

private:
    // The child's code before its program. This process has one thread, so the child may do anything.
    [[noreturn]] void become_rank(int local_rank, pid_t parent, const Socket& listener, const std::string& token,
                                  std::vector<std::string>& command) const {
        const LocalNode& node = settings_.node;
        ::setpgid(0, 0);
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(128 + SIGKILL);  // it was killed before the line above
        const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
        set("RANK", std::to_string(node.node * count_ + local_rank));
        set("WORLD_SIZE", std::to_string(node.nodes * count_));
        set("LOCAL_RANK", std::to_string(local_rank));
        set("LOCAL_WORLD_SIZE", std::to_string(count_));
        set("MASTER_ADDR", node.master_host);
        set("MASTER_PORT", std::to_string(node.master_port));
        // Variables set by an outer launcher do not apply to this rank.
        for (const char* name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE",
                                 "TRAIN_GPT_LISTEN_FD"})
            ::unsetenv(name);
        if (listener) set("TRAIN_GPT_TOKEN", token);
        if (listener && local_rank == 0) {
            set("TRAIN_GPT_LISTEN_FD", std::to_string(listener.fd()));
            ::fcntl(listener.fd(), F_SETFD, 0);
        }
        const int null = ::open("/dev/null", O_RDONLY);
        if (null > STDIN_FILENO) ::dup2(null, STDIN_FILENO), ::close(null);
        ::sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
        ::execv("/proc/self/exe", argv_of(command).data());
        ::_exit(int(Exit::os));
    }

    void signal_all(int signal) const {
        for (const LocalRank& rank : ranks_)
            if (!rank.has_ended) ::kill(signal == SIGKILL ? -rank.pid : rank.pid, signal);
    }

    // Reaps the rank if it has ended.
    void collect(int local_rank) {
        LocalRank& rank = ranks_[size_t(local_rank)];
        siginfo_t info{};
        if (rank.has_ended || ::waitid(P_PID, id_t(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return;
        if (info.si_pid != rank.pid) return;
        ::kill(-rank.pid, SIGKILL);  // its children, while the number of its process group is still in use
        int status = 0;
        ::waitpid(rank.pid, &status, 0);
        rank.has_ended = true;
        if (rank.was_signalled) return;
        codes_.push_back(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
        if (WIFSIGNALED(status))
            std::fprintf(stderr, "train_gpt: rank %d (pid %d) was killed by signal %d (%s)\n",
                         settings_.node.node * count_ + local_rank, int(rank.pid), WTERMSIG(status),
                         ::strsignal(WTERMSIG(status)));
        if (has_failed_ || !is_failure(codes_.back())) return;
        has_failed_ = true;
        stage_ends_ = Clock::now() + seconds(settings_.grace_s);
    }

    static bool is_failure(int code) { return code != int(Exit::ok) && code != int(Exit::again); }

    const int count_;
    LocalLauncherSettings settings_;
    sigset_t waited_for_, mask_before_;
    std::vector<LocalRank> ranks_;
    std::vector<int> codes_;  // of ranks that ended by themselves, in order; 128 + signal if one killed it
    bool has_failed_ = false, is_terminating_ = false;
    TimePoint stage_ends_;  // once a rank has failed: when the others are signalled next
};

}  // namespace

std::vector<char*> argv_of(std::vector<std::string>& arguments) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    return pointers;
}

int launch_local_ranks(int count, const std::vector<std::string>& command, const LocalLauncherSettings& settings) {
    require(count >= 1 && !command.empty(), "%d local ranks, %zu arguments", count, command.size());
    LocalRanks ranks(count, settings);
    ranks.start(command);
    return ranks.wait();
}

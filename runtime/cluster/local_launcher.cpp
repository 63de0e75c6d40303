#include "runtime/cluster/local_launcher.h"

#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "runtime/cluster/child_program.h"
#include "runtime/cluster/socket.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

constexpr pid_t kEnded = 0;
constexpr double kRound_s = 0.1;  // maximum between two checks of the ranks

class LocalRanks {
public:
    // Starts the ranks.
    LocalRanks(int count, std::vector<std::string> command, const LocalLauncherSettings& settings)
        : count_(count), settings_(settings) {
        LocalNode& node = settings_.node;
        FileDescriptor listener;
        const std::string token = random_hex(16);
        if (node.nodes == 1) {
            listener = listen_on_loopback();
            if (!listener) fail(Exit::os, "cannot listen at 127.0.0.1: %s", std::strerror(errno));
            node.master_host = "127.0.0.1", node.master_port = address_of(listener).port();
        }
        // If one cannot be started, the others are killed when this process exits.
        for (int local_rank = 0; local_rank < count_; ++local_rank)
            pids_.push_back(start_child(format("rank %d of %d", local_rank, count_), SIGKILL, signals_,
                                        [&] { become_rank(local_rank, listener, token, command); }));
    }

    // Returns the exit code of launch_local_ranks().
    int wait() {
        while (std::ranges::count(pids_, kEnded) < count_) {
            if (const int signal = signals_.wait(kRound_s)) signal_all(signal);
            for (int local_rank = 0; local_rank < count_; ++local_rank) collect(local_rank);
            if (!stage_ends_ || Clock::now() < *stage_ends_) continue;
            signal_all(is_terminating_ ? SIGKILL : SIGTERM);
            is_terminating_ = true;
            stage_ends_ = Clock::now() + seconds(settings_.term_s);
        }
        return code_;
    }

private:
    void become_rank(int local_rank, const FileDescriptor& listener, const std::string& token,
                     std::vector<std::string>& command) const {
        const LocalNode& node = settings_.node;
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
            set("TRAIN_GPT_LISTEN_FD", std::to_string(listener));
            ::fcntl(listener, F_SETFD, 0);
        }
        ::execv("/proc/self/exe", argv_of(command).data());
    }

    void signal_all(int signal) const {
        for (const pid_t pid : pids_)
            if (pid != kEnded) ::kill(signal == SIGKILL ? -pid : pid, signal);
    }

    // Reaps the rank if it has ended.
    void collect(int local_rank) {
        const pid_t pid = pids_[size_t(local_rank)];
        siginfo_t info{};
        if (pid == kEnded || ::waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return;
        if (info.si_pid != pid) return;
        ::kill(-pid, SIGKILL);  // its children, while the number of its process group is still in use
        ::waitpid(pid, nullptr, 0);
        pids_[size_t(local_rank)] = kEnded;
        if (is_terminating_) return;  // the launcher ended it, so its exit code carries no information
        const bool was_killed = info.si_code != CLD_EXITED;
        const int code = was_killed ? 128 + info.si_status : info.si_status;
        if (was_killed)
            std::fprintf(stderr, "train_gpt: rank %d (pid %d) was killed by signal %d (%s)\n",
                         settings_.node.node * count_ + local_rank, int(pid), info.si_status,
                         ::strsignal(info.si_status));
        if (informativeness(code) > informativeness(code_)) code_ = code;
        if (!stage_ends_ && informativeness(code) > informativeness(int(Exit::again)))
            stage_ends_ = Clock::now() + seconds(settings_.grace_s);
    }

    // Ranks exit codes by how much they reveal; failures rank above Exit::again.
    static int informativeness(int code) {
        return code == int(Exit::ok) ? 0 : code == int(Exit::again) ? 1 : code == int(Exit::peer_lost) ? 2 : 3;
    }

    const int count_;
    LocalLauncherSettings settings_;
    StopSignals signals_;
    std::vector<pid_t> pids_;   // by local rank
    int code_ = int(Exit::ok);  // the most informative code of ranks that ended by themselves; the first of equals
    std::optional<TimePoint> stage_ends_;  // once a rank has failed: when to signal the others next
    bool is_terminating_ = false;          // the others have been signaled
};

}  // namespace

int launch_local_ranks(int count, const std::vector<std::string>& command, const LocalLauncherSettings& settings) {
    return LocalRanks(count, command, settings).wait();
}

#include "test/support/rank_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include "runtime/io/json.h"
#include "runtime/io/process.h"

namespace {

int run(const RankProcesses::Body& body, const RankEnvironment& environment) {
    try {
        return body(environment);
    } catch (const Error& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return int(error.code);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "exception: %s\n", error.what());
        return int(Exit::internal);
    }
}

}  // namespace

RankProcesses::RankProcesses(int size) : size_(size), listener_(listen_on_loopback()) {
    shared_.size = shared_.local_size = size;
    shared_.launcher = "test";
    shared_.master_host = "127.0.0.1";
    shared_.master_port = address_of(listener_).port();
    shared_.token = random_hex(16);
    if (::pipe2(ready_pipe_, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
}

RankProcesses::~RankProcesses() {
    for (size_t i = 0; i < pids_.size(); ++i)
        if (codes_[i] < 0) {
            ::kill(pids_[i], SIGKILL);
            ::waitpid(pids_[i], nullptr, 0);
        }
    ::close(ready_pipe_[0]);
    ::close(ready_pipe_[1]);
}

RankEnvironment RankProcesses::environment_of(int rank) const {
    RankEnvironment environment = shared_;
    environment.rank = environment.local_rank = rank;
    if (rank == 0) environment.listen_fd = listener_;
    return environment;
}

int RankProcesses::start(const RankEnvironment& environment, const Body& body) {
    const int process = int(pids_.size());
    const std::string path = directory_ / std::to_string(process);
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        for (const int signal : {SIGINT, SIGTERM, SIGSEGV, SIGABRT})
            std::signal(signal, SIG_DFL);  // instead of Catch2's handlers
        const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
        ::dup2(file, STDERR_FILENO);
        ::setvbuf(stderr, nullptr, _IONBF, 0);
        // Only rank 0 has the socket, as after launch_local_ranks().
        if (environment.listen_fd < 0) listener_ = {};
        ::_exit(run(body, environment));
    }
    if (pid < 0) throw std::runtime_error("cannot fork");
    if (environment.listen_fd >= 0) listener_ = {};  // rank 0's process owns it now
    pids_.push_back(pid);
    codes_.push_back(-1);
    return process;
}

void RankProcesses::start_all(const Body& body) {
    for (int rank = 0; rank < size_; ++rank) start(environment_of(rank), body);
}

void RankProcesses::kill(int process, int signal) const { ::kill(pid(process), signal); }

int RankProcesses::wait(int process, double limit_s) {
    int& code = codes_[size_t(process)];
    for (const TimePoint deadline = Clock::now() + seconds(limit_s); code < 0; ::usleep(3000)) {
        int status = 0;
        if (::waitpid(pid(process), &status, WNOHANG) == pid(process))
            code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        else if (Clock::now() > deadline)
            break;
    }
    return code;
}

std::string RankProcesses::printed(int process) const {
    std::ifstream file(directory_ / std::to_string(process));
    return {std::istreambuf_iterator<char>(file), {}};
}

void RankProcesses::ready() const {
    if (::write(ready_pipe_[1], "r", 1) != 1) ::_exit(99);
}

void RankProcesses::wait_until_ready(int count) const {
    pollfd polled{ready_pipe_[0], POLLIN, 0};
    char byte;
    for (int i = 0; i < count; ++i)
        if (::poll(&polled, 1, 20'000) != 1 || ::read(ready_pipe_[0], &byte, 1) != 1)
            throw std::runtime_error(format("%d of %d ranks became ready", i, count));
}

#include "runtime/io/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "runtime/io/process.h"

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
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    const int error = ::posix_spawn(&pid_, arguments[0], &files, &attributes, arguments.data(), environ);
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
        const double left_ms = std::max(0.0, start_ms_ + 1000 * limit_s - now_ms());
        pollfd end{.fd = output_, .events = POLLIN, .revents = 0};
        const int ready = ::poll(&end, 1, int(std::min(left_ms + 1, 1e6)));
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0 && left_ms > 0) continue;
        if (ready <= 0) break;
        char bytes[4096];
        const ssize_t count = ::read(output_, bytes, sizeof bytes);
        if (count > 0) result.output.append(bytes, size_t(count));
        is_open = count > 0 || (count < 0 && errno == EINTR);
    }
    // Without output the program has ended, or ends soon.
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && now_ms() < start_ms_ + 1000 * limit_s) ::usleep(1000);
    ::kill(-pid_, SIGKILL);  // also what it has started
    if (ended == pid_)
        result.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    else
        ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
    return result;
}

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "kernels/check.h"
#include "runtime/checkpoint/checkpoint.h"

namespace {

constexpr const char* kLockName = "lock";

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

std::string first_line(const std::string& path, const std::string& otherwise) {
    std::string line;
    std::getline(std::ifstream(path), line);
    return line.empty() ? otherwise : line;
}

// Pid, host and boot id, which changes with each boot of the machine: earlier pids are meaningless.
void write_holder(int file, const std::string& path) {
    const std::string boot_id = first_line("/proc/sys/kernel/random/boot_id", "unknown");
    const std::string self =
        format("pid %d, host %s, boot %s\n", int(::getpid()), host_name().c_str(), boot_id.c_str());
    if (::ftruncate(file, 0) != 0 || ::pwrite(file, self.data(), self.size(), 0) != ssize_t(self.size()))
        fail(Exit::io, "cannot write %s: %s", path, std::strerror(errno));
}

// Whether `path` still refers to the locked file: another process may have moved the directory aside in between.
bool is_still_at(const std::string& path, int file) {
    struct stat locked, named;
    return ::fstat(file, &locked) == 0 && ::stat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
           locked.st_dev == named.st_dev;
}

// Moves an older run aside for a fresh one. The old directory's lock is held until the new one's is.
std::string move_aside(const std::string& run_dir, RunLock& lock) {
    std::string old = first_unused(run_dir + ".old-");
    rename_path(run_dir, old);
    make_directories(run_dir);
    sync_directory(directory_of(run_dir));
    lock = RunLock(run_dir);
    return old;
}

std::string without_trailing_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

}  // namespace

RunLock::RunLock(const std::string& run_dir) {
    const std::string path = run_dir + "/" + kLockName;
    file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (file_ == -1) fail(Exit::cannot_create, "cannot open %s: %s", path, std::strerror(errno));
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) fail(Exit::cannot_create, "cannot lock %s: %s", path, std::strerror(errno));
        fail(Exit::cannot_create, "%s is in use: %s is held by %s", run_dir, path,
             first_line(path, "an unidentified process"));
    }
    if (!is_still_at(path, file_))
        fail(Exit::cannot_create, "%s is in use: another process moved it aside just now", run_dir);
    write_holder(file_, path);
}

StartAction decide_start(StartMode mode, RunDirState state, const std::string& run_dir) {
    bool is_occupied = state == RunDirState::occupied;
    if (mode == StartMode::only_new && is_occupied)
        fail(Exit::usage,
             "run.dir %s is not empty: --resume continues it, --auto continues it if it has a checkpoint, --fresh "
             "moves it aside and starts anew",
             run_dir);
    if (mode == StartMode::resume && !is_occupied)
        fail(Exit::no_input, "--resume: run.dir %s %s", run_dir,
             state == RunDirState::absent ? "does not exist" : "is empty");
    if (mode == StartMode::resume) return StartAction::resume;
    if (!is_occupied) return StartAction::start;
    return mode == StartMode::automatic ? StartAction::resume_or_start : StartAction::move_aside_and_start;
}

RunDirState state_of_run_dir(const std::string& run_dir) {
    std::error_code error;  // ENOTDIR is not absence: a file stands where a directory is needed
    const auto type = std::filesystem::symlink_status(run_dir, error).type();
    if (type == std::filesystem::file_type::not_found && error == std::errc::no_such_file_or_directory)
        return RunDirState::absent;
    if (!directory_exists(run_dir)) fail(Exit::cannot_create, "run.dir %s is not a directory", run_dir);
    auto names = list_directory(run_dir);
    bool is_empty = std::all_of(names.begin(), names.end(), [](const std::string& name) { return name == kLockName; });
    return is_empty ? RunDirState::empty : RunDirState::occupied;
}

RunDirectory open_run_directory(const std::string& path, StartMode mode) {
    std::string run_dir = without_trailing_slashes(path);
    decide_start(mode, state_of_run_dir(run_dir), run_dir);  // fails before anything is created
    make_directories(run_dir);
    sync_directory(directory_of(run_dir));
    RunDirectory run{RunLock(run_dir), {}, {}};
    // Decided again, for another process may have run here until just now.
    run.action = decide_start(mode, state_of_run_dir(run_dir), run_dir);
    if (run.action == StartAction::move_aside_and_start) run.moved_to = move_aside(run_dir, run.lock);
    return run;
}

std::string new_run_id() { return random_hex(16); }

std::string first_unused(const std::string& prefix) {
    std::error_code ignored;
    int number = 1;
    while (std::filesystem::exists(std::filesystem::symlink_status(prefix + std::to_string(number), ignored))) number++;
    return prefix + std::to_string(number);
}

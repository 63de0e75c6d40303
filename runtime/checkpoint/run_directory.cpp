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

std::string first_line(const std::string& path, const std::string& otherwise) {
    std::string line;
    std::getline(std::ifstream(path), line);
    return line.empty() ? otherwise : line;
}

// Whether `path` still refers to the locked file: another process may have moved the directory aside in between.
bool is_still_at(const std::string& path, int file) {
    struct stat locked, named;
    return ::fstat(file, &locked) == 0 && ::stat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
           locked.st_dev == named.st_dev;
}

}  // namespace

FileDescriptor lock_run_directory(const std::string& run_dir) {
    const std::string path = run_dir + "/" + kLockName;
    FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (file == -1) fail(Exit::cannot_create, "cannot open %s: %s", path, std::strerror(errno));
    if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) fail(Exit::cannot_create, "cannot lock %s: %s", path, std::strerror(errno));
        fail(Exit::cannot_create, "%s is in use: %s is held by %s", run_dir, path,
             first_line(path, "an unidentified process"));
    }
    if (!is_still_at(path, file))
        fail(Exit::cannot_create, "%s is in use: another process moved it aside just now", run_dir);
    // The boot id changes with each boot of the machine: earlier pids are meaningless.
    const std::string host = first_line("/proc/sys/kernel/hostname", "unknown");
    const std::string boot = first_line("/proc/sys/kernel/random/boot_id", "unknown");
    if (::ftruncate(file, 0) != 0 ||
        ::dprintf(file, "pid %d, host %s, boot %s\n", int(::getpid()), host.c_str(), boot.c_str()) < 0)
        fail(Exit::io, "cannot write %s: %s", path, std::strerror(errno));
    return file;
}

void check_start(StartMode mode, RunDirState state, const std::string& run_dir) {
    bool is_occupied = state == RunDirState::occupied;
    if (mode == StartMode::only_new && is_occupied)
        fail(Exit::usage,
             "run.dir %s is not empty: --resume continues it, --auto continues it if it has a checkpoint, --fresh "
             "moves it aside and starts anew",
             run_dir);
    if (mode == StartMode::resume && !is_occupied)
        fail(Exit::no_input, "--resume: run.dir %s %s", run_dir,
             state == RunDirState::absent ? "does not exist" : "is empty");
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

FileDescriptor open_run_directory(const std::string& path, StartMode mode) {
    const std::string run_dir = path.substr(0, std::max<size_t>(path.find_last_not_of('/') + 1, 1));  // npos + 1 is 0
    check_start(mode, state_of_run_dir(run_dir), run_dir);  // fails before anything is created
    make_directories(run_dir);
    sync_directory(directory_of(run_dir));
    FileDescriptor lock = lock_run_directory(run_dir);
    // Checked again, for another process may have run here until just now.
    const RunDirState state = state_of_run_dir(run_dir);
    check_start(mode, state, run_dir);
    if (mode == StartMode::fresh && state == RunDirState::occupied) {
        rename_path(run_dir, first_unused(run_dir + ".old-"));
        make_directories(run_dir);
        sync_directory(directory_of(run_dir));
        lock = lock_run_directory(run_dir);  // the older run's is held until here
    }
    return lock;
}

std::string first_unused(const std::string& prefix) {
    std::error_code ignored;
    int number = 1;
    while (std::filesystem::exists(std::filesystem::symlink_status(prefix + std::to_string(number), ignored))) number++;
    return prefix + std::to_string(number);
}

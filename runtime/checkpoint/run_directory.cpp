#include "runtime/checkpoint/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "kernels/check.h"
#include "runtime/io/io.h"

namespace {

constexpr const char* kLockName = "lock";
constexpr size_t kMostLockBytes = 4096;

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

// Changes with each start of the machine, so that a pid of before is not taken for one of now.
std::string boot_id() {
    char id[64] = {};
    int descriptor = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (descriptor == -1) return "unknown";
    ssize_t bytes = ::read(descriptor, id, sizeof(id) - 1);
    ::close(descriptor);
    std::string text(id, bytes > 0 ? size_t(bytes) : 0);
    return text.substr(0, text.find('\n'));
}

std::string describe_self() {
    return format("pid %d, host %s, boot %s\n", int(::getpid()), host_name().c_str(), boot_id().c_str());
}

std::string holder_of(int descriptor) {
    std::string text(kMostLockBytes, '\0');
    ssize_t bytes = ::pread(descriptor, text.data(), text.size(), 0);
    text.resize(bytes > 0 ? size_t(bytes) : 0);
    text = text.substr(0, text.find('\n'));
    return text.empty() ? "a process that has not said who it is" : text;
}

void write_holder(int descriptor, const std::string& path) {
    std::string self = describe_self();
    bool is_written =
        ::ftruncate(descriptor, 0) == 0 && ::pwrite(descriptor, self.data(), self.size(), 0) == ssize_t(self.size());
    if (!is_written) fail(Exit::io, "cannot write %s: %s", path.c_str(), std::strerror(errno));
}

// Whether `path` still leads to the locked file: another process may have moved the directory aside in between.
bool is_still_at(const std::string& path, int descriptor) {
    struct stat locked, named;
    return ::fstat(descriptor, &locked) == 0 && ::stat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
           locked.st_dev == named.st_dev;
}

std::string parent_of(const std::string& path) {
    std::string parent = std::filesystem::path(path).parent_path();
    return parent.empty() ? "." : parent;
}

// Makes way for a fresh run. The old directory's lock is held until the new one's is.
std::string move_aside(const std::string& run_dir, RunLock& lock) {
    std::string old = first_unused(run_dir + ".old-");
    rename_path(run_dir, old);
    make_directories(run_dir);
    sync_directory(parent_of(run_dir));
    lock = RunLock(run_dir);
    return old;
}

std::string without_trailing_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

}  // namespace

// Delegates, so that the destructor closes the file if what follows fails.
RunLock::RunLock(const std::string& run_dir) : RunLock() {
    std::string path = run_dir + "/" + kLockName;
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (descriptor_ == -1) fail(Exit::cannot_create, "cannot open %s: %s", path.c_str(), std::strerror(errno));
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) fail(Exit::cannot_create, "cannot lock %s: %s", path.c_str(), std::strerror(errno));
        fail(Exit::cannot_create, "%s is in use: %s is held by %s", run_dir.c_str(), path.c_str(),
             holder_of(descriptor_).c_str());
    }
    if (!is_still_at(path, descriptor_))
        fail(Exit::cannot_create, "%s is in use: another process moved it aside just now", run_dir.c_str());
    write_holder(descriptor_, path);
}

RunLock::RunLock(RunLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

RunLock& RunLock::operator=(RunLock&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
}

RunLock::~RunLock() {
    if (descriptor_ != -1) ::close(descriptor_);
}

StartAction decide_start(StartMode mode, RunDirState state, const std::string& run_dir) {
    bool is_occupied = state == RunDirState::occupied;
    if (mode == StartMode::only_new && is_occupied)
        fail(
            Exit::usage,
            "run.dir %s is not empty: --resume continues it, --auto continues it if it has a checkpoint, --fresh moves "
            "it aside and starts anew",
            run_dir.c_str());
    if (mode == StartMode::resume && !is_occupied)
        fail(Exit::no_input, "--resume: run.dir %s %s", run_dir.c_str(),
             state == RunDirState::absent ? "does not exist" : "is empty");
    if (mode == StartMode::resume) return StartAction::resume;
    if (!is_occupied) return StartAction::start;
    return mode == StartMode::automatic ? StartAction::resume_or_start : StartAction::move_aside_and_start;
}

RunDirState state_of_run_dir(const std::string& run_dir) {
    struct stat status;
    if (::lstat(run_dir.c_str(), &status) != 0 && errno == ENOENT) return RunDirState::absent;
    if (!directory_exists(run_dir)) fail(Exit::cannot_create, "run.dir %s is not a directory", run_dir.c_str());
    auto names = list_directory(run_dir);
    bool is_empty = std::all_of(names.begin(), names.end(), [](const std::string& name) { return name == kLockName; });
    return is_empty ? RunDirState::empty : RunDirState::occupied;
}

OpenedRun open_run_directory(const std::string& path, StartMode mode) {
    std::string run_dir = without_trailing_slashes(path);
    decide_start(mode, state_of_run_dir(run_dir), run_dir);  // refuses before anything is made
    make_directories(run_dir);
    sync_directory(parent_of(run_dir));
    OpenedRun run{RunLock(run_dir), {}, {}};
    // Decided again, for another process may have run here until just now.
    run.action = decide_start(mode, state_of_run_dir(run_dir), run_dir);
    if (run.action == StartAction::move_aside_and_start) run.moved_to = move_aside(run_dir, run.lock);
    return run;
}

std::string new_run_id() {
    std::random_device random;
    return format("%08x%08x%08x%08x", random(), random(), random(), random());
}

std::string first_unused(const std::string& prefix) {
    for (int number = 1;; number++) {
        std::string path = prefix + std::to_string(number);
        struct stat status;
        if (::lstat(path.c_str(), &status) != 0) return path;
    }
}

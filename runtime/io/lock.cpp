#include "runtime/io/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>

#include "runtime/io/process.h"

namespace {

constexpr double kRefresh_s = 10;  // between updates of the lock file's time stamp
constexpr double kStale_s = 60;    // without an update, a holder on another host counts as dead

std::string first_line(const std::string& path, const std::string& otherwise) {
    std::string line;
    std::getline(std::ifstream(path), line);
    return line.empty() ? otherwise : line;
}

// "host NAME, boot ID": the boot id changes with each boot, after which earlier pids are meaningless.
std::string this_boot() {
    return "host " + first_line("/proc/sys/kernel/hostname", "unknown") + ", boot " +
           first_line("/proc/sys/kernel/random/boot_id", "unknown");
}

[[noreturn]] void fail_as_in_use(const std::string& directory, const std::string& path, const std::string& advice) {
    fail(Exit::cannot_create, "%s is in use: %s is held by %s%s", directory, path,
         first_line(path, "an unidentified process"), advice);
}

// For file systems without locks, such as Lustre without the mount option flock: the holder named in the file counts as
// alive if its process exists on this host, or if another host has updated the file recently.
void check_holder(int file, const std::string& directory, const std::string& path) {
    int pid = 0;
    char rest[512] = "";
    if (std::sscanf(first_line(path, "").c_str(), "pid %d, %511[^\n]", &pid, rest) != 2) return;
    if (rest == this_boot()) {
        if (pid != ::getpid() && ::kill(pid, 0) == 0) fail_as_in_use(directory, path, "");
        return;
    }
    struct stat status;
    if (::fstat(file, &status) != 0) return;
    const double age_s = unix_time() - double(status.st_mtim.tv_sec);
    if (age_s < kStale_s)
        fail_as_in_use(directory, path,
                       format(", which last updated it %.0f s ago; after %g s without an update it counts as dead",
                              age_s, kStale_s));
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& directory) : path_(directory + "/" + kLockName) {
    file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (!file_) fail(exit_code_of(errno, Exit::cannot_create), "cannot open %s: %s", path_, std::strerror(errno));
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) fail_as_in_use(directory, path_, "");
        has_locks_ = errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK;
        if (has_locks_) fail(Exit::cannot_create, "cannot lock %s: %s", path_, std::strerror(errno));
        check_holder(file_, directory, path_);
    }
    if (!is_in_place())
        fail(Exit::cannot_create, "%s is in use: another process has just moved it or its lock", directory);
    if (::ftruncate(file_, 0) != 0 || ::dprintf(file_, "pid %d, %s\n", int(::getpid()), this_boot().c_str()) < 0)
        fail(Exit::io, "cannot write %s: %s", path_, std::strerror(errno));
    refreshed_ms_ = now_ms();
}

bool DirectoryLock::is_in_place() {
    struct stat locked, named;
    if (::fstat(file_, &locked) != 0) return true;  // cannot be determined
    if (::stat(path_.c_str(), &named) != 0) return errno != ENOENT && errno != ENOTDIR;
    if (!has_locks_ && now_ms() - refreshed_ms_ > 1000 * kRefresh_s) {
        ::futimens(file_, nullptr);
        refreshed_ms_ = now_ms();
    }
    return locked.st_ino == named.st_ino && locked.st_dev == named.st_dev;
}

void DirectoryLock::guard(const std::function<void()>& action) {
    std::exception_ptr error;
    try {
        action();
    } catch (const Error&) {
        error = std::current_exception();
    }
    if (!is_in_place()) throw moved_away(directory_of(path_));
    if (error) std::rethrow_exception(error);
}

Error moved_away(const std::string& directory) {
    return {Exit::io, directory + " was moved or removed while this run used it: its lock no longer exists"};
}

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "runtime/io/io.h"

static std::string first_line(const std::string& path, const std::string& otherwise) {
    std::string line;
    std::getline(std::ifstream(path), line);
    return line.empty() ? otherwise : line;
}

// Whether `path` still refers to the locked file: another process may have moved the directory aside, or removed the
// lock, in between.
static bool is_still_at(const std::string& path, int file) {
    struct stat locked, named;
    return ::fstat(file, &locked) == 0 && ::stat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
           locked.st_dev == named.st_dev;
}

FileDescriptor lock_directory(const std::string& directory) {
    const std::string path = directory + "/" + kLockName;
    FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (file == -1)
        fail(errno == EACCES ? Exit::permission : Exit::cannot_create, "cannot open %s: %s", path,
             std::strerror(errno));
    if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) fail(Exit::cannot_create, "cannot lock %s: %s", path, std::strerror(errno));
        fail(Exit::cannot_create, "%s is in use: %s is held by %s", directory, path,
             first_line(path, "an unidentified process"));
    }
    if (!is_still_at(path, file))
        fail(Exit::cannot_create, "%s is in use: another process moved it or its lock away just now", directory);
    // The boot id changes with each boot of the machine: earlier pids are meaningless.
    const std::string host = first_line("/proc/sys/kernel/hostname", "unknown");
    const std::string boot = first_line("/proc/sys/kernel/random/boot_id", "unknown");
    if (::ftruncate(file, 0) != 0 ||
        ::dprintf(file, "pid %d, host %s, boot %s\n", int(::getpid()), host.c_str(), boot.c_str()) < 0)
        fail(Exit::io, "cannot write %s: %s", path, std::strerror(errno));
    return file;
}

#include "runtime/cluster/shared_segments.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace {

namespace fs = std::filesystem;

constexpr const char* kParent = "/dev/shm";
constexpr std::string_view kPrefix = "train_gpt.";

// Returns the lock of a directory if it belongs to this user and no process holds the lock.
FileDescriptor lock_of(const fs::path& path) {
    FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat status;
    const bool is_mine = directory && ::fstat(directory, &status) == 0 && status.st_uid == ::geteuid();
    return is_mine && ::flock(directory, LOCK_EX | LOCK_NB) == 0 ? std::move(directory) : FileDescriptor();
}

}  // namespace

void remove_abandoned_segments() {
    std::error_code ignored;
    for (const fs::directory_entry& entry : fs::directory_iterator(kParent, ignored)) {
        if (!entry.path().filename().string().starts_with(kPrefix)) continue;
        if (const FileDescriptor lock = lock_of(entry.path())) fs::remove_all(entry.path(), ignored);
    }
}

SharedSegments::SharedSegments() {
    remove_abandoned_segments();
    // Lock the directory before it gets its final name, so that no other process considers it abandoned.
    std::string unlocked = fs::path(kParent) / ("." + std::string(kPrefix) + "XXXXXX");
    if (!::mkdtemp(unlocked.data())) return;
    lock_ = lock_of(unlocked);
    path_ = fs::path(kParent) / fs::path(unlocked).filename().string().substr(1);
    if (::rename(unlocked.c_str(), path_.c_str()) != 0) path_ = unlocked;
    ::setenv("OMPI_MCA_btl_vader_backing_directory", path_.c_str(), 0);
    ::setenv("OMPI_MCA_btl_sm_backing_directory", path_.c_str(), 0);
}

SharedSegments::~SharedSegments() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
}

// The lock of a run's directory.
#pragma once

#include <functional>
#include <string>

#include "kernels/base/check.h"
#include "runtime/io/files.h"

inline constexpr const char* kLockName = "lock";

// The lock of a directory, DIRECTORY/lock (flock), held for the lifetime of the object. The system releases the lock
// when the process dies, so a leftover lock file does not block. The file identifies the holder: pid, host, boot id. On
// a file system without locks, the holder counts as alive while its process exists on this host or, for another host,
// if it has called is_in_place() in the last minute. The holder may remove the file.
class DirectoryLock {
public:
    DirectoryLock() = default;  // no lock
    // Locks an existing directory without waiting. Fails with Exit::cannot_create, naming the holder, if another
    // process has the lock.
    explicit DirectoryLock(const std::string& directory);
    explicit operator bool() const { return bool(file_); }
    // Whether the path still refers to the lock, or that cannot be determined. False after the directory or the lock
    // was moved or removed.
    bool is_in_place();
    // Runs `action`, which uses the directory. Then fails with moved_away() if the lock is no longer in place, since
    // `action` may have seen another directory. Without a lock, just runs `action`.
    void guard(const std::function<void()>& action);

private:
    std::string path_;
    FileDescriptor file_;
    bool has_locks_ = true;    // whether the file system supports locks
    double refreshed_ms_ = 0;  // without locks: when the lock file's time stamp was last updated
};

// The error of a run whose directory or lock was moved or removed.
Error moved_away(const std::string& directory);

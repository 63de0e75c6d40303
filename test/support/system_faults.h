// System calls that fail or hang in this process for files whose path contains a text, as on a failing disk or a lost
// file server.
#pragma once

#include <atomic>
#include <functional>
#include <string>

enum class SystemCall {
    read,     // read() and pread() fail
    examine,  // stat() and lstat() fail
    list,     // fdopendir() fails
    lock,     // flock() fails
    sync      // fsync() hangs as long as the fault lasts, then fails with the error, or succeeds if it is 0
};

// Active during the object's lifetime; one at a time.
class SystemFault {
public:
    SystemFault(SystemCall call, std::string path_part, int error_number);
    ~SystemFault();
    SystemFault(const SystemFault&) = delete;

    const SystemCall call;
    const std::string path_part;
    const int error_number;

    void wait_until_met() const;  // until a call hangs
    mutable std::atomic<bool> is_met = false;
};

// Runs an action in a thread until it syncs a file or directory whose path contains `path_part`, calls at_sync() and
// lets the action finish; rethrows its exception. Returns false if it ended without such a sync.
bool stop_at_sync(const std::string& path_part, const std::function<void()>& action,
                  const std::function<void()>& at_sync);

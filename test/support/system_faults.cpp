#include "test/support/system_faults.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <future>

namespace {

std::atomic<const SystemFault*>& active() {
    static std::atomic<const SystemFault*> fault = nullptr;
    return fault;
}

// Whether this call must fail; if so, sets errno.
bool fails(SystemCall call, const std::string& path) {
    const SystemFault* fault = active().load();
    if (!fault || fault->call != call || path.find(fault->path_part) == std::string::npos) return false;
    errno = fault->error_number;
    return true;
}

bool fails(SystemCall call, int file) {
    const SystemFault* fault = active().load();
    if (!fault || fault->call != call) return false;
    char path[4096];
    const ssize_t size = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
    return fails(call, std::string(path, size > 0 ? size_t(size) : 0));
}

template <class Function> Function* next(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

SystemFault::SystemFault(SystemCall which, std::string path, int error)
    : call(which), path_part(std::move(path)), error_number(error) {
    active().store(this);
}

SystemFault::~SystemFault() { active().store(nullptr); }

void SystemFault::wait_until_met() const {
    while (!is_met) ::usleep(1000);
}

bool stop_at_sync(const std::string& path_part, const std::function<void()>& action,
                  const std::function<void()>& at_sync) {
    std::future<void> running;
    bool is_met = false;
    {
        const SystemFault hang(SystemCall::sync, path_part, 0);
        running = std::async(std::launch::async, action);
        while (!hang.is_met && running.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) continue;
        is_met = hang.is_met;
        if (is_met) at_sync();
    }
    running.get();
    return is_met;
}

// These functions replace the C library's in the program that they are linked into.
extern "C" {

ssize_t read(int file, void* buffer, size_t count) {
    return fails(SystemCall::read, file) ? -1 : ::syscall(SYS_read, file, buffer, count);
}

ssize_t pread(int file, void* buffer, size_t count, off_t offset) {
    return fails(SystemCall::read, file) ? -1 : ::syscall(SYS_pread64, file, buffer, count, offset);
}

int flock(int file, int operation) noexcept {
    return fails(SystemCall::lock, file) ? -1 : int(::syscall(SYS_flock, file, operation));
}

int stat(const char* path, struct stat* status) noexcept {
    if (fails(SystemCall::examine, path)) return -1;
    return next<int(const char*, struct stat*)>("stat")(path, status);
}

int lstat(const char* path, struct stat* status) noexcept {
    if (fails(SystemCall::examine, path)) return -1;
    return next<int(const char*, struct stat*)>("lstat")(path, status);
}

int fsync(int file) {
    const SystemFault* const fault = active().load();
    const int error = fails(SystemCall::sync, file) ? errno : -1;
    if (error == -1) return int(::syscall(SYS_fsync, file));
    fault->is_met = true;
    while (active().load() == fault) ::usleep(1000);
    errno = error;
    return error == 0 ? int(::syscall(SYS_fsync, file)) : -1;
}

DIR* fdopendir(int file) { return fails(SystemCall::list, file) ? nullptr : next<DIR*(int)>("fdopendir")(file); }
}

// A library for LD_PRELOAD: injects a fault when a program reads, writes or syncs one file for the n-th time.
//
//     FAULT_FILE    end of the file's path
//     FAULT_KIND    the fault, see below
//     FAULT_CALL    number of the call, from 1 (default 1)
//     FAULT_COUNT   number of successive calls (default 1)
//     FAULT_RANK    on this rank only (default: on all)
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>

namespace {

std::string setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value ? value : otherwise;
}

std::string path_of(int file) {
    char path[4096];
    const ssize_t size = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof(path));
    return {path, size_t(std::max<ssize_t>(size, 0))};
}

// Whether the fault is due at this call on this file.
bool is_due(int file, const std::string& operation) {
    static std::atomic<long> calls = 0;
    const std::string kind = setting("FAULT_KIND", ""), rank = setting("FAULT_RANK", "");
    if (!kind.starts_with(operation + " ") || !path_of(file).ends_with(setting("FAULT_FILE", "/none"))) return false;
    if (!rank.empty() && setting("OMPI_COMM_WORLD_RANK", "0") != rank) return false;
    const long call = ++calls, first = std::stol(setting("FAULT_CALL", "1"));
    return call >= first && call < first + std::stol(setting("FAULT_COUNT", "1"));
}

int failed(int error) {
    errno = error;
    return -1;
}

template <class Call> Call next(const char* name) { return reinterpret_cast<Call>(::dlsym(RTLD_NEXT, name)); }

using Write = ssize_t (*)(int, const void*, size_t, off_t);

// "read fails"; "read truncates", "overwrites", "replaces" or "removes" the file before it reads.
bool change(const std::string& path) {
    const std::string kind = setting("FAULT_KIND", "");
    const int file = ::open(path.c_str(), O_RDWR);
    if (kind == "read truncates" && ::ftruncate(file, 1100) != 0) std::abort();
    if (kind == "read overwrites" && next<Write>("pwrite")(file, "\1\0\1\0", 4, 1024) != 4) std::abort();
    ::close(file);
    if (kind == "read replaces" && ::rename((path + ".new").c_str(), path.c_str()) != 0) std::abort();
    if (kind == "read removes" && ::unlink(path.c_str()) != 0) std::abort();
    return kind == "read fails";
}

ssize_t faulty_read(int file, void* bytes, size_t count, off_t offset) {
    if (is_due(file, "read") && change(path_of(file))) return failed(EIO);
    return next<ssize_t (*)(int, void*, size_t, off_t)>("pread")(file, bytes, count, offset);
}

// "write fails" after half of the bytes.
ssize_t faulty_write(int file, const void* bytes, size_t count, off_t offset) {
    static std::atomic<bool> has_begun = false;
    if (!is_due(file, "write")) return next<Write>("pwrite")(file, bytes, count, offset);
    if (!has_begun.exchange(true) && count > 1) return next<Write>("pwrite")(file, bytes, count / 2, offset);
    return failed(ENOSPC);
}

}  // namespace

extern "C" {

ssize_t pread(int file, void* bytes, size_t count, off_t offset) { return faulty_read(file, bytes, count, offset); }
ssize_t pread64(int file, void* bytes, size_t count, off_t offset) { return faulty_read(file, bytes, count, offset); }
ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
    return faulty_write(file, bytes, count, offset);
}
ssize_t pwrite64(int file, const void* bytes, size_t count, off_t offset) {
    return faulty_write(file, bytes, count, offset);
}

// "sync loses" the last 100 bytes, like a disk that fails during write-back.
int fsync(int file) {
    if (!is_due(file, "sync")) return next<int (*)(int)>("fsync")(file);
    const off_t end = ::lseek(file, 0, SEEK_END);
    const std::string zeros(size_t(std::min<off_t>(end, 100)), '\0');
    if (next<Write>("pwrite")(file, zeros.data(), zeros.size(), end - off_t(zeros.size())) < 0) std::abort();
    return failed(EIO);
}

// "look fails": the file's status cannot be read.
int fstat(int file, struct stat* status) noexcept {
    if (is_due(file, "look")) return failed(EIO);
    return next<int (*)(int, struct stat*)>("fstat")(file, status);
}
}

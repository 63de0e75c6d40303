// A library for LD_PRELOAD that injects faults into a program's file operations. FAULTS has the rules (rules.h);
// FAULTS_LOG names the file that the action `log` appends to, one line per operation with tabs between
//
//   call, path, result, detail, bytes
//
// where detail is the flags of open, the offset of pwrite, the length of ftruncate and the new path of rename, and
// bytes is the written data in hexadecimal digits. For fflush, used here only for standard output, detail is the
// number of bytes printed so far.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <stdexcept>

#include "test/faults/rules.h"

namespace {

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

struct Injector {
    FaultRules rules{variable("FAULTS")};
    std::string log_path = variable("FAULTS_LOG");
    int rank = -1;

    Injector() {
        const std::string text = variable("OMPI_COMM_WORLD_RANK") + variable("RANK");
        if (!text.empty()) rank = std::stoi(text);
    }
};

Injector& injector() {
    static Injector* one = [] {
        try {
            return new Injector;  // never destroyed: other destructors still close files
        } catch (const std::exception& error) {
            std::fprintf(stderr, "FAULTS: %s\n", error.what());
            ::_exit(99);
        }
    }();
    return *one;
}

// The function that the program would call without this library.
template <class Function> Function* next(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::string target_of(const std::string& link) {
    char path[PATH_MAX];
    const ssize_t size = ::readlink(link.c_str(), path, sizeof path);
    return size < 0 ? "" : std::string(path, size_t(size));
}

std::string path_of(int file) { return target_of("/proc/self/fd/" + std::to_string(file)); }

std::string path_of(int directory, const char* name) {
    if (name[0] == '/') return name;
    return (directory == AT_FDCWD ? target_of("/proc/self/cwd") : path_of(directory)) + "/" + name;
}

std::string path_of(const char* name) { return path_of(AT_FDCWD, name); }

[[noreturn]] void die() {
    for (;;) ::kill(::getpid(), SIGKILL);
}

// The number of seconds by which the monotonic clock has been advanced.
std::atomic<time_t>& seconds_ahead() {
    static std::atomic<time_t> seconds = 0;
    return seconds;
}

void delay(const Fault& fault) {
    if (fault.kind == Fault::late) seconds_ahead() += time_t(fault.seconds);
    if (fault.kind == Fault::hang || fault.kind == Fault::late)
        sleep_for(fault.kind == Fault::late ? 1 : fault.seconds);
}

void write_log(const char* call, const std::string& path, long result, const std::string& detail,
               const void* bytes = nullptr, size_t count = 0) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string line = std::string(call) + "\t" + path + "\t" + std::to_string(result) + "\t" + detail + "\t";
    for (const auto* byte = static_cast<const unsigned char*>(bytes); count > 0; byte++, count--)
        line += {kDigits[*byte / 16], kDigits[*byte % 16]};
    line += '\n';
    const int file = next<int(const char*, int, ...)>("open")(injector().log_path.c_str(),
                                                              O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    [[maybe_unused]] const ssize_t written = next<decltype(::write)>("write")(file, line.data(), line.size());
    next<decltype(::close)>("close")(file);
}

template <class Result> long result_number(Result result) { return long(result); }
template <class Result> long result_number(Result* result) { return result ? 0 : -1; }

// Performs the operation `run`, or the fault of a rule instead; `failed` is the return value of an error.
template <class Result, class Run>
Result faulty(const char* call, const std::string& path, Result failed, Run run, const std::string& detail = "") {
    const int before = errno;
    const Fault fault = injector().rules.next(call, path, injector().rank);
    if (fault.kind == Fault::kill) die();
    delay(fault);
    errno = fault.kind == Fault::fail ? fault.error : before;
    if (fault.kind == Fault::fail) return failed;
    const Result result = run();
    const int after = errno;
    if (fault.kind == Fault::kill_after) die();
    if (fault.kind == Fault::log) write_log(call, path, result_number(result), detail);
    errno = after;
    return result;
}

// A read or write of `count` bytes by run(bytes, count).
template <class Byte, class Run>
ssize_t faulty_transfer(const char* call, int file, Byte* bytes, size_t count, const std::string& detail, Run run) {
    constexpr bool kWrites = std::is_const_v<Byte>;
    const int before = errno;
    const std::string path = path_of(file);
    const Fault fault = injector().rules.next(call, path, injector().rank);
    if (fault.kind == Fault::kill) die();
    delay(fault);
    errno = fault.kind == Fault::fail ? fault.error : before;
    if (fault.kind == Fault::fail) return -1;
    if (fault.kind == Fault::shorten) count = (count + 1) / 2;
    std::string flipped;
    if (kWrites && fault.kind == Fault::flip) flipped = with_flip(bytes, count);
    const ssize_t result = run(flipped.empty() ? bytes : reinterpret_cast<Byte*>(flipped.data()), count);
    const int after = errno;
    if (fault.kind == Fault::kill_after) die();
    if constexpr (!kWrites)
        if (fault.kind == Fault::flip && result > 0) static_cast<char*>(bytes)[result / 2] ^= 1;
    if (fault.kind == Fault::log)
        write_log(call, path, result, detail, bytes, kWrites && result > 0 ? size_t(result) : 0);
    errno = after;
    return result;
}

mode_t mode_of(int flags, va_list arguments) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; }

int faulty_open(int directory, const char* path, int flags, mode_t mode) {
    return faulty(
        "open", path_of(directory, path), -1,
        [&] { return next<decltype(::openat)>("openat")(directory, path, flags, mode); }, std::to_string(flags));
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    return faulty_open(AT_FDCWD, path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    return faulty_open(directory, path, flags, mode);
}

// std::ifstream and std::ofstream.
FILE* fopen64(const char* path, const char* mode) {
    return faulty("open", path_of(path), static_cast<FILE*>(nullptr),
                  [&] { return next<decltype(::fopen64)>("fopen64")(path, mode); });
}

DIR* fdopendir(int file) {
    return faulty("opendir", path_of(file), static_cast<DIR*>(nullptr),
                  [&] { return next<decltype(::fdopendir)>("fdopendir")(file); });
}

dirent* readdir(DIR* directory) {
    return faulty("readdir", path_of(::dirfd(directory)), static_cast<dirent*>(nullptr),
                  [&] { return next<decltype(::readdir)>("readdir")(directory); });
}

int close(int file) {
    return faulty("close", path_of(file), -1, [&] { return next<decltype(::close)>("close")(file); });
}

ssize_t read(int file, void* bytes, size_t count) {
    return faulty_transfer("read", file, bytes, count, "",
                           [&](void* to, size_t part) { return next<decltype(::read)>("read")(file, to, part); });
}

ssize_t pread(int file, void* bytes, size_t count, off_t offset) {
    return faulty_transfer("pread", file, bytes, count, "", [&](void* to, size_t part) {
        return next<decltype(::pread)>("pread")(file, to, part, offset);
    });
}

ssize_t write(int file, const void* bytes, size_t count) {
    return faulty_transfer("write", file, bytes, count, "", [&](const void* from, size_t part) {
        return next<decltype(::write)>("write")(file, from, part);
    });
}

ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
    return faulty_transfer("pwrite", file, bytes, count, std::to_string(offset), [&](const void* from, size_t part) {
        return next<decltype(::pwrite)>("pwrite")(file, from, part, offset);
    });
}

int fallocate(int file, int mode, off_t offset, off_t length) {
    return faulty("fallocate", path_of(file), -1,
                  [&] { return next<decltype(::fallocate)>("fallocate")(file, mode, offset, length); });
}

int ftruncate(int file, off_t length) noexcept {
    return faulty(
        "ftruncate", path_of(file), -1, [&] { return next<decltype(::ftruncate)>("ftruncate")(file, length); },
        std::to_string(length));
}

int fsync(int file) {
    return faulty("fsync", path_of(file), -1, [&] { return next<decltype(::fsync)>("fsync")(file); });
}

int fdatasync(int file) {
    return faulty("fdatasync", path_of(file), -1, [&] { return next<decltype(::fdatasync)>("fdatasync")(file); });
}

int rename(const char* from, const char* to) noexcept {
    return faulty(
        "rename", path_of(from), -1, [&] { return next<decltype(::rename)>("rename")(from, to); }, path_of(to));
}

int renameat2(int from_directory, const char* from, int to_directory, const char* to, unsigned flags) noexcept {
    return faulty(
        "rename", path_of(from_directory, from), -1,
        [&] { return next<decltype(::renameat2)>("renameat2")(from_directory, from, to_directory, to, flags); },
        path_of(to_directory, to));
}

int unlink(const char* path) noexcept {
    return faulty("unlink", path_of(path), -1, [&] { return next<decltype(::unlink)>("unlink")(path); });
}

// std::filesystem::remove_all().
int unlinkat(int directory, const char* path, int flags) noexcept {
    return faulty(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path_of(directory, path), -1,
                  [&] { return next<decltype(::unlinkat)>("unlinkat")(directory, path, flags); });
}

int remove(const char* path) noexcept {
    return faulty("unlink", path_of(path), -1, [&] { return next<decltype(::remove)>("remove")(path); });
}

int mkdir(const char* path, mode_t mode) noexcept {
    return faulty("mkdir", path_of(path), -1, [&] { return next<decltype(::mkdir)>("mkdir")(path, mode); });
}

int rmdir(const char* path) noexcept {
    return faulty("rmdir", path_of(path), -1, [&] { return next<decltype(::rmdir)>("rmdir")(path); });
}

int stat(const char* path, struct stat* status) noexcept {
    return faulty("stat", path_of(path), -1, [&] { return next<decltype(::stat)>("stat")(path, status); });
}

int lstat(const char* path, struct stat* status) noexcept {
    return faulty("stat", path_of(path), -1, [&] { return next<decltype(::lstat)>("lstat")(path, status); });
}

int fstat(int file, struct stat* status) noexcept {
    return faulty("stat", path_of(file), -1, [&] { return next<decltype(::fstat)>("fstat")(file, status); });
}

int statvfs(const char* path, struct statvfs* status) noexcept {
    return faulty("statvfs", path_of(path), -1, [&] { return next<decltype(::statvfs)>("statvfs")(path, status); });
}

int flock(int file, int operation) noexcept {
    return faulty("flock", path_of(file), -1, [&] { return next<decltype(::flock)>("flock")(file, operation); });
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
    const int result = next<decltype(::clock_gettime)>("clock_gettime")(clock, time);
    if (clock == CLOCK_MONOTONIC && result == 0) time->tv_sec += seconds_ahead();
    return result;
}

int fflush(FILE* stream) {
    if (stream != stdout) return next<decltype(::fflush)>("fflush")(stream);
    const int result = next<decltype(::fflush)>("fflush")(stream);
    if (injector().rules.next("fflush", "stdout", injector().rank).kind == Fault::log)
        write_log("fflush", "stdout", result, std::to_string(::lseek(STDOUT_FILENO, 0, SEEK_CUR)));
    return result;
}

}  // extern "C"

#include "runtime/io/process.h"

#include <sodium.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "runtime/io/files.h"

// A global variable, since a signal handler has no other way to pass on state.
static volatile std::sig_atomic_t first_signal = 0;

// The target of the first signal's notice. On a terminal the notice starts with a newline, since the terminal shows ^C.
enum class Notice { none, file, terminal };

// Async-signal-safe: no locks, no allocation, no streams.
template <Notice kNotice> static void request_stop(int signal) {
    const bool is_impatient = signal == SIGINT || signal == SIGTERM;
    if (first_signal != 0 && is_impatient) ::_exit(128 + signal);
    if (first_signal != 0) return;
    first_signal = signal;
    if (kNotice == Notice::none) return;
    const std::string_view text = signal == SIGINT ? "\nstopping after this step; press again to stop now\n"
                                                   : "\nstopping after this step; SIGINT or SIGTERM stops now\n";
    const std::string_view said = text.substr(kNotice == Notice::terminal ? 0 : 1);
    const int saved_errno = errno;
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, said.data(), said.size());
    errno = saved_errno;
}

void install_signal_handlers(bool notice) {
    const auto handler = !notice                        ? request_stop<Notice::none>
                         : ::isatty(STDERR_FILENO) == 1 ? request_stop<Notice::terminal>
                                                        : request_stop<Notice::file>;
    // On Linux, std::signal() also restarts interrupted system calls.
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) std::signal(signal, handler);
    for (int signal : {SIGHUP, SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

int stop_signal() { return first_signal; }

// The usual limit of 1024 is enough for all other open files (libraries, sockets to other ranks, logs).
void allow_open_files(size_t count) {
    constexpr rlim_t kOthers = 1024;
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count + kOthers) return;
    limit.rlim_cur = std::max(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, count + kOthers));
    ::setrlimit(RLIMIT_NOFILE, &limit);  // if it fails, a later open() reports the error
}

std::string printable_text(std::string_view message) {
    std::string text;
    for (size_t i = 0; i < message.size(); i++) {
        const auto byte = uint8_t(message[i]), next = i + 1 < message.size() ? uint8_t(message[i + 1]) : uint8_t(0);
        const bool is_control = (byte < ' ' && byte != '\n' && byte != '\t') || byte == 127;
        const bool is_c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F, two bytes
        text += is_control || is_c1 ? format("\\x%02x", is_c1 ? next : byte) : std::string(1, message[i]);
        i += is_c1;
    }
    return text;
}

// main() cannot catch std::bad_alloc from a destructor (destructors of JSON values allocate) or another thread.
[[noreturn]] static void end_unhandled() {
    try {
        if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "%s: out of memory\n", program_invocation_short_name);
        std::_Exit(int(Exit::os));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: internal error: %s\n", program_invocation_short_name, error.what());
    } catch (...) {}
    std::abort();
}

int exit_status(const char* program, const std::function<Exit()>& body) {
    std::set_terminate(end_unhandled);
    Exit status = Exit::internal;
    const auto print = [&](const char* kind, const char* sentence) {
        std::fprintf(stderr, "%s: %s%s\n", program, kind, printable_text(sentence).c_str());
    };
    try {
        status = body();
    } catch (const Error& error) {
        status = error.code;
        print("", error.what());
    } catch (const std::bad_alloc&) {
        status = Exit::os;
        std::fprintf(stderr, "%s: out of memory\n", program);  // does not allocate
    } catch (const std::system_error& error) {
        // The C++ library throws this if the system refuses a thread.
        const bool is_refused =
            error.code() == std::errc::resource_unavailable_try_again || error.code() == std::errc::not_enough_memory;
        if (is_refused) status = Exit::os;
        print(is_refused ? "the system refused a thread or memory (see ulimit -u and the cgroup's pids.max): "
                         : "internal error: ",
              error.what());
    } catch (const std::exception& error) {
        print("internal error: ", error.what());
    }
    if (status == Exit::ok) return int(status);
    // Skip destructors: after an error, other threads may still use global objects.
    std::fflush(nullptr);
    std::_Exit(int(status));
}

void flush_output() {
    // The reason of an earlier failure is lost; write again to get it.
    const bool has_failed = std::ferror(stdout) != 0;
    if (has_failed) std::clearerr(stdout), std::fputc('\n', stdout);
    if (std::fflush(stdout) == 0 && !has_failed) return;
    fail(Exit::io, "cannot write to standard output: %s",
         std::ferror(stdout) ? std::strerror(errno) : "an earlier write failed");
}

std::string host_name() {
    char name[256] = "?";
    ::gethostname(name, sizeof(name) - 1);
    return name;
}

namespace chrono = std::chrono;

double unix_time() { return chrono::duration<double>(chrono::system_clock::now().time_since_epoch()).count(); }

double now_ms() { return chrono::duration<double, std::milli>(chrono::steady_clock::now().time_since_epoch()).count(); }

size_t resident_bytes() {
    size_t all_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
    return resident_pages * size_t(sysconf(_SC_PAGESIZE));
}

std::string program_path() {
    std::error_code error;
    const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
    // Without /proc, as in a bare chroot: the path that was passed to execve().
    return error ? std::filesystem::absolute(reinterpret_cast<const char*>(::getauxval(AT_EXECFN)), error) : path;
}

std::string program_directory() { return directory_of(program_path()); }

std::string command_path(const std::string& path) {
    namespace fs = std::filesystem;
    const fs::path absolute = fs::path(path).lexically_normal();
    std::error_code error;
    const fs::path relative = absolute.lexically_relative(fs::current_path(error));
    return relative.empty() || *relative.begin() == ".." ? absolute : relative;
}

std::string random_hex(size_t bytes) {
    if (::sodium_init() < 0) fail(Exit::os, "libsodium found no random number generator on this system");
    std::string random(bytes, '\0'), digits(2 * bytes, '\0');
    ::randombytes_buf(random.data(), bytes);
    ::sodium_bin2hex(digits.data(), digits.size() + 1, reinterpret_cast<const unsigned char*>(random.data()), bytes);
    return digits;
}

#include <sodium.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "runtime/io/io.h"

// The one variable that the whole program shares: a signal handler can reach nothing else.
static volatile std::sig_atomic_t first_signal = 0;

static void request_stop(int signal) {
    const bool is_impatient = signal == SIGINT || signal == SIGTERM;
    if (first_signal != 0 && is_impatient) ::_exit(128 + signal);
    if (first_signal == 0) first_signal = signal;
}

void install_signal_handlers() {
    // On Linux, std::signal() also restarts the system call that a signal interrupts.
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) std::signal(signal, request_stop);
    for (int signal : {SIGHUP, SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

int stop_signal() { return first_signal; }

int exit_status(const char* program, const std::function<Exit()>& body) {
    Exit status = Exit::internal;
    try {
        status = body();
    } catch (const Error& error) {
        std::fprintf(stderr, "%s: %s\n", program, error.what());
        status = error.code;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "%s: out of memory\n", program);
        status = Exit::os;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: internal error: %s\n", program, error.what());
    }
    if (status == Exit::ok) return int(status);
    // After an error other threads may still use objects that the end of main() would destroy.
    std::fflush(nullptr);
    std::_Exit(int(status));
}

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

size_t resident_bytes() {
    size_t all_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
    return resident_pages * size_t(sysconf(_SC_PAGESIZE));
}

std::string program_path() {
    std::error_code ignored;
    return std::filesystem::read_symlink("/proc/self/exe", ignored);  // empty after an error
}

std::string program_directory() { return directory_of(program_path()); }

std::string random_hex(size_t bytes) {
    if (::sodium_init() < 0) fail(Exit::os, "libsodium finds no random number generator on this system");
    std::string random(bytes, '\0'), digits(2 * bytes, '\0');
    ::randombytes_buf(random.data(), bytes);
    ::sodium_bin2hex(digits.data(), digits.size() + 1, reinterpret_cast<const unsigned char*>(random.data()), bytes);
    return digits;
}

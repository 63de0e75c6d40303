#include <sodium.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "runtime/io/io.h"

namespace {

int status_of(const char* program, const std::function<Exit()>& body) {
    try {
        return int(body());
    } catch (const Error& error) {
        std::fprintf(stderr, "%s: %s\n", program, error.what());
        return int(error.code);
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "%s: out of memory\n", program);
        return int(Exit::os);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: internal error: %s\n", program, error.what());
        return int(Exit::internal);
    }
}

}  // namespace

// After an error other threads may still use objects that the end of main() would destroy.
int exit_status(const char* program, const std::function<Exit()>& body) {
    const int status = status_of(program, body);
    if (status == int(Exit::ok)) return status;
    std::fflush(nullptr);
    std::_Exit(status);
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
    std::error_code error;
    const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
    return error ? "" : program.string();
}

std::string program_directory() {
    const std::string program = program_path();
    return program.empty() ? "." : std::filesystem::path(program).parent_path().string();
}

std::string random_hex(size_t bytes) {
    if (::sodium_init() < 0) fail(Exit::os, "libsodium finds no random number generator on this system");
    std::string random(bytes, '\0'), digits(2 * bytes, '\0');
    ::randombytes_buf(random.data(), bytes);
    ::sodium_bin2hex(digits.data(), digits.size() + 1, reinterpret_cast<const unsigned char*>(random.data()), bytes);
    return digits;
}

#include "runtime/process.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>

size_t resident_bytes() {
    size_t all_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
    return resident_pages * size_t(sysconf(_SC_PAGESIZE));
}

std::string program_directory() {
    std::error_code error;
    const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
    return error ? "." : program.parent_path().string();
}

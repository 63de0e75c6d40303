#include "runtime/process.h"

#include <unistd.h>

#include <fstream>

size_t resident_bytes() {
    size_t all_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> all_pages >> resident_pages;
    return resident_pages * size_t(sysconf(_SC_PAGESIZE));
}

// mmap() and munmap() of the programs of test/fuzz (ld --wrap): a file that is mapped for reading becomes memory that
// ends where a page ends which cannot be read, so that a read behind the file's end is seen, also one by a library. The
// system would map a whole last page.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "test/simt/sanitizers.h"

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
int __real_munmap(void* address, size_t bytes);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void* address, size_t bytes);
}

namespace {

constexpr size_t kPageBytes = 4096, kAlignment = 4;  // of the numbers in files

struct Pages {
    std::byte* begin;
    size_t bytes;
};

struct Files {
    std::mutex mutex;
    std::map<void*, Pages> pages;
};
Files& files() {
    static Files instance;
    return instance;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (file < 0 || protection != PROT_READ) return __real_mmap(address, bytes, protection, flags, file, offset);
    const size_t readable = round_up(bytes, kPageBytes), whole = readable + kPageBytes;
    void* const mapped = __real_mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return MAP_FAILED;
    const auto begin = static_cast<std::byte*>(mapped), end = begin + readable;
    std::byte* const content = end - round_up(bytes, kAlignment);
    if (::pread(file, content, bytes, offset) != ssize_t(bytes) || ::mprotect(end, kPageBytes, PROT_NONE) != 0) {
        __real_munmap(mapped, whole);
        return MAP_FAILED;
    }
    simt::poison(content + bytes, size_t(end - (content + bytes)));
    const std::lock_guard lock(files().mutex);
    files().pages[content] = {begin, whole};
    return content;
}

int __wrap_munmap(void* address, size_t bytes) {
    Pages pages{};
    {
        const std::lock_guard lock(files().mutex);
        const auto found = files().pages.find(address);
        if (found == files().pages.end()) return __real_munmap(address, bytes);
        pages = found->second;
        files().pages.erase(found);
    }
    simt::unpoison(pages.begin, pages.bytes);
    return __real_munmap(pages.begin, pages.bytes);
}

// mmap() and munmap() of the programs of test/fuzz (ld --wrap). A file mapped for reading becomes memory that ends at
// an unreadable page, so that any read past the file's end is detected, also in a library; the system would map a whole
// last page. Areas are reused, which saves most of the time for mapping; unused areas are poisoned.
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
constexpr size_t kMaxKeptBytes = 64 * kPageBytes;

// Readable pages followed by an unreadable one.
struct Pages {
    std::byte* begin;
    size_t readable;
};

struct Files {
    std::mutex mutex;
    std::map<void*, Pages> pages;
    std::multimap<size_t, std::byte*> unused;  // by their readable bytes
};
Files& files() {
    static Files instance;
    return instance;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// nullptr if the system has no memory.
std::byte* new_pages(size_t readable) {
    const size_t whole = readable + kPageBytes;
    void* const mapped = __real_mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    const auto begin = static_cast<std::byte*>(mapped);
    if (::mprotect(begin + readable, kPageBytes, PROT_NONE) == 0) return begin;
    __real_munmap(mapped, whole);
    return nullptr;
}

std::byte* take_pages(size_t readable) {
    const auto kept = files().unused.find(readable);
    if (kept == files().unused.end()) return new_pages(readable);
    std::byte* const begin = kept->second;
    files().unused.erase(kept);
    simt::unpoison(begin, readable);
    return begin;
}

int give_pages(Pages pages) {
    if (pages.readable <= kMaxKeptBytes) {
        simt::poison(pages.begin, pages.readable);
        files().unused.emplace(pages.readable, pages.begin);
        return 0;
    }
    simt::unpoison(pages.begin, pages.readable);
    return __real_munmap(pages.begin, pages.readable + kPageBytes);
}

}  // namespace

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (file < 0 || protection != PROT_READ) return __real_mmap(address, bytes, protection, flags, file, offset);
    const std::lock_guard lock(files().mutex);
    const Pages pages{take_pages(round_up(bytes, kPageBytes)), round_up(bytes, kPageBytes)};
    if (!pages.begin) return MAP_FAILED;
    std::byte* const end = pages.begin + pages.readable;
    std::byte* const content = end - round_up(bytes, kAlignment);
    if (::pread(file, content, bytes, offset) != ssize_t(bytes)) {
        give_pages(pages);
        return MAP_FAILED;
    }
    simt::poison(pages.begin, size_t(content - pages.begin));
    simt::poison(content + bytes, size_t(end - (content + bytes)));
    files().pages[content] = pages;
    return content;
}

int __wrap_munmap(void* address, size_t bytes) {
    const std::lock_guard lock(files().mutex);
    const auto found = files().pages.find(address);
    if (found == files().pages.end()) return __real_munmap(address, bytes);
    const Pages pages = found->second;
    files().pages.erase(found);
    return give_pages(pages);
}

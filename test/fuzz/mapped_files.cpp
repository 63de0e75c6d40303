// mmap() and munmap() of the programs of test/fuzz (ld --wrap): a file that is mapped for reading becomes a block on
// the heap of exactly its size, so that AddressSanitizer finds a read behind its end. The system would map a whole
// page.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
int __real_munmap(void* address, size_t bytes);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void* address, size_t bytes);
}

namespace {

struct Blocks {
    std::mutex mutex;
    std::set<void*> addresses;
};
Blocks& blocks() {
    static Blocks instance;
    return instance;
}

}  // namespace

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (file < 0 || protection != PROT_READ) return __real_mmap(address, bytes, protection, flags, file, offset);
    void* const block = std::malloc(bytes);
    if (!block || ::pread(file, block, bytes, offset) != ssize_t(bytes)) {
        std::free(block);
        return MAP_FAILED;
    }
    const std::lock_guard lock(blocks().mutex);
    blocks().addresses.insert(block);
    return block;
}

int __wrap_munmap(void* address, size_t bytes) {
    {
        const std::lock_guard lock(blocks().mutex);
        if (blocks().addresses.erase(address) == 0) return __real_munmap(address, bytes);
    }
    std::free(address);
    return 0;
}

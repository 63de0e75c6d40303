#include "test/support/allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

static std::atomic<long>& counter() {
    static std::atomic<long> count = 0;
    return count;
}

long allocations() { return counter(); }

static void* counted(void* memory) {
    counter()++;
    if (!memory) throw std::bad_alloc();
    return memory;
}

// Replace the library's operators for the whole test program.
void* operator new(size_t bytes) { return counted(std::malloc(bytes)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
    const size_t unit = size_t(alignment);
    return counted(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

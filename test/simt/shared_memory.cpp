// The shared memory of the resident blocks.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "test/simt/machine.h"

namespace simt {

// As on the device, the low bits of a pointer to shared memory are its shared address: the window begins at a multiple
// of 4 GiB, and block r of a cluster is at r << kRankShift.
static char* window() {
    static char* const begin = [] {
        constexpr size_t kAlignment = size_t(4) << 30;
        const long mapped = syscall(SYS_mmap, nullptr, 2 * kAlignment, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return reinterpret_cast<char*>((size_t(mapped) + kAlignment - 1) & ~(kAlignment - 1));
    }();
    return begin;
}

// Fresh shared memory is full of NaN; the memory after the launch's bytes is checked for writes.
void prepare_arena(Block& block, uint32_t shared_bytes) {
    if (!block.arena) block.arena = window() + (size_t(block.rank) << kRankShift);
    const uint32_t page = 4096, old = (std::max(block.used_bytes, shared_bytes) + page - 1) / page * page;
    if (tsan() && old)  // a new mapping has no history in the race detector: blocks share the addresses, not the memory
        mmap(block.arena, old, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    unpoison(block.arena, kArenaBytes);
    std::memset(block.arena, 0xff, old);
    poison(block.arena + shared_bytes, kArenaBytes - shared_bytes);
    block.used_bytes = asan() ? kArenaBytes : shared_bytes;
}

void check_arena(Block& block, uint32_t shared_bytes) {
    if (asan()) return;  // it detects the write itself
    const char* begin = block.arena + shared_bytes;
    const char* end = block.arena + kArenaBytes;
    if (*begin == char(0xff) && std::memcmp(begin, begin + 1, size_t(end - begin) - 1) == 0) return;
    block.used_bytes = kArenaBytes;
    const char* changed = std::find_if(begin, end, [](char byte) { return byte != char(0xff); });
    note_fault(format("block (%u, %u, %u) wrote to offset %ld of its shared memory, which has %u bytes", block.index.x,
                      block.index.y, block.index.z, long(changed - block.arena), shared_bytes));
}

char* dynamic_shared(size_t bytes) {
    Fiber& fiber = me();
    if (bytes > machine().grid->shared_bytes)
        fault(format("the kernel's shared memory has %zu bytes, its launch gives %u", bytes,
                     machine().grid->shared_bytes));
    return fiber.block->arena;
}

uint32_t shared_address(const void* pointer) {
    const char* p = static_cast<const char*>(pointer);
    for (int rank = 0; rank < machine().cluster; rank++) {
        const char* arena = machine().blocks[rank].arena;
        if (p >= arena && p < arena + kArenaBytes) return uint32_t(rank) << kRankShift | uint32_t(p - arena);
    }
    fault("the address is not in shared memory");
}

char* shared_pointer(uint32_t address) {
    const uint32_t rank = address >> kRankShift, offset = address & kOffsetMask;
    if (rank >= uint32_t(machine().cluster) || offset >= kArenaBytes)
        fault(format("0x%x is no shared address of this cluster", address));
    const Fiber* reader = machine().me;
    if (reader && reader->block->rank != int(rank) && machine().blocks[rank].alive == 0)
        fault(format("block %u of the cluster has ended, and its shared memory with it", rank));
    return machine().blocks[rank].arena + offset;
}

}  // namespace simt

#include "test/simt/device_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "kernels/base/check.h"
#include "test/simt/fault.h"
#include "test/simt/sanitizers.h"

namespace simt {

namespace {

constexpr size_t kPageBytes = 4096, kAlignment = 256;
constexpr size_t kReservedBytes = size_t(256) << 30;  // of addresses; allocations fail when they are used up
constexpr size_t kBytesBefore = size_t(32) << 30;     // of these: an op may take an array's address minus an offset
constexpr char kFresh = char(0xff);                   // NaN in every format

// An allocation ends at the end of its pages, where the device accesses them. The gaps that alignment leaves on either
// side are checked for writes.
struct Allocation {
    size_t bytes;
    char *pages, *end;
};

// Maps by host addresses. The device accesses the memory kReservedBytes above them.
struct Memory {
    char* reserved = nullptr;
    size_t used_addresses = 0, used_bytes = 0;
    std::map<char*, Allocation> live;
    std::map<char*, size_t> freed;
    std::map<const char*, size_t> pinned;  // the host's, which kernels may access
};

Memory& memory() {
    static Memory instance;
    return instance;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Bypasses the C library: the race detector would clear its shadow of all reserved addresses.
char* map_at(char* address, size_t bytes, int protection) {
    const int fixed = address ? MAP_FIXED : 0;
    const long mapped =
        syscall(SYS_mmap, address, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    return mapped == -1 ? nullptr : reinterpret_cast<char*>(mapped);
}

bool is_changed(char byte) { return byte != kFresh; }

void check_surroundings(const char* of_host, const Allocation& allocation) {
    if (asan()) return;  // it detects the access itself
    char* begin = on_device(of_host);
    const size_t before = size_t(std::count_if(allocation.pages, begin, is_changed));
    const size_t after = size_t(std::count_if(begin + allocation.bytes, allocation.end, is_changed));
    if (before + after == 0) return;
    note_fault(format("%zu bytes before and %zu bytes after an allocation of %zu bytes were written", before, after,
                      allocation.bytes));
    std::fill(allocation.pages, begin, kFresh);  // reported once
    std::fill(begin + allocation.bytes, allocation.end, kFresh);
}

}  // namespace

size_t device_bytes() {
    static const char* const mib = std::getenv("SIMULATED_MEMORY");
    static const size_t bytes = mib ? std::stoull(mib) << 20 : size_t(16) << 30;
    return bytes;
}

void* allocate_device(size_t bytes) {
    Memory& m = memory();
    if (bytes == 0 || m.used_bytes + bytes > device_bytes()) return nullptr;
    const size_t page_bytes = round_up(bytes, kPageBytes), with_guard = page_bytes + kPageBytes;
    if (!m.reserved) {
        m.reserved = map_at(nullptr, 2 * kReservedBytes, PROT_NONE);
        if (!m.reserved) return nullptr;
        m.used_addresses = kBytesBefore;
    }
    if (m.used_addresses + with_guard > kReservedBytes) return nullptr;
    char* pages = on_device(m.reserved + m.used_addresses);
    if (!map_at(pages, page_bytes, PROT_READ | PROT_WRITE)) return nullptr;
    m.used_addresses += with_guard;
    m.used_bytes += page_bytes;
    std::memset(pages, kFresh, page_bytes);
    char* end = pages + page_bytes;
    char* begin = end - round_up(bytes, kAlignment);
    m.live[begin - kReservedBytes] = {bytes, pages, end};
    poison(pages, size_t(begin - pages));
    poison(begin + bytes, size_t(end - begin) - bytes);
    return begin - kReservedBytes;
}

bool free_device(void* address) {
    Memory& m = memory();
    auto found = m.live.find(static_cast<char*>(address));
    if (found == m.live.end()) return false;
    auto [begin, allocation] = *found;
    check_surroundings(begin, allocation);
    m.live.erase(found);
    const size_t page_bytes = size_t(allocation.end - allocation.pages);
    unpoison(allocation.pages, page_bytes);
    map_at(allocation.pages, page_bytes, PROT_NONE);
    m.used_bytes -= page_bytes;
    m.freed[begin] = allocation.bytes;
    return true;
}

size_t used_device_bytes() { return memory().used_bytes; }

bool is_device_memory(const void* address, size_t bytes) {
    char* p = const_cast<char*>(static_cast<const char*>(address));
    auto next = memory().live.upper_bound(p);
    if (next == memory().live.begin()) return false;
    const auto& [begin, allocation] = *std::prev(next);
    return p + bytes <= begin + allocation.bytes;
}

char* on_device(const void* address) {
    char* p = static_cast<char*>(const_cast<void*>(address));
    const char* reserved = memory().reserved;
    return reserved && p >= reserved && p < reserved + kReservedBytes ? p + kReservedBytes : p;
}

void allow_on_device(const void* memory_of_host, size_t bytes) {
    memory().pinned[static_cast<const char*>(memory_of_host)] = bytes;
}
void forbid_on_device(const void* memory_of_host) { memory().pinned.erase(static_cast<const char*>(memory_of_host)); }

uintptr_t give_to_device(void* argument, size_t bytes) {
    // Programs, heaps, libraries and stacks are above; the sanitizers' shadows and pairs of small integers are not.
    constexpr uintptr_t kLowest = uintptr_t(0x55) << 40, kEnd = uintptr_t(1) << 47;
    const auto& pinned = memory().pinned;
    uintptr_t found = 0;
    for (size_t at = 0; at + sizeof(char*) <= bytes; at += sizeof(char*)) {
        char *address, *place = static_cast<char*>(argument) + at;
        std::memcpy(&address, place, sizeof(address));
        const auto word = reinterpret_cast<uintptr_t>(address);
        if (word < kLowest || word >= kEnd) continue;
        if (char* there = on_device(address); there != address) {
            std::memcpy(place, &there, sizeof(there));
            continue;
        }
        auto next = pinned.upper_bound(address);
        if (next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second) continue;
        unsigned char resident;
        const Quiet quiet;  // the detector has no order between the users of this stack slot
        if (mincore(reinterpret_cast<void*>(word & ~(kPageBytes - 1)), kPageBytes, &resident) == 0) found = word;
    }
    return found;
}

std::string describe_address(uintptr_t address) {
    Memory& m = memory();
    char* p = reinterpret_cast<char*>(address);
    if (on_device(p) != p) return "access to device memory at an address that did not come with the kernel's argument";
    p -= kReservedBytes;
    if (!m.reserved || p < m.reserved || p >= m.reserved + m.used_addresses + kPageBytes)
        return format("access to address 0x%zx, which is no memory of the device (0: also a misaligned vector)",
                      address);
    std::string where;
    auto next = m.live.upper_bound(p);
    if (next != m.live.begin()) {
        const auto& [begin, allocation] = *std::prev(next);
        where +=
            format("; %zd bytes after an allocation of %zu bytes", p - (begin + allocation.bytes), allocation.bytes);
    }
    if (next != m.live.end())
        where += format("; %zd bytes before one of %zu bytes", next->first - p, next->second.bytes);
    auto freed = m.freed.upper_bound(p);
    if (freed != m.freed.begin()) {
        const auto& [begin, bytes] = *std::prev(freed);
        if (p < begin + bytes) where = format(": inside an allocation of %zu bytes that was freed", bytes);
    }
    return "access outside device memory" + where;
}

void check_device_memory() {
    for (const auto& [begin, allocation] : memory().live) check_surroundings(begin, allocation);
}

}  // namespace simt

const void* simt_on_device(const void* address) { return simt::on_device(address); }

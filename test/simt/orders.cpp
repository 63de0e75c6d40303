// Addresses that represent orders in the race detector.
#include <sys/mman.h>

#include <array>

#include "test/simt/machine.h"

namespace simt {

namespace {

constexpr int kPlaces = 7;
constexpr size_t kMbarrierBytes = kArenaBytes / 2;  // of a block
constexpr size_t kHandovers = 1024;

// Bytes of each place, in the order of the enumeration. The mbarriers, which need the most, come last.
constexpr std::array<size_t, kPlaces> kBytes = {kMaxCluster * kNamedBarriers * 4,
                                                kMaxWarps*(kWarpLanes + 1) * 4,
                                                4096,
                                                kMaxWarps * 4,
                                                size_t(kMaxThreads) * kMaxCluster * 4,
                                                kHandovers * 4,
                                                kMaxCluster* kMbarrierBytes};

constexpr size_t begin_of(int place) {
    size_t begin = 0;
    for (int i = 0; i < place; i++) begin += (kBytes[size_t(i)] + 4095) / 4096 * 4096;
    return begin;
}

char* addresses() {
    static char* const begin = static_cast<char*>(
        mmap(nullptr, begin_of(kPlaces), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    return begin;
}

}  // namespace

Order order_of(Place place, uint32_t index) { return addresses() + begin_of(int(place)) + index; }

// After being mapped again, the addresses have no history in the race detector.
void forget_orders(int cluster) {
    if (!tsan()) return;
    const size_t used = begin_of(int(Place::mbarrier)) + size_t(cluster) * kMbarrierBytes;
    char* begin = addresses();
    munmap(begin, used);
    mmap(begin, used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

void release_both(Order order) {
    if (!tsan()) return;
    __tsan_release(order);
    Fiber& fiber = me();
    if (fiber.has_async_order) as_async(fiber, [order] { __tsan_release(order + 1); });
}

void acquire_both(Order order) {
    if (!tsan()) return;
    __tsan_acquire(order);
    Fiber& fiber = me();
    if (fiber.has_async_order) as_async(fiber, [order] { __tsan_acquire(order + 1); });
}

}  // namespace simt

#include "test/simt/proxy.h"

#include <cstring>

#include "test/simt/hopper_twins.h"

namespace ptx {

namespace {

struct Proxy {
    std::vector<char> view[simt::kMaxCluster];
    std::vector<void*> free_units;
    uint32_t turn = 0;
};

Proxy& proxy() {
    static Proxy instance;
    return instance;
}

void start() {
    if (!simt::options().strict_proxy) return;
    for (int rank = 0; rank < simt::machine().cluster; rank++) proxy().view[rank].assign(simt::kArenaBytes, char(0xff));
}

const bool installed = (simt::hooks().push_back({start, nullptr, nullptr}), true);

}  // namespace

char* async_pointer(uint32_t address) {
    char* shared = simt::shared_pointer(address);
    if (!simt::options().strict_proxy) return shared;
    return proxy().view[address >> simt::kRankShift].data() + (address & simt::kOffsetMask);
}

// More permissive than hardware: publishes the writes of all threads of the block.
void fence_proxy_async() {
    simt::Fiber& fiber = simt::me();
    if (simt::tsan()) {
        const simt::Order order = simt::order_of(simt::Place::thread, uint32_t(fiber.id) * 4);
        simt::async_order(fiber);
        simt::release_order(order);
        simt::as_async(fiber, [order] { simt::acquire_order(order); });
    }
    simt::Quiet quiet;
    const simt::Block& block = *fiber.block;
    if (simt::options().strict_proxy)
        std::memcpy(proxy().view[block.rank].data(), block.arena, simt::machine().grid->shared_bytes);
}

void async_write(uint32_t address, const void* from, size_t bytes) {
    char* seen = simt::shared_pointer(address);
    char* view = async_pointer(address);
    for (char* p : {seen, view}) {
        if (from)
            std::memcpy(p, from, bytes);
        else
            std::memset(p, 0xff, bytes);
        if (seen == view) break;
    }
}

void async_access(const void* address, size_t bytes, bool write) {
    if (!simt::tsan()) return;
    __tsan_ignore_thread_end();
    if (write)
        __tsan_write_range(const_cast<void*>(address), bytes);
    else
        __tsan_read_range(const_cast<void*>(address), bytes);
    __tsan_ignore_thread_begin();
}

void join_async() {
    if (!simt::tsan()) return;
    simt::Fiber& fiber = simt::me();
    const simt::Order order = simt::order_of(simt::Place::thread, uint32_t(fiber.id) * 4 + 2);
    simt::as_async(fiber, [order] { simt::release_order(order); });
    simt::acquire_order(order);
}

void* take_unit() {
    if (!simt::tsan()) return nullptr;
    Proxy& p = proxy();
    void* unit;
    if (p.free_units.empty()) {
        unit = __tsan_create_fiber(0);
    } else {
        unit = p.free_units.back();
        p.free_units.pop_back();
    }
    const simt::Order handover = simt::order_of(simt::Place::handover, p.turn++ % 1024);
    simt::as_async(simt::me(), [handover] { simt::release_order(handover); });
    simt::on_order(unit, [handover] { simt::acquire_order(handover); });
    return unit;
}

void give_back_unit(void* unit) {
    if (unit) proxy().free_units.push_back(unit);
}

simt::Order order_of_mbarrier(uint32_t bar, unsigned parity) {
    const uint32_t rank = bar >> simt::kRankShift, offset = bar & simt::kOffsetMask;
    return simt::order_of(simt::Place::mbarrier, rank * (simt::kArenaBytes / 2) + offset / 8 * 4 + parity * 2);
}

}  // namespace ptx

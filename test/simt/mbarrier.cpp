#include "test/simt/mbarrier.h"

#include <cstring>

#include "test/simt/hopper_twins.h"
#include "test/simt/options.h"
#include "test/simt/proxy.h"

namespace ptx {

Mbarrier* mbarrier_at(uint32_t bar) {
    if (bar % 8) simt::fault(format("the mbarrier at 0x%x is not aligned to 8 bytes", bar));
    auto* barrier = reinterpret_cast<Mbarrier*>(simt::shared_pointer(bar));
    if (simt::machine().blocks[bar >> simt::kRankShift].alive == 0)
        simt::fault(format("the mbarrier at 0x%x belongs to a block of the cluster that has ended", bar));
    if (barrier->count == 0xfffff || barrier->count == 0)
        simt::fault(format("the mbarrier at 0x%x is used before mbarrier.init", bar));
    return barrier;
}

void check_phase(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
}

void mbarrier_init(uint32_t bar, uint32_t count) {
    simt::Quiet quiet;
    if (bar % 8) simt::fault(format("the mbarrier at 0x%x is not aligned to 8 bytes", bar));
    auto* barrier = reinterpret_cast<Mbarrier*>(simt::shared_pointer(bar));
    barrier->phase = 0;
    barrier->count = barrier->pending = count;
    barrier->bytes = 0;
}

void mbarrier_inval(uint32_t bar) {
    simt::Quiet quiet;
    std::memset(simt::shared_pointer(bar), 0xff, sizeof(Mbarrier));
}

void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
    simt::Quiet quiet;
    Mbarrier* barrier = mbarrier_at(bar);
    barrier->bytes += bytes;
}

// Lets the threads that wait for a phase continue before the last thread that arrived. If it released memory too early,
// they overwrite it during its use.
static void be_overtaken() {
    simt::wait_until([](void*) { return true; }, nullptr, "its turn after an arrival");
    simt::yield();
}

void mbarrier_arrive(uint32_t bar, uint32_t count) {
    simt::Quiet quiet;
    Mbarrier* barrier = mbarrier_at(bar);
    simt::release_both(order_of_mbarrier(bar, barrier->phase));
    if (barrier->pending < count)
        simt::fault(
            format("more arrivals than the %u that the mbarrier at 0x%x expects", unsigned(barrier->count), bar));
    barrier->pending -= count;
    const unsigned phase = barrier->phase;
    check_phase(*barrier);
    if (barrier->phase != phase && (simt::options().seed == 0 || simt::random_below(2))) be_overtaken();
}

void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    mbarrier_expect_tx(bar, bytes);
    mbarrier_arrive(bar);
}

// True if the phase of that parity is over, i.e. the current phase has the other parity. A new barrier is in phase 0.
bool mbarrier_test_wait(uint32_t bar, uint32_t parity) {
    simt::Quiet quiet;
    simt::yield();
    const bool is_over = mbarrier_at(bar)->phase != (parity & 1);
    if (is_over) simt::acquire_both(order_of_mbarrier(bar, parity & 1));
    return is_over;
}

void mbarrier_wait(uint32_t bar, uint32_t parity) {
    simt::Quiet quiet;
    const Mbarrier* barrier = mbarrier_at(bar);
    simt::wait_until([=] { return barrier->phase != (parity & 1); }, "mbarrier wait");
    simt::acquire_both(order_of_mbarrier(bar, parity & 1));
}

}  // namespace ptx

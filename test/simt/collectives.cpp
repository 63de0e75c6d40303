#include "test/simt/collectives.h"

#include "test/simt/after_meeting.h"

namespace simt {

std::function<void()>& after_meeting() {
    static std::function<void()> hook;
    return hook;
}

static Order order_of_barrier(const Block& block, int id, unsigned generation) {
    return order_of(Place::named_barrier, uint32_t(block.rank * kNamedBarriers + id) * 4 + (generation & 1) * 2);
}

void arrive_at_barrier(int id, int expected, Await await, const char* what) {
    Quiet quiet;
    Block& block = *me().block;
    if (id < 0 || id >= kNamedBarriers) fault(format("%s: there is no barrier %d", what, id));
    Barrier& barrier = block.named[id];
    if (expected <= 0 || (id != 0 && expected % kWarpLanes))
        fault(format("%s: barrier %d for %d threads, which is no number of whole warps", what, id, expected));
    if (barrier.arrived && barrier.expected != expected)
        fault(format("%s: barrier %d for %d threads, others came for %d", what, id, expected, barrier.expected));
    const unsigned generation = barrier.generation;
    const Order order = order_of_barrier(block, id, generation);
    release_both(order);
    barrier.expected = expected;
    if (++barrier.arrived >= expected) {
        barrier.arrived = 0;
        barrier.generation++;
        wake(&barrier);
    } else {
        while (await == Await::yes && barrier.generation == generation) wait_for_key(&barrier, what);
    }
    if (await == Await::yes) acquire_both(order);
}

void sync_block() {
    const Block& block = *me().block;
    if (block.exited)
        fault(format("__syncthreads, which %d threads of the block never reach: they have ended", block.exited));
    arrive_at_barrier(0, block.alive, Await::yes, "__syncthreads");
}

// Adds the running lane to its warp's meeting.
static Meeting& join(uint32_t mask, bool may_end, const char* what) {
    Fiber& fiber = me();
    if (!(mask >> fiber.lane() & 1))
        fault(format("%s with mask 0x%08x, which leaves out the calling lane %d", what, mask, fiber.lane()));
    if (const uint32_t gone = mask & ~lanes_alive(fiber.warp()); gone && !may_end)
        fault(format("%s with mask 0x%08x, which names lane %d: it has ended or does not exist", what, mask,
                     __builtin_ctz(gone)));
    Meeting& meeting = machine().meetings[fiber.warp()][__builtin_ctz(mask)];
    if (!meeting.arrived) {
        meeting.mask = mask;
        meeting.what = what;
        meeting.may_end = may_end;
    } else if (meeting.mask != mask || meeting.what != what) {
        fault(format("%s with mask 0x%08x meets %s with mask 0x%08x in one warp", what, mask, meeting.what,
                     meeting.mask));
    }
    meeting.arrived |= 1u << fiber.lane();
    return meeting;
}

static void open(Meeting& meeting) {
    meeting.arrived = 0;
    meeting.generation++;
    wake_warp(me().warp(), &meeting);
}

static void await_next(const Meeting& meeting, unsigned generation) {
    while (meeting.generation == generation) wait_for_key(&meeting, meeting.what);
}

uint64_t meet(uint32_t mask, uint64_t value, void (*combine)(Meeting&, void*), void* argument, const char* what) {
    Quiet quiet;
    Meeting& meeting = join(mask, false, what);
    const unsigned generation = meeting.generation;
    const int lane = me().lane();
    meeting.in[lane] = value;
    if (meeting.arrived == mask) {
        combine(meeting, argument);
        if (after_meeting()) after_meeting()();
        open(meeting);
    } else {
        await_next(meeting, generation);
    }
    return meeting.out[lane];
}

void sync_warp(uint32_t mask) {
    Quiet quiet;
    const int warp = me().warp();
    Meeting& meeting = join(mask, true, "__syncwarp");
    const unsigned generation = meeting.generation;
    const uint32_t at = uint32_t(warp * (kWarpLanes + 1) + __builtin_ctz(mask)) * 4;
    const Order order = order_of(Place::warp, at + (generation & 1) * 2);
    release_both(order);
    if (meeting.arrived == (mask & lanes_alive(warp)))
        open(meeting);
    else
        await_next(meeting, generation);
    acquire_both(order);
}

}  // namespace simt

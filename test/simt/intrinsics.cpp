#include "test/simt/intrinsics.h"

namespace simt {

// Two alternating counters: a fast thread's next vote must not disturb a slow thread's read. A vote has two barriers.
int votes_of_block(bool vote, const char*) {
    int count = 0;
    {
        Quiet quiet;
        Block& block = *me().block;
        block.votes[block.named[0].generation >> 1 & 1] += vote;
    }
    const unsigned generation = me().block->named[0].generation;
    sync_block();
    {
        Quiet quiet;
        Block& block = *me().block;
        count = block.votes[generation >> 1 & 1];
    }
    sync_block();
    Quiet quiet;
    me().block->votes[generation >> 1 & 1] = 0;
    return count;
}

// The race detector gets an order only where a fence establishes one. The atomic operation itself is included: the last
// thread to observe it may continue with plain stores to the same address.
static void release_if_fenced(const void* address) {
    if (me().fenced) release_order(const_cast<void*>(address));
}

void before_atomic(const void* address) { release_if_fenced(address); }

void after_atomic(const void* address) {
    release_if_fenced(address);
    me().last_atomic = address;
}

void thread_fence() {
    Fiber& fiber = me();
    fiber.fenced = true;
    if (fiber.last_atomic) acquire_order(const_cast<void*>(fiber.last_atomic));
}

}  // namespace simt

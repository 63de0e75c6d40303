// What threads do together: barriers of a block, and meetings of the lanes of a warp.
#pragma once

#include "test/simt/machine.h"

namespace simt {

enum class Await : bool { no, yes };

// bar.sync (yes) and bar.arrive (no) at barrier `id` of the block for `expected` threads.
void arrive_at_barrier(int id, int expected, Await await, const char* what);

// __syncthreads: every thread of the block, ended ones included, which is a fault.
void sync_block();

// The running lane and all others of `mask` give `value`; the last to arrive calls combine(meeting), which reads
// meeting.in and writes meeting.out, by lane. Returns the running lane's out. Orders no memory: PTX promises none.
// `what` tells instructions apart: lanes that do different things together are a fault.
uint64_t meet(uint32_t mask, uint64_t value, void (*combine)(Meeting&, void*), void* argument, const char* what);

template <class Combine> uint64_t meet(uint32_t mask, uint64_t value, Combine combine, const char* what) {
    return meet(
        mask, value, [](Meeting& m, void* c) { (*static_cast<Combine*>(c))(m); }, &combine, what);
}

// __syncwarp: a meeting that orders memory. Lanes that have ended need not come.
void sync_warp(uint32_t mask);

// Calls f(lane) for each lane of the mask.
template <class F> void each_lane(uint32_t mask, F f) {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

}  // namespace simt

// Joint operations of threads: barriers of a block, and meetings of the lanes of a warp.
#pragma once

#include "test/simt/machine.h"

namespace simt {

enum class Await : bool { no, yes };

// bar.sync (yes) and bar.arrive (no) at barrier `id` of the block for `expected` threads.
void arrive_at_barrier(int id, int expected, Await await, const char* what);

// __syncthreads: for every thread of the block; a fault if one has ended.
void sync_block();

// The running lane and all others of `mask` pass `value`; the last to arrive calls combine(meeting), which reads
// meeting.in and writes meeting.out, by lane. Returns the running lane's out. Does not order memory, as PTX does not
// guarantee it. `what` identifies the instruction: it is a fault if lanes meet in different ones.
uint64_t meet(uint32_t mask, uint64_t value, void (*combine)(Meeting&, void*), void* argument, const char* what);

template <class Combine> uint64_t meet(uint32_t mask, uint64_t value, Combine combine, const char* what) {
    return meet(
        mask, value, [](Meeting& m, void* c) { (*static_cast<Combine*>(c))(m); }, &combine, what);
}

// __syncwarp: a meeting that orders memory. Lanes that have ended are not needed.
void sync_warp(uint32_t mask);

// Calls f(lane) for each lane of the mask.
template <class F> void each_lane(uint32_t mask, F f) {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

}  // namespace simt

// An mbarrier's state, in its eight bytes of shared memory.
#pragma once

#include <cstdint>

namespace ptx {

struct Mbarrier {
    uint64_t phase : 1, count : 20, pending : 20;
    int64_t bytes : 23;  // expected minus landed
};

// A fault if there is no mbarrier.
Mbarrier* mbarrier_at(uint32_t bar);
// Ends the phase if it is complete.
void check_phase(Mbarrier& barrier);

}  // namespace ptx

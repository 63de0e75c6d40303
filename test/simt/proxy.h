// Shared memory as the asynchronous units see it, and what the race detector is told of them.
#pragma once

#include "test/simt/machine.h"

namespace ptx {

// With options().strict_proxy a copy that is brought up to date at fence.proxy.async only.
char* async_pointer(uint32_t address);
// Writes to both views; from == nullptr poisons.
void async_write(uint32_t address, const void* from, size_t bytes);
// Tells the race detector of an access, from inside on_order(), which is quiet.
void async_access(const void* address, size_t bytes, bool write);
// The running thread knows now that its asynchronous work is over.
void join_async();

// A race detector's order of its own for one copy in flight: it knows what its issuer's asynchronous order held at the
// issue, and nothing later. Null without the race detector.
void* take_unit();
void give_back_unit(void* unit);
template <class Work> void on_unit(void* unit, Work work) {
    if (unit)
        simt::on_order(unit, work);
    else
        work();
}

// Where to say which order a phase of an mbarrier carries.
simt::Order order_of_mbarrier(uint32_t bar, unsigned parity);

}  // namespace ptx

// The asynchronous units' view of shared memory, and what is reported to the race detector about it.
#pragma once

#include "test/simt/machine.h"

namespace ptx {

// With options().strict_proxy, a copy that is updated only at fence.proxy.async.
char* async_pointer(uint32_t address);
// Writes to both views; from == nullptr poisons them.
void async_write(uint32_t address, const void* from, size_t bytes);
// Reports an access to the race detector, from inside on_order(), which does not check accesses.
void async_access(const void* address, size_t bytes, bool write);
// Orders the running thread after its asynchronous work.
void join_async();

// A separate order of the race detector for one copy in flight: it includes the state of its issuer's asynchronous
// order at the issue, and nothing later. Null without the race detector.
void* take_unit();
void give_back_unit(void* unit);
template <class Work> void on_unit(void* unit, Work work) {
    if (unit)
        simt::on_order(unit, work);
    else
        work();
}

// The order that a phase of an mbarrier carries, to be set by the caller.
simt::Order order_of_mbarrier(uint32_t bar, unsigned parity);

}  // namespace ptx

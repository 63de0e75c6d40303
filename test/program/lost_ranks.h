// The cases of exchange.cpp with a rank that is lost in a particular place.
#pragma once

#include <unistd.h>

#include "kernels/comm.h"

// Rank 0's collective of all ranks fails while one of a group waits for rank 1. The group must end at once.
inline void fail_with_group(const Comm& comm) {
    const Comm group = split(comm, 0, comm.rank);
    const DeviceBuffer array(size_t(group.size) * sizeof(double));
    while (comm.rank > 0) ::pause();
    all_gather(array.data(), array.data(), sizeof(double), group, {});
    try {
        all_reduce_sum(static_cast<double*>(array.data()), 1, comm, {});
    } catch (...) {
        drain(group);
        throw;
    }
}

// The last of three stages waits for all while the others continue. Then rank 1 hangs: it has made progress for longer
// and has started more collectives than rank 2.
inline void hang_in_pipeline(const Comm& comm) {
    const Comm others = split(comm, comm.rank == 2, comm.rank);
    for (int i = 0; i < 20 && comm.rank < 2; i++) {
        ::usleep(100'000);
        all_reduce_max(i, others);
    }
    while (comm.rank == 1) ::pause();
    all_reduce_max(0, comm);
}

// Talk between ranks. A communicator is an argument, never a global; the single-rank one has nobody to talk to.
#pragma once

#include <cstddef>

#include "kernels/device.h"

struct Comm {
    int rank = 0;
    int size = 1;
    void* handle = nullptr;  // the implementation's own
};

// The communicator of a process that was started alone.
Comm comm_single();

// In place, over all ranks, in stream order; the same bits on every rank.
void all_reduce_sum(float* values, size_t count, const Comm& comm, Stream stream);

// The largest of each rank's value: how a fault on one rank becomes a decision of all of them. Waits for the answer.
int all_reduce_max(int value, const Comm& comm);

// Waits until every rank is here.
void barrier(const Comm& comm);

// The communicator of one rank: every collective is already done.
#include "kernels/comm.h"

Comm comm_single() { return {}; }

void all_reduce_sum(float*, size_t, const Comm&, Stream) {}

int all_reduce_max(int value, const Comm&) { return value; }

void barrier(const Comm&) {}

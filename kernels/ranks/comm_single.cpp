// For binaries without a library for collectives: a single rank, so every collective is a no-op, except that an
// exchange copies.
#include "kernels/base/check.h"
#include "kernels/comm.h"
#include "kernels/shared/collective.h"

Comm open_comm(const CommSettings& settings) {
    if (settings.size > 1)
        fail(Exit::config,
             "this program was started as rank %d of %d, but was built without a library for collectives: "
             "train_gpt --version shows why",
             settings.rank, settings.size);
    return comm_single();
}

void close_comm(Comm& comm) { comm = comm_single(); }

Comm split(const Comm&, int, int) { return comm_single(); }

// The Makefile defines COMM_MISSING as the header that it did not find or did not look for (NCCL=0).
std::string comm_library() { return "none: " COMM_MISSING " was not found at build time"; }

std::string comm_launcher() { return {}; }

bool comm_needs_gather() { return false; }

void wait(Ticket, const Comm&, Stream) {}

void observe(const Comm&, Trace*) {}

void drain(const Comm&) noexcept {}

Ticket all_reduce_sum(double*, size_t, const Comm&, Stream) { return {}; }

Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm&, Stream) { return reduce_scatter_alone(op); }

size_t reduce_scatter_scratch_bytes(Dtype, size_t, int, bool, Dtype) { return 0; }

Ticket all_gather(void* out, const void* inp, size_t, const Comm&, Stream) {
    return finished_in_place(out, inp, "all_gather");
}

Ticket exchange(const Exchange& op, const Comm&, Stream stream) { return exchange_alone(op, stream); }

int all_reduce_max(int value, const Comm&) { return value; }

CommTotals comm_totals(const Comm&) { return {}; }

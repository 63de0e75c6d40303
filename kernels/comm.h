// Communication between ranks. A communicator is an argument, never a global.
//
// Collectives run on a queue of their own, concurrently with the compute stream: each begins when the work that the
// stream held at the call has finished. wait() makes a stream wait for one; until then its buffers must not be touched.
// Every rank calls the same collectives in the same order with the same sizes. With one rank nothing is sent, and a
// collective must be in place.
//
// The linked implementation provides them: comm_single.cpp for one rank, comm_mpi.cpp for CPU ranks (MPI), comm_nccl.cu
// for GPUs (NCCL).
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/device.h"

class Trace;

struct Comm {
    int rank = 0;
    int size = 1;
    void* handle = nullptr;  // the implementation's own
};

struct CommSettings {
    int rank = 0, size = 1;
    int local_rank = 0;  // among the ranks of this node: chooses the GPU
    // Sums in the order that reduce_scatter_sum() describes, also where another is faster.
    bool deterministic = false;
    double deadline_s = 120;  // no collective may take longer
    bool always = false;      // use the library for one rank too, so that it can be tested on one GPU
    // Gathers one text per rank on all ranks, by rank. Required if comm_needs_gather().
    std::function<std::vector<std::string>(const std::string& mine)> gather = {};
    // Called before each collective, on the thread that starts it, so that a hang can be reported by name.
    std::function<void(uint64_t number, const char* name)> note = [](uint64_t, const char*) {};
};

// Joins the ranks. Fails with Exit::config if this binary was built without the library that it takes, and with
// Exit::peer_lost or Exit::hang if the other ranks do not join.
Comm open_comm(const CommSettings& settings);
void close_comm(Comm& comm);

// The communicator of a run of one rank.
inline Comm comm_single() { return {}; }

// Whether open_comm() needs CommSettings::gather, a channel between ranks that exists before it (NCCL), or opens its
// own (MPI).
bool comm_needs_gather();

// The program that must start this binary's ranks, "mpirun", or empty if any program may.
std::string comm_launcher();

// Broadcasts rank 0's text to every rank through the launcher that started them, mpirun. Every rank calls it once at
// most. Empty if this binary does not support that.
std::function<std::string(const std::string& mine)> launcher_share();

// The library that launcher_share() uses: "Open MPI 4.1.4", or empty.
std::string launcher_library();

// The library that carries out collectives between ranks in this binary: "Open MPI 4.1.4", "NCCL 2.28.9, started by any
// launcher", or why there is none. Does not access the device.
std::string comm_library();

// A collective that has been started. A default-constructed one has always finished.
struct Ticket {
    uint64_t number = 0;
};

// Makes the stream wait for the collective and for all that were started before it.
void wait(Ticket ticket, const Comm& comm, Stream stream);

// Waits until every collective has finished or failed. Required before buffers are freed, also after an error.
void drain(const Comm& comm) noexcept;

// Sums in place. The order of the ranks is not specified, so it is meant for small integers and for values of which all
// but one are 0.
Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream stream);

// out (count) = the sum over ranks of their piece number comm.rank of inp (size * count). May be in place: out = inp +
// rank * count. MPI always, and NCCL if CommSettings::deterministic is set, adds in the order of a binary tree over the
// ranks: the sum of n is the sum of the first 2^k < n, k as large as can be, and the sum of the rest. So ranks that
// each hold the sum of an aligned block of leaves give the same bits as one that has added all leaves by this rule.
struct ReduceScatter {
    float* out;        // (count)  =
    void* scratch;     // reduce_scatter_scratch_bytes()
    const float* inp;  // (size * count)
    size_t count;
};
Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm& comm, Stream stream);
size_t reduce_scatter_scratch_bytes(size_t count, int size, bool deterministic);

// out (size * bytes) = every rank's inp (bytes), in the order of ranks. May be in place: inp = out + rank * bytes.
Ticket all_gather(void* out, const void* inp, size_t bytes, const Comm& comm, Stream stream);

// The maximum of all ranks' values, so that all of them act on a fault of one. Waits for the result.
int all_reduce_max(int value, const Comm& comm);

// Rank 0's text, on all ranks. Waits for it.
std::string broadcast_text(const std::string& mine, const Comm& comm);

// Waits until every rank is here.
void barrier(const Comm& comm);

// From now on `trace` gets a span for each collective, with the bytes that this rank sends, and for each wait; null: no
// trace does. Those under way may still go to the trace before.
void observe(const Comm& comm, Trace* trace);

// Totals of this rank since it joined.
struct CommTotals {
    uint64_t bytes_sent = 0;  // of tensors: (size - 1) pieces for each reduce_scatter_sum() and all_gather(), the least
    // Exposed communication: time in wait(), all_reduce_max(), broadcast_text() and barrier(); the host's or, where
    // wait() makes a stream wait and not the host, the stream's up to its last synchronize().
    double waited_ms = 0;
};
CommTotals comm_totals(const Comm& comm);
inline CommTotals operator-(const CommTotals& a, const CommTotals& b) {
    return {a.bytes_sent - b.bytes_sent, a.waited_ms - b.waited_ms};
}

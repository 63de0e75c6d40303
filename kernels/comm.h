// Talk between ranks. A communicator is an argument, never a global.
//
// Collectives run on a queue of their own beside the compute stream: each begins when what the stream held at the call
// has finished, and runs while the stream goes on. wait() makes a stream wait for one; until then its buffers belong to
// it. Every rank calls the same collectives in the same order with the same sizes. With one rank nothing is sent, and a
// collective must be in place.
//
// The linked implementation carries them: comm_single.cpp for one rank, comm_mpi.cpp for CPU ranks (MPI),
// comm_nccl.cu for GPUs (NCCL).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.h"

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
    bool always = false;      // one rank, too, goes through the library: how a test sees it work on one GPU
    // Hands every rank's text to all ranks, by rank. What needs it says so: comm_needs_gather().
    std::function<std::vector<std::string>(const std::string& mine)> gather = {};
    // Told of each collective before it begins, on the thread that asked for it: how a hang gets its name.
    std::function<void(uint64_t number, const char* name)> note = [](uint64_t, const char*) {};
};

// Joins the ranks. Exit::config where this binary cannot (built without the library that it takes), Exit::peer_lost or
// Exit::hang where the others do not come.
Comm open_comm(const CommSettings& settings);
void close_comm(Comm& comm);

// The communicator of a process that has nobody to talk to.
inline Comm comm_single() { return {}; }

// Whether ranks must be able to talk before open_comm(), which then takes CommSettings::gather (NCCL), or can talk by
// what it opens (MPI).
bool comm_needs_gather();

// The program that must start this binary's ranks, "mpirun", or empty where any may.
std::string comm_launcher();

// Hands rank 0's text to every rank by means of the launcher that started them, mpirun. Every rank calls it once at
// most, and nobody where this binary has no such means: then it is empty.
std::function<std::string(const std::string& mine)> launcher_share();

// What launcher_share() speaks: "Open MPI 4.1.4", or empty.
std::string launcher_library();

// What carries collectives between ranks in this binary: "Open MPI 4.1.4", "NCCL 2.28.9, started by any launcher", or
// why nothing does. Asks no device.
std::string comm_library();

// A collective that was asked for. The default one has always finished.
struct Ticket {
    uint64_t number = 0;
};

// What follows on the stream begins when the collective has finished, and so have all that were asked for before it.
void wait(Ticket ticket, const Comm& comm, Stream stream);

// Waits until everything that was asked for has finished or failed: before buffers go, also after an error.
void drain(const Comm& comm) noexcept;

// Sums in place; the order of the ranks is not specified, so for values of which all but one are 0, or small integers.
Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream stream);

// out (count) = the sum over ranks of their piece number comm.rank of inp (size * count). May be in place: out = inp +
// rank * count. MPI always, and NCCL if CommSettings::deterministic says so, adds in the order of a binary tree over
// the ranks: the sum of n is the sum of the first 2^k < n, k as large as can be, and the sum of the rest. So ranks that
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

// The largest of each rank's value: how a fault on one rank becomes a decision of all of them. Waits for the answer.
int all_reduce_max(int value, const Comm& comm);

// Rank 0's text, on all ranks. Waits for it.
std::string broadcast_text(const std::string& mine, const Comm& comm);

// Waits until every rank is here.
void barrier(const Comm& comm);

// What this rank has done since it joined.
struct CommTotals {
    uint64_t bytes_sent = 0;  // of tensors: (size - 1) pieces for each reduce_scatter_sum() and all_gather(), the least
    // Time in wait(), all_reduce_max(), broadcast_text() and barrier(), which no work has hidden: the host's, or, where
    // wait() lets a stream wait and not the host, the stream's up to its last synchronize().
    double waited_ms = 0;
};
CommTotals comm_totals(const Comm& comm);
inline CommTotals operator-(const CommTotals& a, const CommTotals& b) {
    return {a.bytes_sent - b.bytes_sent, a.waited_ms - b.waited_ms};
}

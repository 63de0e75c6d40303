// Communication between ranks. A communicator is an argument, never a global.
//
// A communicator runs its collectives in the order of the calls, on a separate queue, concurrently with the compute
// stream and with other communicators. A collective starts after the work that was on the stream at the call. wait()
// makes a stream wait for a collective; do not access its buffers before that. Every rank of a communicator must call
// the same collectives in the same order with the same sizes. Ranks that share two communicators should also call the
// collectives of both in the same order: NCCL's kernels occupy the GPU while they wait for other ranks. CPU ranks need
// not. A single rank sends no data, and its collectives must be in place; its exchange() copies.
//
// The linker chooses the implementation: comm_single.cpp for one rank, comm_mpi.cpp for CPU ranks (MPI), comm_nccl.cu
// for GPUs (NCCL).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/base/grid.h"  // IWYU pragma: export
#include "kernels/device.h"     // IWYU pragma: export
#include "kernels/tensor.h"     // IWYU pragma: export

class Trace;

struct Comm {
    int rank = 0;
    int size = 1;
    void* handle = nullptr;  // private to the implementation
};

struct CommSettings {
    int rank = 0, size = 1;
    int local_rank = 0;  // among the ranks of this node: chooses the GPU
    // Always sum in the order documented at reduce_scatter_sum(), even if another order is faster.
    bool deterministic = false;
    double deadline_s = 120;  // time limit of a collective
    bool always = false;      // use the library for a single rank too, to test it on one GPU
    // Gathers one text, of any bytes, per rank on all ranks, in rank order. Required if comm_needs_gather(), until
    // close_comm().
    std::function<std::vector<std::string>(const std::string& mine)> gather = {};
    // Called before each collective, on the thread that starts it, so that a hang report can name the collective. The
    // number counts this rank's collectives in all communicators.
    std::function<void(uint64_t number, const char* name)> note = [](uint64_t, const char*) {};
    // Called with true and false before and after the host waits for collectives, so that a hang report can tell ranks
    // that wait from those that do not.
    std::function<void(bool begins)> note_wait = [](bool) {};
};

// Connects the ranks. Fails with Exit::config if the binary was built without the required library, and with
// Exit::peer_lost or Exit::hang if the other ranks do not join.
Comm open_comm(const CommSettings& settings);
// Closes a communicator and its groups. Closing a group does nothing: it ends with the communicator that was split.
void close_comm(Comm& comm);

// Returns this rank's group: the ranks of `comm` with the same color, ordered by key and, for equal keys, by rank. A
// group of one rank is comm_single(). A collective of open_comm()'s communicator, which waits for all ranks and fails
// like open_comm(). A group has its own tickets, trace and totals.
Comm split(const Comm& comm, int color, int key);

// The communicator of a single-rank run.
inline Comm comm_single() { return {}; }

// Whether open_comm() needs CommSettings::gather, an existing channel between ranks. True for NCCL, false for MPI.
bool comm_needs_gather();

// The launcher that this binary requires ("mpirun"), or empty if any launcher works.
std::string comm_launcher();

// Returns a function that broadcasts rank 0's text to all ranks through MPI. Each rank may call it at most once. Empty
// if this binary does not support it. Unless comm_needs_gather(), `comm` must be open.
std::function<std::string(const std::string& mine)> launcher_share(const Comm& comm);

// The library that launcher_share() uses: "Open MPI 4.1.4", or empty.
std::string launcher_library();

// The library that this binary uses for collectives: "Open MPI 4.1.4", "NCCL 2.28.9, started by any launcher", or why
// there is none. Does not access the device.
std::string comm_library();

// A started collective. A default-constructed ticket counts as finished.
struct Ticket {
    uint64_t number = 0;
};

// Makes the stream wait for this collective and all earlier ones.
void wait(Ticket ticket, const Comm& comm, Stream stream);

// Waits until every collective has finished or failed. Required before freeing buffers, even after an error.
void drain(const Comm& comm) noexcept;

// Sums in place. The order of the ranks is unspecified: use it for small integers, or if at most
// one rank's value is not 0.
Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream stream);

// out (count) = the sum over ranks of piece comm.rank of inp (size * count). inp and out may be fp32, bf16 or fp16; two
// different 16-bit types are not supported and fail with Exit::internal. May be in place if the types are equal:
// out = inp + rank * count. The sum is in FP32 and is rounded once, to out's type. It adds in the order of a binary
// tree over the ranks, except that NCCL may add fp32 into fp32 in another order unless CommSettings::deterministic. The
// sum of n terms is the sum of the first 2^k plus the sum of the rest, with the largest k such that 2^k < n. So ranks
// that each hold the sum of an aligned block of leaves give the same bits as one rank that adds all leaves this way.
struct ReduceScatter {
    View out;       // (count)  =
    void* scratch;  // reduce_scatter_scratch_bytes()
    ConstView inp;  // (size * count)
    size_t count;
};
Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm& comm, Stream stream);
// Returns the size of the scratch memory. A sum of fp32 must name out's type.
size_t reduce_scatter_scratch_bytes(Dtype inp, size_t count, int size, bool deterministic, Dtype out = Dtype::fp32);

// out (size * bytes) = every rank's inp (bytes), in rank order. May be in place: inp = out + rank * bytes.
Ticket all_gather(void* out, const void* inp, size_t bytes, const Comm& comm, Stream stream);

// Sends messages between pairs of ranks. The n-th message that rank a sends to rank b becomes the n-th message that b
// receives from a; both must have the same size. A message to the rank itself is copied. Every rank calls it, also
// without messages. What is sent must not overlap what is received.
//
// MPI fails with Exit::internal, naming ranks and bytes, if the sizes differ. With NCCL that is undefined: the data may
// be wrong, or the ranks wait until the deadline. Both wait until the deadline for a message that is not sent.
struct Exchange {
    struct Message {
        int rank;      // the other rank; may be this rank
        void* data;    // (bytes), contiguous
        size_t bytes;  // > 0
    };
    std::vector<Message> send, receive;
};
Ticket exchange(const Exchange& op, const Comm& comm, Stream stream);

// Returns the maximum over ranks, so that all ranks act on an error of one. Waits for the result, and so for all ranks.
int all_reduce_max(int value, const Comm& comm);

// Records later collectives, with the bytes that this rank sends, and waits as spans of `trace`; null stops recording.
// Collectives in progress may still be recorded in the previous trace.
void observe(const Comm& comm, Trace* trace);

// Totals of this rank since open_comm().
struct CommTotals {
    uint64_t bytes_sent = 0;  // tensors only: (size - 1) pieces per reduce_scatter_sum() and all_gather(), the minimum,
                              // and exchange()'s messages to other ranks
    // Exposed communication: host time in wait() and all_reduce_max(). If wait() blocks the stream and not the host:
    // the stream's time up to its last synchronize().
    double waited_ms = 0;
};
CommTotals comm_totals(const Comm& comm);
inline CommTotals operator+(const CommTotals& a, const CommTotals& b) {
    return {a.bytes_sent + b.bytes_sent, a.waited_ms + b.waited_ms};
}
inline CommTotals operator-(const CommTotals& a, const CommTotals& b) {
    return {a.bytes_sent - b.bytes_sent, a.waited_ms - b.waited_ms};
}

// The communicators of a pipeline stage and its neighbors in a ring: the first stage follows the last. Each has two
// ranks and carries messages in one direction, so that none waits for a message in the other.
struct StageComm {
    Comm from_previous, to_next;  // activations
    Comm from_next, to_previous;  // gradients
};

// The communicators of a rank's place in the grid.
struct GridComm {
    Comm world;           // all ranks
    Comm stage;           // the ranks with the same layers; `world` without pipeline parallelism
    Comm data;            // the ranks that hold the same part of the model; `stage` if all do
    Comm context;         // ranks of `data` with the other positions of the same sequences
    Comm tensor;          // the ranks that hold the other parts of the layers
    Comm kv_head;         // ranks of `tensor` with the same key/value head
    Comm pipeline;        // the ranks that hold the other layers
    StageComm neighbors;  // among `pipeline`

    GridComm(const Comm& all) : world(all), stage(all), data(all) {}  // a grid without other dimensions
    // Collective, as split() is. `sharers`: successive ranks of `tensor` with the same key/value head.
    GridComm(const Comm& all, const Grid& grid, int sharers = 1);

    std::vector<Comm> distinct() const;
};
inline GridComm::GridComm(const Comm& all, const Grid& grid, int sharers) : GridComm(all) {
    const Grid::Place place = grid.place_of(all.rank);
    if (grid.pipeline > 1) {
        data = stage = split(all, place.pipeline, all.rank);
        const int lines = grid.replicas() * grid.tensor, line = all.rank % lines, stages = grid.pipeline;
        pipeline = split(all, line, place.pipeline);
        // Edge e of the ring leads from stage e to the next one. Edges of one kind have no stage in common.
        const auto kind_of = [&](int edge) { return stages % 2 == 1 && edge + 1 == stages ? 2 : edge % 2; };
        const int after = place.pipeline, before = (place.pipeline + stages - 1) % stages;
        for (int kind = 0; kind < 2 + stages % 2; kind++) {
            const bool is_after = kind_of(after) == kind, is_before = kind_of(before) == kind;
            const int color = is_after ? after * lines + line : is_before ? before * lines + line : all.size + all.rank;
            const Comm forward = split(all, color, is_after ? 0 : 1), backward = split(all, color, is_after ? 0 : 1);
            if (is_after) neighbors.to_next = forward, neighbors.from_next = backward;
            if (is_before) neighbors.from_previous = forward, neighbors.to_previous = backward;
        }
    }
    if (grid.tensor > 1) {
        data = split(all, place.pipeline * grid.tensor + place.tensor, grid.replica_of(place));
        tensor = split(all, place.pipeline * grid.replicas() + grid.replica_of(place), place.tensor);
        if (sharers > 1) kv_head = split(all, all.rank / sharers, place.tensor);
    }
    if (grid.context > 1)
        context = split(all, (place.pipeline * grid.data + place.data) * grid.tensor + place.tensor, place.context);
}
inline std::vector<Comm> GridComm::distinct() const {
    std::vector<Comm> comms = {world};
    for (const Comm& comm : {stage, data, context, tensor, kv_head, pipeline, neighbors.from_previous,
                             neighbors.to_next, neighbors.from_next, neighbors.to_previous}) {
        bool is_new = comm.size > 1;
        for (const Comm& other : comms) is_new &= comm.handle != other.handle;
        if (is_new) comms.push_back(comm);
    }
    return comms;
}

// The sum over all communicators.
inline CommTotals comm_totals(const GridComm& comms) {
    CommTotals totals;
    for (const Comm& comm : comms.distinct()) totals = totals + comm_totals(comm);
    return totals;
}

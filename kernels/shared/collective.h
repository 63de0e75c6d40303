// Shared by the implementations of kernels/comm.h.
#pragma once

#include <chrono>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/comm.h"

// The ticket of a single rank's collective.
inline Ticket finished_in_place(const void* out, const void* inp, const char* name) {
    require(out == inp, "%s: must be in place with one rank", name);
    return {};
}

// Requires types that reduce_scatter_sum() supports. One rank's sum is in place, so its types are equal.
inline void require_summable(const ReduceScatter& op, const Comm& comm) {
    const Dtype inp = op.inp.dtype, out = op.out.dtype;
    const bool has_fp32 = inp == Dtype::fp32 || out == Dtype::fp32;
    const bool has_fp64 = inp == Dtype::fp64 || out == Dtype::fp64;
    require(!has_fp64 && (inp == out || (has_fp32 && comm.size > 1)),
            "reduce_scatter_sum on rank %d of %d does not support a sum of %s in %s", comm.rank, comm.size,
            name_of(inp), name_of(out));
}

// A single rank's reduce-scatter.
inline Ticket reduce_scatter_alone(const ReduceScatter& op) {
    require_summable(op, comm_single());
    return finished_in_place(op.out.data, op.inp.data, "reduce_scatter_sum");
}

// Returns the bytes that an exchange sends to other ranks. Requires messages to and from existing ranks, and that this
// rank's messages to itself have the sizes that it expects.
inline size_t checked_bytes(const Exchange& op, const Comm& comm) {
    std::vector<size_t> own[2];
    size_t sent = 0;
    for (const auto* messages : {&op.send, &op.receive})
        for (const Exchange::Message& message : *messages) {
            require(message.rank >= 0 && message.rank < comm.size && message.bytes > 0,
                    "exchange: rank %d of %d has a message of %zu bytes for rank %d", comm.rank, comm.size,
                    message.bytes, message.rank);
            if (message.rank == comm.rank)
                own[messages == &op.receive].push_back(message.bytes);
            else if (messages == &op.send)
                sent += message.bytes;
        }
    require(own[0] == own[1], "exchange: rank %d sends itself other messages than it receives: %zu and %zu messages",
            comm.rank, own[0].size(), own[1].size());
    return sent;
}

// A single rank's exchange: copies its messages.
inline Ticket exchange_alone(const Exchange& op, Stream stream) {
    checked_bytes(op, comm_single());
    for (size_t i = 0; i < op.send.size(); i++)
        copy_on_device(op.receive[i].data, op.send[i].data, op.send[i].bytes, stream);
    return {};
}

// Pauses after a poll of a library whose calls do not block. The first `eager_polls` pauses are short, because most
// waits are.
inline void pause_after(int polls, int eager_polls) {
    if (polls < eager_polls)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// Polls until `is_done`. Returns false on timeout.
template <class Condition> bool poll_until(double limit_s, int eager_polls, Condition is_done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
    for (int polls = 0; !is_done(); polls++) {
        if (std::chrono::steady_clock::now() >= end) return false;
        pause_after(polls, eager_polls);
    }
    return true;
}

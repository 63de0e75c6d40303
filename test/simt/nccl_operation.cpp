#include "test/simt/nccl_operation.h"

#include <algorithm>
#include <cstring>

#include "test/simt/device_memory.h"
#include "test/simt/fault.h"
#include "test/simt/sanitizers.h"

namespace simt::nccl {

ncclResult_t refuse(ncclComm_t comm, ncclResult_t code, const std::string& words) {
    if (comm) comm->last_words = words;
    simt::note_fault("NCCL: " + words);
    return code;
}

namespace {

template <class T> void reduce(const ncclComm& comm, const Operation& op, int first, size_t offset) {
    T* to = reinterpret_cast<T*>(op.to);
    for (size_t i = 0; i < op.description.count; i++) {
        T sum{};
        for (int k = 0; k < comm.size; k++) {
            const T value = reinterpret_cast<const T*>(comm.area((first + k) % comm.size) + offset)[i];
            sum = k == 0 ? value : op.description.reduction == ncclMax ? std::max(sum, value) : sum + value;
        }
        to[i] = sum;
    }
}

void reduce_any(const ncclComm& comm, const Operation& op, int first, size_t offset) {
    switch (op.description.type) {
        case ncclFloat64: return reduce<double>(comm, op, first, offset);
        case ncclFloat32: return reduce<float>(comm, op, first, offset);
        case ncclInt32: return reduce<int>(comm, op, first, offset);
        default: simt::note_fault("NCCL: a sum of a type that the stand-in does not add");
    }
}

// The messages of a group of rank `from` that go to rank `to`, or that `to` receives from it.
std::vector<const Message*> between(const ncclComm& comm, int owner, bool is_send, int peer) {
    std::vector<const Message*> found;
    const Slot& slot = comm.slot(owner);
    for (int i = 0; i < slot.messages; i++)
        if (slot.message[i].is_send == is_send && slot.message[i].peer == peer) found.push_back(&slot.message[i]);
    return found;
}

// Reads a rank's messages for this rank. Its group and this one must have the same messages between the two.
void receive_from(ncclComm& comm, const Operation& op, int peer) {
    const std::vector<const Message*> sent = between(comm, peer, true, comm.rank);
    size_t taken = 0;
    auto refuse_message = [&](const Message* wanted, const Message* found) {
        comm.error = refuse(&comm, ncclInvalidUsage,
                            format("rank %d waits for %zu elements of type %d from rank %d, which sends %zu of type %d",
                                   comm.rank, wanted ? wanted->count : 0, wanted ? int(wanted->type) : -1, peer,
                                   found ? found->count : 0, found ? int(found->type) : -1));
    };
    for (const auto& [wanted, to] : op.messages) {
        if (wanted.is_send || wanted.peer != peer) continue;
        const Message* const found = taken < sent.size() ? sent[taken] : nullptr;
        if (!found || found->type != wanted.type || found->count != wanted.count) return refuse_message(&wanted, found);
        std::memcpy(to, comm.area(peer) + found->offset, wanted.count * bytes_of(wanted.type));
        taken++;
    }
    if (taken < sent.size()) refuse_message(nullptr, sent[taken]);
}

// The order is the same on all ranks: rank r's part of a sum begins with rank r + 1's values, as in a ring.
void receive(ncclComm& comm, const Operation& op) {
    const size_t bytes = op.description.count * bytes_of(op.description.type);
    switch (op.description.kind) {
        case Kind::all_reduce: return reduce_any(comm, op, 0, 0);
        case Kind::reduce_scatter: return reduce_any(comm, op, (comm.rank + 1) % comm.size, size_t(comm.rank) * bytes);
        case Kind::all_gather:
            for (int i = 0; i < comm.size; i++) std::memcpy(op.to + size_t(i) * bytes, comm.area(i), bytes);
            return;
        case Kind::messages: return;
    }
}

void describe(ncclComm& comm, Operation& op) {
    Slot& mine = comm.slot(comm.rank);
    if (op.messages.empty()) mine.description = op.description;
    mine.messages = int(op.messages.size());
    size_t offset = 0;
    for (size_t i = 0; i < op.messages.size(); i++) {
        auto& [message, memory] = op.messages[i];
        message.offset = offset;
        if (message.is_send) {
            const size_t bytes = message.count * bytes_of(message.type);
            std::memcpy(comm.area(comm.rank) + offset, memory, bytes);
            offset += bytes;
        }
        mine.message[i] = message;
    }
    if (op.sent_bytes) std::memcpy(comm.area(comm.rank), op.from, op.sent_bytes);
}

void give_to_device(Operation& op) {
    op.from = simt::on_device(op.from);
    op.to = simt::on_device(op.to);
    for (auto& [message, memory] : op.messages) memory = simt::on_device(memory);
}

void show_accesses(const Operation& op) {
    if (op.sent_bytes) simt::saw_read(op.from, op.sent_bytes);
    if (op.received_bytes) simt::saw_write(op.to, op.received_bytes);
    for (const auto& [message, memory] : op.messages) {
        const size_t bytes = message.count * bytes_of(message.type);
        message.is_send ? simt::saw_read(memory, bytes) : simt::saw_write(memory, bytes);
    }
}

bool end_collective(ncclComm& comm, const Operation& op) {
    if (!comm.all([&](const Slot& slot) { return slot.arrived >= op.number; })) return false;
    for (int i = 0; i < comm.size; i++) {
        if (comm.slot(i).description == op.description) continue;
        comm.error = refuse(
            &comm, ncclInvalidUsage,
            format("operation %llu is %s on rank %d and %s on rank %d", static_cast<unsigned long long>(op.number),
                   op.description.text().c_str(), comm.rank, comm.slot(i).description.text().c_str(), i));
        break;
    }
    if (comm.error == ncclSuccess) receive(comm, op);
    comm.slot(comm.rank).done = op.number;
    return true;
}

// A rank posts its messages once and keeps them until the other ranks of its group have read them.
bool end_group(ncclComm& comm, Operation& op) {
    Slot& mine = comm.slot(comm.rank);
    bool has_ended = true;
    for (int peer = 0; peer < comm.size; peer++) {
        const uint64_t group = op.groups[peer];
        if (!group) continue;
        const Slot& other = comm.slot(peer);
        // Read before the rest: then a rank that has gone on to a collective has posted everything before it.
        const bool has_gone_on = other.arrived > mine.arrived;
        if (!op.is_read[peer] && other.posted[comm.rank] >= group) {
            receive_from(comm, op, peer);
            op.is_read[peer] = true;
            mine.taken[peer] = group;
        }
        if (op.is_read[peer] && other.taken[comm.rank] >= group) continue;
        has_ended = false;
        if (!has_gone_on) continue;
        comm.error = refuse(&comm, ncclInvalidUsage,
                            format("rank %d has messages from or to rank %d, which has gone on to %s", comm.rank, peer,
                                   other.description.text().c_str()));
        return true;
    }
    return has_ended || comm.error != ncclSuccess;
}

}  // namespace

bool has_memory(const Operation& op) {
    bool there = (!op.sent_bytes || simt::is_device_memory(op.from, op.sent_bytes)) &&
                 (!op.received_bytes || simt::is_device_memory(op.to, op.received_bytes));
    for (const auto& [message, memory] : op.messages)
        there &= simt::is_device_memory(memory, message.count * bytes_of(message.type));
    return there;
}

bool fits(const Operation& op) {
    size_t bytes = 0;
    for (const auto& [message, memory] : op.messages)
        if (message.is_send) bytes += message.count * bytes_of(message.type);
    return bytes <= kAreaBytes && op.messages.size() <= size_t(kMaxMessages);
}

void number(ncclComm& comm, Operation& op) {
    if (op.messages.empty()) op.number = ++comm.collectives;
    for (const auto& [message, memory] : op.messages)
        if (!op.groups[message.peer]) op.groups[message.peer] = ++comm.groups[message.peer];
}

bool go_on(ncclComm& comm, Operation& op) {
    if (comm.is_aborted) return true;
    if (op.never_ends) return false;
    if (!op.has_arrived) {
        const uint64_t arrived = comm.slot(comm.rank).arrived;
        if (!comm.all([&](const Slot& slot) { return slot.done >= arrived; })) return false;
        if (!has_memory(op)) {
            refuse(&comm, ncclInvalidArgument, std::string(name_of(op.description.kind)) + " of memory that was freed");
            comm.error = ncclInvalidArgument;
            return true;
        }
        give_to_device(op);
        show_accesses(op);
        simt::Quiet quiet;
        describe(comm, op);
        if (op.messages.empty()) comm.slot(comm.rank).arrived = op.number;
        for (int peer = 0; peer < comm.size; peer++)
            if (op.groups[peer]) comm.slot(comm.rank).posted[peer] = op.groups[peer];
        op.has_arrived = true;
    }
    simt::Quiet quiet;
    return op.messages.empty() ? end_collective(comm, op) : end_group(comm, op);
}

}  // namespace simt::nccl

// An operation of the stand-in for NCCL, performed between processes of one machine through shared memory.
//
// Each rank performs it in two steps. After every rank has read the previous collective's data, the rank describes the
// operation in its slot and copies the data to send into its area; after the other ranks have done this, it compares
// the descriptions and computes the data to receive.
//
// A collective involves all ranks; a group of messages involves only the ranks that they name. Stricter than NCCL, a
// message ends only after its receiver has it, and a group's messages must be in one group of the other rank too.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/base/check.h"

namespace simt::nccl {

inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxMessages = 1024;                // of a rank in a group
inline constexpr size_t kAreaBytes = size_t(256) << 20;  // per rank; uses memory only for touched pages

enum class Kind : int { all_reduce, reduce_scatter, all_gather, messages };
inline const char* name_of(Kind kind) {
    const char* const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                 "a group of ncclSend and ncclRecv"};
    return names[int(kind)];
}

inline size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclFloat64: return 8;
        case ncclFloat32:
        case ncclInt32: return 4;
        default: return 1;
    }
}

// The values that must be equal on all ranks.
struct Description {
    Kind kind = Kind::messages;
    ncclDataType_t type = ncclUint8;
    ncclRedOp_t reduction = ncclSum;
    size_t count = 0;
    bool operator==(const Description&) const = default;
    std::string text() const {
        return format("%s of %zu elements of type %d, reduction %d", name_of(kind), count, int(type), int(reduction));
    }
};

struct Message {
    bool is_send = false;
    int peer = 0;
    ncclDataType_t type = ncclUint8;
    size_t count = 0, offset = 0;  // of sent bytes in the sender's area
};

// The arguments of a rank's split, and the id of the part's communicator if it is the first rank of its part.
struct Split {
    int color, key;
    ncclUniqueId id;
    std::atomic<bool> has_id;
};

struct Slot {
    std::atomic<uint64_t> arrived, done;  // numbers of collectives
    std::atomic<uint64_t> splits;         // begun
    Split split[2];                       // the last ones: a rank is at most one split ahead of another
    std::atomic<bool> has_aborted;
    Description description;
    // By peer: the number of groups with messages from or to it in `message`, and of its groups that were read here.
    std::atomic<uint64_t> posted[kMaxRanks], taken[kMaxRanks];
    int messages;
    Message message[kMaxMessages];
};

struct Meeting {
    std::atomic<int> joined;
    Slot slots[kMaxRanks];
};
inline constexpr size_t kSlotsBytes = (sizeof(Meeting) + 4095) / 4096 * 4096;
inline constexpr size_t kSharedBytes = kSlotsBytes + kMaxRanks * kAreaBytes;

struct Operation {
    Description description;
    const char* from = nullptr;
    char* to = nullptr;
    size_t sent_bytes = 0, received_bytes = 0;
    std::vector<std::pair<Message, char*>> messages;  // of a group, with their memory on this rank
    uint64_t groups[kMaxRanks] = {};  // by rank: the number of this group among the groups with it, or 0
    bool is_read[kMaxRanks] = {};     // by rank: its part of the group
    cudaStream_t stream = nullptr;
    bool never_ends = false;
    uint64_t number = 0;
    bool has_arrived = false;
};

}  // namespace simt::nccl

struct ncclComm {
    simt::nccl::Meeting* meeting = nullptr;
    int rank = 0, size = 0;
    int polls = 0;  // remaining until the last call has been accepted
    bool is_joining = true, is_aborted = false, is_finalized = false;
    std::vector<simt::nccl::Operation> on_their_way;
    uint64_t collectives = 0, groups[simt::nccl::kMaxRanks] = {};  // groups: by rank that they have messages for
    ncclResult_t error = ncclSuccess, late_error = ncclSuccess, later_error = ncclSuccess;
    std::string last_words;
    ncclComm_t* part = nullptr;  // where a split that is in progress puts the part's communicator

    simt::nccl::Slot& slot(int of) const { return meeting->slots[of]; }
    char* area(int of) const {
        return reinterpret_cast<char*>(meeting) + simt::nccl::kSlotsBytes + size_t(of) * simt::nccl::kAreaBytes;
    }
    template <class Test> bool all(Test test) const {
        for (int i = 0; i < size; i++)
            if (!test(slot(i))) return false;
        return true;
    }
};

namespace simt::nccl {

// Whether all of its memory is valid device memory.
bool has_memory(const Operation& op);

// Whether the messages and bytes of a group fit into the memory that ranks share.
bool fits(const Operation& op);

// Numbers an operation that will be queued on its stream.
void number(ncclComm& comm, Operation& op);

// Advances the operation when its stream has reached it. False if it waits for another rank.
bool go_on(ncclComm& comm, Operation& op);

// Notes a fault with a text that ncclGetLastError() repeats; returns the code.
ncclResult_t refuse(ncclComm_t comm, ncclResult_t code, const std::string& words);

}  // namespace simt::nccl

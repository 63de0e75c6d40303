// Stand-in for NCCL: its calls up to the time when their operations are queued on a stream. Rank 0 creates an in-memory
// file, and the unique id identifies it. Calls stay in progress until they have been polled a few times; only then do
// they reach the stream.
#include "test/simt/nccl_stand_in.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>

#include "test/simt/nccl_operation.h"
#include "test/simt/streams.h"

using namespace simt::nccl;

namespace {

constexpr int kPolls = 3;  // how often a call is polled before it has been accepted
constexpr int kForEver = INT_MAX;

struct Library {
    simt::NcclPlan plan;
    std::string last_words;  // of a failure without a communicator
    int calls = 0;
    int group_depth = 0;
    ncclResult_t group_error = ncclSuccess;
    int group_polls = kPolls;
    std::vector<Operation> group;
    ncclComm_t group_comm = nullptr;
    std::vector<std::shared_ptr<ncclComm>> comms;
};

Library& library() {
    static Library instance = [] {
        Library made;
        char action[16] = "";
        if (const char* text = std::getenv("STAND_IN_NCCL");
            text && std::sscanf(text, "%15s %d %d", action, &made.plan.call, &made.plan.rank) == 3)
            made.plan.action = action;
        return made;
    }();
    return instance;
}

// Counts a call. Returns the action planned for it, or "". `rank` matters before the first communicator.
std::string planned(const char* name, int rank) {
    Library& all = library();
    if (!all.comms.empty()) rank = all.comms.front()->rank;
    if (++all.calls != all.plan.call || rank != all.plan.rank || all.plan.action.empty()) return "";
    all.plan.is_done = true;
    std::fprintf(stderr, "stand-in for NCCL: %s at call %d of rank %d, %s\n", all.plan.action.c_str(), all.calls, rank,
                 name);
    return all.plan.action;
}

ncclResult_t result_of(const std::string& action) {
    if (action == "fail") return ncclSystemError;
    if (action == "remote") return ncclRemoteError;
    if (action != "no_interface") return ncclSuccess;
    library().last_words = "Bootstrap : no socket interface found";
    return ncclInvalidUsage;
}

std::shared_ptr<ncclComm> shared(ncclComm_t comm) {
    for (const auto& known : library().comms)
        if (known.get() == comm) return known;
    return nullptr;
}

// ---- calls ----------------------------------------------------------------------------------------------------------

// The call has been accepted: its operations are queued on their streams.
void take_in(ncclComm_t comm) {
    comm->error = comm->error == ncclSuccess ? std::exchange(comm->late_error, ncclSuccess) : comm->error;
    for (Operation& op : comm->on_their_way) {
        number(*comm, op);
        simt::queue_poll(op.stream, [comm = shared(comm), op]() mutable { return go_on(*comm, op); });
    }
    comm->on_their_way.clear();
}

ncclResult_t enqueue(const char* call, ncclComm_t comm, Operation op) {
    Library& all = library();
    if (!shared(comm)) return refuse(nullptr, ncclInvalidArgument, std::string(call) + " of no communicator");
    const std::string action = planned(call, comm->rank);
    if (const ncclResult_t result = result_of(action); result != ncclSuccess) {
        if (all.group_depth) all.group_error = result;
        return result;
    }
    if (comm->polls || comm->is_joining || comm->is_finalized)
        return refuse(comm, ncclInvalidUsage, std::string(call) + " while another call was on its way");
    if (!has_memory(op)) return refuse(comm, ncclInvalidArgument, std::string(call) + " of what is not device memory");
    if (op.sent_bytes > kAreaBytes) return refuse(comm, ncclSystemError, "the stand-in takes 256 MiB at once");
    if (action == "mismatch") (op.messages.empty() ? op.description.count : op.messages[0].first.count)++;
    op.never_ends = action == "stall" || action == "break";
    if (action == "break") comm->later_error = ncclRemoteError;
    const int polls = action == "hang" ? kForEver : kPolls;
    if (action == "late") comm->late_error = ncclInternalError;
    if (!all.group_depth) {
        comm->polls = polls;
        comm->on_their_way.push_back(std::move(op));
        return ncclInProgress;
    }
    all.group_polls = std::max(all.group_polls, polls);
    all.group_comm = comm;
    if (!op.messages.empty() && !all.group.empty() && !all.group.back().messages.empty()) {
        all.group.back().messages.push_back(op.messages[0]);
        all.group.back().never_ends |= op.never_ends;
    } else {
        all.group.push_back(std::move(op));
    }
    return ncclSuccess;
}

ncclResult_t message(const char* call, bool is_send, void* memory, size_t count, ncclDataType_t type, int peer,
                     ncclComm_t comm, cudaStream_t stream) {
    Operation op;
    op.stream = stream;
    if (!comm || peer < 0 || peer >= comm->size) return refuse(comm, ncclInvalidArgument, "a message to no rank");
    op.messages.push_back({{is_send, peer, type, count, 0}, static_cast<char*>(memory)});
    return enqueue(call, comm, std::move(op));
}

// A rank sends `sent` times and receives `received` times `count` elements.
ncclResult_t collective(const Description& description, const void* from, void* to, int sent, int received,
                        ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = description.count * bytes_of(description.type);
    Operation op;
    op.description = description;
    op.from = static_cast<const char*>(from);
    op.to = static_cast<char*>(to);
    op.sent_bytes = size_t(sent) * bytes;
    op.received_bytes = size_t(received) * bytes;
    op.stream = stream;
    return enqueue(name_of(description.kind), comm, std::move(op));
}

int version_of_library() {
    const char* const other = std::getenv("STAND_IN_NCCL_VERSION");
    return other ? std::atoi(other) : 22809;
}

// Creates the memory of a communicator.
ncclResult_t make_id(ncclUniqueId& id) {
    const int file = memfd_create("stand-in for NCCL", 0);  // stays open: the other ranks open it through this process
    if (file < 0 || ftruncate(file, off_t(kSharedBytes))) return ncclSystemError;
    id = {};
    std::snprintf(id.internal, sizeof(id.internal), "/proc/%d/fd/%d", int(getpid()), file);
    return ncclSuccess;
}

// Returns a communicator that waits for the other ranks, or null.
ncclComm_t join(const ncclUniqueId& id, int rank, int ranks) {
    const int file = open(id.internal, O_RDWR);
    if (file < 0) return nullptr;
    void* memory = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    auto made = std::make_shared<ncclComm>();
    made->meeting = static_cast<Meeting*>(memory);
    made->rank = rank;
    made->size = ranks;
    made->polls = kPolls;
    made->meeting->joined++;
    library().comms.push_back(made);
    return made.get();
}

// Returns whether a split has ended: all ranks have begun it, and the first rank of this one's part has published an
// id.
bool has_split(ncclComm& comm) {
    const uint64_t number = comm.slot(comm.rank).splits;
    const auto split_of = [&](int rank) -> Split& { return comm.slot(rank).split[number % 2]; };
    if (!comm.all([&](const Slot& slot) { return slot.splits >= number; })) return false;
    Split& own = split_of(comm.rank);
    if (own.color == NCCL_SPLIT_NOCOLOR) {
        comm.part = nullptr;
        return true;
    }
    std::vector<std::pair<int, int>> members;  // keys and ranks
    for (int rank = 0; rank < comm.size; rank++)
        if (split_of(rank).color == own.color) members.emplace_back(split_of(rank).key, rank);
    std::ranges::sort(members);
    Split& first = split_of(members[0].second);
    if (&first == &own && !own.has_id) own.has_id = make_id(own.id) == ncclSuccess;
    if (!first.has_id) return false;
    const auto place = std::ranges::find(members, std::pair(own.key, comm.rank)) - members.begin();
    *std::exchange(comm.part, nullptr) = join(first.id, int(place), int(members.size()));
    return true;
}

}  // namespace

simt::NcclPlan& simt::nccl_plan() { return library().plan; }
int simt::nccl_calls() { return library().calls; }
int simt::nccl_comms() { return int(library().comms.size()); }

ncclResult_t ncclGetVersion(int* version) {
    *version = version_of_library();
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (const ncclResult_t result = result_of(planned("ncclGetUniqueId", 0)); result != ncclSuccess) return result;
    return make_id(*id);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    *comm = nullptr;
    const std::string action = planned("ncclCommInitRankConfig", rank);
    if (const ncclResult_t result = result_of(action); result != ncclSuccess) return result;
    if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks || config->magic != 0xcafebeef)
        return refuse(nullptr, ncclInvalidArgument, "a communicator with wrong ranks or settings");
    if (config->blocking != 0) return refuse(nullptr, ncclInvalidUsage, "a communicator that blocks has no deadline");
    *comm = join(id, rank, ranks);
    if (!*comm) return ncclSystemError;
    if (action == "hang" || action == "stall") (*comm)->polls = kForEver;
    if (action == "late") (*comm)->late_error = ncclInternalError;
    return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
    *part = nullptr;
    if (!shared(comm)) return refuse(nullptr, ncclInvalidArgument, "ncclCommSplit of no communicator");
    const std::string action = planned("ncclCommSplit", comm->rank);
    if (const ncclResult_t result = result_of(action); result != ncclSuccess) return result;
    if (version_of_library() < 21800) return refuse(comm, ncclInvalidUsage, "NCCL before 2.18 has no ncclCommSplit");
    if (color < NCCL_SPLIT_NOCOLOR) return refuse(comm, ncclInvalidArgument, "a negative color");
    if (config->blocking != 0) return refuse(comm, ncclInvalidUsage, "a communicator that blocks has no deadline");
    if (comm->polls || comm->is_joining || comm->is_finalized)
        return refuse(comm, ncclInvalidUsage, "ncclCommSplit while another call was on its way");
    Slot& slot = comm->slot(comm->rank);
    Split& split = slot.split[(slot.splits + 1) % 2];
    split.color = color, split.key = key, split.has_id = false;
    slot.splits++;
    comm->part = part;
    comm->polls = action == "hang" || action == "stall" ? kForEver : kPolls;
    if (action == "late") comm->late_error = ncclInternalError;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    if (!shared(comm)) return refuse(nullptr, ncclInvalidArgument, "ncclCommGetAsyncError of no communicator");
    *error = ncclInProgress;
    if (comm->is_joining && comm->meeting->joined < comm->size) return ncclSuccess;
    if (comm->polls == kForEver || (comm->polls > 1 && --comm->polls)) return ncclSuccess;
    if (comm->part && !has_split(*comm)) return ncclSuccess;
    comm->polls = 0;
    comm->is_joining = false;
    take_in(comm);
    *error = comm->error;
    if (*error == ncclSuccess) comm->error = std::exchange(comm->later_error, ncclSuccess);  // for the next call
    if (*error == ncclSuccess && !comm->all([](const Slot& slot) { return !slot.has_aborted; }))
        *error = ncclRemoteError;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const std::string action = planned("ncclCommFinalize", comm->rank);
    if (const ncclResult_t result = result_of(action); result != ncclSuccess) return result;
    if (comm->polls) return refuse(comm, ncclInvalidUsage, "ncclCommFinalize while another call was on its way");
    comm->is_finalized = true;
    comm->polls = action == "hang" || action == "stall" ? kForEver : kPolls;
    if (action == "late") comm->late_error = ncclInternalError;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const std::string action = planned("ncclCommDestroy", comm->rank);
    if (!comm->is_finalized || comm->polls)
        return refuse(comm, ncclInvalidUsage, "ncclCommDestroy before ncclCommFinalize has ended");
    std::erase_if(library().comms, [&](const auto& known) { return known.get() == comm; });
    return result_of(action);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!shared(comm)) return refuse(nullptr, ncclInvalidArgument, "ncclCommAbort of no communicator");
    if (library().group_depth) {  // printed, because callers ignore the return value
        std::fprintf(stderr, "stand-in for NCCL: ncclCommAbort in an open group\n");
        return refuse(comm, ncclInvalidUsage, "ncclCommAbort in an open group");
    }
    comm->is_aborted = true;
    comm->slot(comm->rank).has_aborted = true;
    std::erase_if(library().comms, [&](const auto& known) { return known.get() == comm; });
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    const char* const texts[] = {"no error",
                                 "unhandled cuda error",
                                 "unhandled system error",
                                 "internal error",
                                 "invalid argument",
                                 "invalid usage",
                                 "remote process exited or there was a network error",
                                 "NCCL operation in progress"};
    return texts[result];
}

const char* ncclGetLastError(ncclComm_t comm) {
    return comm && shared(comm) ? comm->last_words.c_str() : library().last_words.c_str();
}

ncclResult_t ncclGroupStart() {
    Library& all = library();
    if (const ncclResult_t result = result_of(planned("ncclGroupStart", 0)); result != ncclSuccess) return result;
    all.group_depth++;
    all.group_error = ncclSuccess;
    all.group_polls = kPolls;
    all.group.clear();
    all.group_comm = nullptr;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    Library& all = library();
    if (all.group_depth != 1) return refuse(nullptr, ncclInvalidUsage, "ncclGroupEnd without its start");
    all.group_depth = 0;
    const std::string action = planned("ncclGroupEnd", 0);
    if (const ncclResult_t result = result_of(action); result != ncclSuccess) return result;
    if (all.group_error != ncclSuccess || !all.group_comm) return all.group_error;
    all.group_comm->polls = action == "hang" ? kForEver : all.group_polls;
    if (action == "late") all.group_comm->late_error = ncclInternalError;
    for (Operation& op : all.group) {
        if (!fits(op))
            return refuse(all.group_comm, ncclSystemError, "the stand-in takes 1024 messages and 256 MiB in a group");
        op.never_ends |= action == "stall";
        all.group_comm->on_their_way.push_back(std::move(op));
    }
    return ncclInProgress;
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return message("ncclSend", true, const_cast<void*>(from), count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return message("ncclRecv", false, to, count, type, peer, comm, stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::all_reduce, type, op, count}, from, to, 1, 1, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::reduce_scatter, type, op, count}, from, to, comm ? comm->size : 1, 1, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({Kind::all_gather, type, ncclSum, count}, from, to, 1, comm ? comm->size : 1, comm, stream);
}

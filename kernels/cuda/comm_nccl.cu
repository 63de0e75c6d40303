// Collectives between GPUs with NCCL.
//
// Collectives run on a separate stream. Each one waits for an event recorded on the caller's stream at the call, and
// records an event when it finishes. The host blocks only if it needs a result, and then it polls. The communicator is
// non-blocking: after each call, the host polls its state until NCCL has accepted the call. So every wait has a
// deadline. Any failure aborts the communicator and its groups and becomes an error message.
#include <nccl.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "kernels/comm.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/startup.h"
#include "kernels/cuda/tree_sum.h"
#include "kernels/shared/collective.h"
#include "kernels/trace.h"

namespace {

// After kEvents later collectives, a wait uses the event of one of them. This is correct: they finish in order.
constexpr size_t kEvents = 256;
constexpr int kEagerPolls = 1000;
constexpr int kFirstWithSplit = 21800;  // NCCL 2.18.0
constexpr double kPartingSeconds = 60;  // deadline in close_comm(), when the hang detector no longer runs

Exit exit_of(ncclResult_t code) {
    switch (code) {
        case ncclRemoteError: return Exit::peer_lost;
        case ncclUnhandledCudaError:
        case ncclSystemError:
        case ncclInvalidUsage: return Exit::os;  // ncclInvalidUsage: the machine has no network interface
        default: return Exit::internal;
    }
}

// Returns NCCL's message for a failed call. If NCCL found no network interface, adds what to set; NCCL needs one even
// if all ranks are on one machine.
std::string nccl_words(ncclResult_t code, ncclComm_t comm) {
    const char* last = ncclGetLastError(comm);
    std::string words = ncclGetErrorString(code);
    if (last && *last) words += format(" (%s)", last);
    if (last && std::strstr(last, "no socket interface found"))
        words += "; set NCCL_SOCKET_IFNAME to the network interface to use, lo if all ranks are on this machine";
    return words;
}

// Returns 10,000 x major + 100 x minor + patch, or 0 if NCCL is not usable here.
int nccl_version() {
    int version = 0;
    return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

// An ncclUniqueId, in the form in which ranks send it to each other.
using IdBytes = std::array<char, NCCL_UNIQUE_ID_BYTES>;

// Returns a new id on `rank`, with which ranks can connect.
IdBytes new_id(int rank) {
    ncclUniqueId id;
    const ncclResult_t code = ncclGetUniqueId(&id);
    if (code != ncclSuccess)
        fail(exit_of(code), "rank %d: ncclGetUniqueId failed: %s", rank, nccl_words(code, nullptr));
    return std::to_array(id.internal);
}

class Nccl {
public:
    // Connects the ranks of `place`, or takes the communicator that connects them. `all`: the communicator that they
    // are a group of, or null.
    Nccl(const CommSettings& settings, const Comm& place, const IdBytes& bytes, Nccl* all, ncclComm_t part = nullptr)
        : settings_(settings), rank_(place.rank), size_(place.size), all_(all ? *all : *this), comm_(part) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        ncclUniqueId id;
        std::ranges::copy(bytes, id.internal);
        const char* const call = part ? "ncclCommSplit" : "ncclCommInitRankConfig";
        complete(part ? ncclInProgress : ncclCommInitRankConfig(&comm_, size_, id, rank_, &config), call);
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        called_ = make_event(cudaEventDisableTiming);
        for (Event& event : finished_) event = make_event(cudaEventDisableTiming);
        check_cuda(cudaMalloc(&device_, sizeof(int)), "cudaMalloc");
        check_cuda(cudaMallocHost(&pinned_, sizeof(int)), "pinning host memory");
    }

    // Also runs after a failure, when every CUDA call may fail, so it ignores errors.
    ~Nccl() {
        groups_.clear();
        abort_own();
        cudaFree(device_);
        cudaFreeHost(pinned_);
        cudaStreamDestroy(stream_);
    }
    Nccl(const Nccl&) = delete;
    Nccl& operator=(const Nccl&) = delete;

    // Runs `calls`, which send `bytes` bytes, on our stream, after the work now queued on the caller's stream.
    template <class Calls> Ticket enqueue(const char* name, double bytes, Stream stream, Calls calls) {
        begin(name);
        check_cuda(cudaEventRecord(called_.get(), cuda_stream(stream)), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(stream_, called_.get(), 0), "cudaStreamWaitEvent");
        record(trace_, {.lane = Lane::communication, .name = name, .bytes = bytes}, {stream_},
               [&] { calls(comm_, stream_); });
        return end();
    }

    int all_reduce_max(int value) {
        begin("all_reduce_max");
        *pinned_ = value;
        check_cuda(cudaMemcpyAsync(device_, pinned_, sizeof(int), cudaMemcpyHostToDevice, stream_), "copy to the GPU");
        complete(ncclAllReduce(device_, device_, 1, ncclInt32, ncclMax, comm_, stream_), "ncclAllReduce");
        check_cuda(cudaMemcpyAsync(pinned_, device_, sizeof(int), cudaMemcpyDeviceToHost, stream_),
                   "copy from the GPU");
        end();
        wait_on_host(settings_.deadline_s);
        return *pinned_;
    }

    // Waits until NCCL has accepted the call. Before that, neither the communicator nor the stream may be used.
    void complete(ncclResult_t code, const char* call) { complete(code, call, settings_.deadline_s); }

    // Makes the calls of `calls` in a group, in which no message waits for another. It reports each result to its
    // argument, note(result, name).
    template <class Calls> void group(Calls calls) {
        ncclResult_t failure = ncclSuccess;
        const char* failed = nullptr;
        auto note = [&](ncclResult_t code, const char* call) {
            if (code != ncclSuccess && code != ncclInProgress && !failed) failure = code, failed = call;
        };
        complete(ncclGroupStart(), "ncclGroupStart");
        calls(note);
        // Required even after a failure: an open group would block ncclCommAbort().
        const ncclResult_t ended = ncclGroupEnd();
        complete(failed ? failure : ended, failed ? failed : "ncclGroupEnd");
    }

    // Sends all pieces to their owners and sums them here, because NCCL's order depends on its version and the network,
    // and it rounds a sum of 16-bit numbers at each addition.
    void reduce_scatter_as_tree(const ReduceScatter& op) {
        const View others(op.scratch, op.inp.dtype);
        const size_t rank = size_t(rank_), size = size_t(size_), bytes = op.count * size_of(op.inp.dtype);
        group([&](auto note) {
            for (size_t peer = 0; peer < size; peer++) {
                if (peer == rank) continue;
                const size_t piece = peer * op.count;
                note(ncclSend(op.inp.from(piece).data, bytes, ncclUint8, int(peer), comm_, stream_), "ncclSend");
                note(ncclRecv(others.from(piece).data, bytes, ncclUint8, int(peer), comm_, stream_), "ncclRecv");
            }
        });
        tree_sum({.out = op.out,
                  .own = op.inp.from(rank * op.count),
                  .others = others,
                  .own_part = rank_,
                  .parts = size_,
                  .count = op.count},
                 {stream_});
    }

    // NCCL carries out a pair's messages in the order of the calls, a rank's messages to itself too.
    void exchange_messages(const Exchange& op) {
        group([&](auto note) {
            for (const Exchange::Message& message : op.send)
                note(ncclSend(message.data, message.bytes, ncclUint8, message.rank, comm_, stream_), "ncclSend");
            for (const Exchange::Message& message : op.receive)
                note(ncclRecv(message.data, message.bytes, ncclUint8, message.rank, comm_, stream_), "ncclRecv");
        });
    }

    void let_wait(Ticket ticket, Stream stream) {
        stream_waits_.start(stream);
        record(trace_, {.lane = Lane::device, .name = "wait"}, stream, [&] {
            check_cuda(cudaStreamWaitEvent(cuda_stream(stream), finished_[ticket.number % kEvents].get(), 0),
                       "cudaStreamWaitEvent");
        });
        stream_waits_.stop(stream);
    }

    void observe(Trace* trace) { trace_ = trace; }

    CommTotals totals() {
        totals_.waited_ms += stream_waits_.take_ms();
        return totals_;
    }
    void count_sent(size_t bytes) { totals_.bytes_sent += bytes; }

    void drain() noexcept {
        try {
            if (comm_ && asked_ > 0) wait_on_host(settings_.deadline_s);
        } catch (const std::exception&) {
            abort();  // ignored: an earlier or later error is reported
        }
    }

    // Without ncclCommSplit(), the first rank of each group creates the id of its communicator.
    Comm split(int color, int key) {
        require(!is_group(), "split: a group cannot be split");
        std::vector<std::array<int, 2>> members;  // of this rank's group: keys and ranks
        const std::vector<std::string> places = settings_.gather(format("%d %d", color, key));
        for (size_t rank = 0; rank < places.size(); rank++) {
            int its_color = 0, its_key = 0;
            std::istringstream(places[rank]) >> its_color >> its_key;
            if (its_color == color) members.push_back({its_key, int(rank)});
        }
        std::ranges::sort(members);
        const auto mine = std::ranges::find(members, settings_.rank, [](const auto& member) { return member[1]; });
        Comm group{int(mine - members.begin()), int(members.size())};
        IdBytes id{};
        ncclComm_t part = nullptr;
        if (nccl_version() >= kFirstWithSplit) {
            ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
            config.blocking = 0;
            name_ = "split";
            complete(ncclCommSplit(comm_, group.size > 1 ? color : NCCL_SPLIT_NOCOLOR, key, &part, &config),
                     "ncclCommSplit");
        } else {
            if (group.rank == 0 && group.size > 1) id = new_id(settings_.rank);
            const std::vector<std::string> ids = settings_.gather({id.begin(), id.end()});
            std::ranges::copy(ids[size_t(members[0][1])], id.begin());
        }
        if (group.size == 1) return comm_single();
        group.handle = groups_.emplace_back(std::make_unique<Nccl>(settings_, group, id, this, part)).get();
        return group;
    }

    void finalize() {
        for (const auto& group : groups_) group->finalize();
        if (!comm_) return;
        name_ = "leaving";
        const double limit_s = std::min(settings_.deadline_s, kPartingSeconds);
        if (asked_ > 0) wait_on_host(limit_s);
        complete(ncclCommFinalize(comm_), "ncclCommFinalize", limit_s);
        const ncclResult_t code = ncclCommDestroy(std::exchange(comm_, nullptr));
        if (code != ncclSuccess && code != ncclInProgress) report(code, "ncclCommDestroy");
    }

    bool is_deterministic() const { return settings_.deterministic; }
    bool is_group() const { return &all_ != this; }

private:
    void begin(const char* name) {
        if (!comm_)
            fail(Exit::peer_lost, "rank %d: %s called after the communicator was aborted", settings_.rank, name);
        name_ = name;
        asked_++;
        settings_.note(number_ = ++all_.collectives_, name);
    }

    Ticket end() {
        check_cuda(cudaEventRecord(finished_[asked_ % kEvents].get(), stream_), "cudaEventRecord");
        return {asked_};
    }

    // Waits until the last started collective has finished.
    void wait_on_host(double limit_s) {
        const double start_ms = steady_ms();
        auto has_ended = [&] {
            if (has_happened(finished_[asked_ % kEvents].get(), name_)) return true;
            const ncclResult_t code = async_error();
            if (code != ncclSuccess && code != ncclInProgress) report(code, "NCCL's work on the GPU");
            return false;
        };
        if (!wait_until(limit_s, has_ended)) report_hang("it", limit_s);
        const double end_ms = steady_ms();
        totals_.waited_ms += end_ms - start_ms;
        if (trace_)
            trace_->add(
                {.lane = Lane::host, .name = std::string("wait for ") + name_, .begin_ms = start_ms, .end_ms = end_ms});
    }

    template <class Condition> bool wait_until(double limit_s, const Condition& has_ended) {
        settings_.note_wait(true);
        const bool has_time = poll_until(limit_s, kEagerPolls, has_ended);
        settings_.note_wait(false);
        return has_time;
    }

    ncclResult_t async_error() {
        ncclResult_t state = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
        return asked == ncclSuccess ? state : asked;
    }

    void complete(ncclResult_t code, const char* call, double limit_s) {
        auto is_accepted = [&] { return code != ncclInProgress || (code = async_error()) != ncclInProgress; };
        if (!wait_until(limit_s, is_accepted)) report_hang(call, limit_s);
        if (code != ncclSuccess) report(code, call);
    }

    [[noreturn]] void report(ncclResult_t code, const char* call) {
        const std::string words = nccl_words(code, comm_);
        abort();
        fail(exit_of(code), "rank %d: %s failed in %s (collective %llu): %s", settings_.rank, call, name_,
             static_cast<unsigned long long>(number_), words);
    }

    [[noreturn]] void report_hang(const char* call, double limit_s) {
        abort();
        fail(Exit::hang, "rank %d waited %.0f s for the other ranks in %s (collective %llu): %s did not finish",
             settings_.rank, limit_s, name_, static_cast<unsigned long long>(number_), call);
    }

    // Removes hanging collectives of all groups from the GPU: the program ends. Ignores errors, because an earlier
    // error is already reported.
    void abort() noexcept {
        for (const auto& group : all_.groups_) group->abort_own();
        all_.abort_own();
        abort_own();  // this may be a group that is not yet among them
    }
    void abort_own() noexcept {
        if (comm_) ncclCommAbort(std::exchange(comm_, nullptr));
    }

    const CommSettings settings_;  // with the rank and the number of ranks of the run
    const int rank_, size_;
    Nccl& all_;  // the communicator that was split, or this one
    std::vector<std::unique_ptr<Nccl>> groups_;
    ncclComm_t comm_ = nullptr;  // null after an abort
    cudaStream_t stream_ = nullptr;
    Event called_;
    std::array<Event, kEvents> finished_;
    int *device_ = nullptr, *pinned_ = nullptr;  // staging for a value of the host
    uint64_t asked_ = 0;                         // collectives of this communicator
    uint64_t number_ = 0, collectives_ = 0;      // the last one's number and their count, over all groups
    CommTotals totals_;                          // excluding laps still in stream_waits_
    Stopwatch stream_waits_;
    Trace* trace_ = nullptr;
    const char* name_ = "join";  // of the last started collective
};

// Whether a reduce-scatter adds here as a tree, not in NCCL.
bool is_tree_sum(Dtype inp, Dtype out, bool deterministic) {
    return deterministic || inp != Dtype::fp32 || out != Dtype::fp32;
}

Nccl& nccl_of(const Comm& comm) { return *static_cast<Nccl*>(comm.handle); }

// ---- hosts and GPUs of the ranks ------------------------------------------------------------------------------------

// Information about a rank. All ranks receive all records before they connect.
struct RankInfo {
    std::string host, machine, gpu;  // machine: boot id, distinguishes hosts with the same name; gpu: PCI bus id
    std::string problem;             // why the rank has no GPU or no NCCL; or empty
    IdBytes id{};                    // rank 0's ncclUniqueId
};

// The form in which ranks send it to each other.
std::string text_of(const RankInfo& info) {
    return info.host + '\n' + info.machine + '\n' + info.gpu + '\n' + std::string(info.id.begin(), info.id.end()) +
           info.problem;
}
RankInfo info_from(const std::string& text) {
    RankInfo info;
    std::istringstream lines(text);
    for (std::string* const field : {&info.host, &info.machine, &info.gpu}) std::getline(lines, *field);
    lines.read(info.id.data(), std::ssize(info.id));
    info.problem.assign(std::istreambuf_iterator<char>(lines), {});
    return info;
}

// Selects this process's GPU and returns its PCI bus id.
std::string take_gpu(int local_rank) {
    select_gpu(local_rank);
    require_usable_device();
    return current_bus_id();
}

RankInfo rank_info(const CommSettings& settings) {
    RankInfo info;
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    info.host = host;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), info.machine);
    try {
        info.gpu = take_gpu(settings.local_rank);
    } catch (const Error& error) {
        info.problem = "has no GPU: " + std::string(error.what());
    }
    if (info.problem.empty() && !nccl_version())
        info.problem = std::string("cannot use NCCL: ") + ncclGetLastError(nullptr);
    if (settings.rank == 0 && info.problem.empty()) info.id = new_id(0);
    return info;
}

// Checks the records of all ranks. Fails with the same error on every rank.
void check_ranks(const std::vector<RankInfo>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        const RankInfo& info = ranks[rank];
        if (!info.problem.empty()) fail(Exit::os, "rank %zu on %s %s", rank, info.host, info.problem);
        for (size_t other = 0; other < rank; other++)
            if (ranks[other].machine == info.machine && ranks[other].host == info.host && ranks[other].gpu == info.gpu)
                fail(Exit::config,
                     "ranks %zu and %zu on %s have the same GPU (%s): start at most one rank per GPU on each host",
                     other, rank, info.host, info.gpu);
    }
}

}  // namespace

Comm open_comm(const CommSettings& settings) {
    if (settings.size == 1 && !settings.always) return comm_single();
    const std::string mine = text_of(rank_info(settings));
    std::vector<RankInfo> ranks;
    for (const std::string& text : settings.size == 1 ? std::vector{mine} : settings.gather(mine))
        ranks.push_back(info_from(text));
    check_ranks(ranks);
    Comm comm{settings.rank, settings.size};
    comm.handle = new Nccl(settings, comm, ranks[0].id, nullptr);
    return comm;
}

void close_comm(Comm& comm) {
    auto* const nccl = static_cast<Nccl*>(std::exchange(comm, comm_single()).handle);
    if (!nccl || nccl->is_group()) return;
    const std::unique_ptr<Nccl> owner(nccl);
    nccl->finalize();
}

Comm split(const Comm& comm, int color, int key) {
    return comm.size == 1 ? comm_single() : nccl_of(comm).split(color, key);
}

std::string comm_library() {
    const int version = nccl_version();
    const std::string mpi = launcher_library();
    return (version ? format("NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100)
                    : format("NCCL, not usable here: %s", ncclGetLastError(nullptr))) +
           ", started by any launcher" + (mpi.empty() ? "" : "; " + mpi + " for mpirun");
}

std::string comm_launcher() { return {}; }

bool comm_needs_gather() { return true; }

void wait(Ticket ticket, const Comm& comm, Stream stream) {
    if (comm.handle && ticket.number > 0) nccl_of(comm).let_wait(ticket, stream);
}

void observe(const Comm& comm, Trace* trace) {
    if (comm.handle) nccl_of(comm).observe(trace);
}

void drain(const Comm& comm) noexcept {
    if (comm.handle) nccl_of(comm).drain();
}

Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream stream) {
    if (!comm.handle) return {};
    Nccl& nccl = nccl_of(comm);
    return nccl.enqueue(
        "all_reduce_sum", all_reduce_bytes(count, comm.size), stream, [&](ncclComm_t handle, cudaStream_t ours) {
            nccl.complete(ncclAllReduce(values, values, count, ncclFloat64, ncclSum, handle, ours), "ncclAllReduce");
        });
}

size_t reduce_scatter_scratch_bytes(Dtype inp, size_t count, int size, bool deterministic, Dtype out) {
    return size > 1 && is_tree_sum(inp, out, deterministic) ? count * size_t(size) * size_of(inp) : 0;
}

Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm& comm, Stream stream) {
    if (!comm.handle) return reduce_scatter_alone(op);
    require_summable(op, comm);
    Nccl& nccl = nccl_of(comm);
    const size_t sent = size_t(comm.size - 1) * op.count * size_of(op.inp.dtype);
    nccl.count_sent(sent);
    return nccl.enqueue("reduce_scatter_sum", double(sent), stream, [&](ncclComm_t handle, cudaStream_t ours) {
        if (is_tree_sum(op.inp.dtype, op.out.dtype, nccl.is_deterministic()))
            nccl.reduce_scatter_as_tree(op);
        else
            nccl.complete(ncclReduceScatter(op.inp.data, op.out.data, op.count, ncclFloat32, ncclSum, handle, ours),
                          "ncclReduceScatter");
    });
}

Ticket all_gather(void* out, const void* inp, size_t bytes, const Comm& comm, Stream stream) {
    if (!comm.handle) return finished_in_place(out, inp, "all_gather");
    Nccl& nccl = nccl_of(comm);
    const size_t sent = size_t(comm.size - 1) * bytes;
    nccl.count_sent(sent);
    return nccl.enqueue("all_gather", double(sent), stream, [&](ncclComm_t handle, cudaStream_t ours) {
        nccl.complete(ncclAllGather(inp, out, bytes, ncclUint8, handle, ours), "ncclAllGather");
    });
}

Ticket exchange(const Exchange& op, const Comm& comm, Stream stream) {
    if (!comm.handle) return exchange_alone(op, stream);
    Nccl& nccl = nccl_of(comm);
    const size_t sent = checked_bytes(op, comm);
    nccl.count_sent(sent);
    return nccl.enqueue("exchange", double(sent), stream,
                        [&](ncclComm_t, cudaStream_t) { nccl.exchange_messages(op); });
}

int all_reduce_max(int value, const Comm& comm) { return comm.handle ? nccl_of(comm).all_reduce_max(value) : value; }

CommTotals comm_totals(const Comm& comm) { return comm.handle ? nccl_of(comm).totals() : CommTotals(); }

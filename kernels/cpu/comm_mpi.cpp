// Collectives between CPU ranks with MPI.
//
// A separate thread makes all MPI calls. It completes each communicator's requests one at a time, in order, by polling,
// and different communicators concurrently. So collectives make progress while other threads compute, and two groups
// cannot wait for each other. Sums are computed here and not by MPI, because an MPI library's order of addition depends
// on its version and the message size: each rank receives all pieces of its share and adds them in the order of a tree.
#include <algorithm>
#include <climits>
#include <condition_variable>
#include <deque>
#include <exception>
#include <optional>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/comm.h"
#include "kernels/cpu/tree_sum.h"
#include "kernels/ranks/mpi_text.h"
#include "kernels/shared/collective.h"
#include "kernels/trace.h"

namespace {

int checked_count(size_t count, const char* what) {
    if (count > size_t(INT_MAX))
        fail(Exit::config, "%s with %zu elements per rank; MPI supports at most %d", what, count, INT_MAX);
    return int(count);
}

// A request to the communication thread: `begin` starts `operations` MPI operations on the communicator and returns
// MPI's error code, `finish` runs after their completion.
struct Request {
    const char* name;
    std::function<int(MPI_Comm, MPI_Request*)> begin;
    std::function<void()> finish = nullptr;
    double bytes = 0;  // sent by this rank
    size_t operations = 1;
    // Called for each operation that ends, with its number and MPI's error code.
    std::function<void(size_t, int, const MPI_Status&)> check = nullptr;
    uint64_t number = 0;  // among this process's collectives

    // Of a request in progress
    std::vector<MPI_Request> mpi = {};
    double begin_ms = 0;
};

// Messages are sent in parts, because MPI counts bytes as int. The last part of a message is shorter than kPartBytes,
// if necessary empty, so that messages of different sizes differ in a part that both ranks have.
constexpr size_t kPartBytes = size_t(64) << 20;
constexpr uint64_t kTags = 32768;  // every MPI library has as many

struct Part {
    int rank, bytes;
    std::byte* data;
    size_t begin, size;  // in the message, of the message
};

std::vector<Part> parts_of(const std::vector<Exchange::Message>& messages) {
    std::vector<Part> parts;
    for (const Exchange::Message& message : messages)
        for (size_t begin = 0; begin <= message.bytes; begin += kPartBytes)
            parts.push_back({message.rank, int(std::min(kPartBytes, message.bytes - begin)),
                             static_cast<std::byte*>(message.data) + begin, begin, message.bytes});
    return parts;
}

// Fails unless an ended receive operation has filled the part.
void check_received(const Part& part, int rank, int code, const MPI_Status& status) {
    int error = MPI_SUCCESS, received = 0;
    MPI_Error_class(code, &error);
    if (code == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &received);
    if (error == MPI_ERR_TRUNCATE || (code == MPI_SUCCESS && received != part.bytes))
        fail(Exit::internal, "exchange: rank %d expects %zu bytes from rank %d, which sends %s", rank, part.size,
             part.rank, code == MPI_SUCCESS ? std::to_string(part.begin + size_t(received)) : "more");
}

class MpiThread;

// The requests of a communicator.
struct Queue {
    MpiThread& thread;
    MPI_Comm mpi;

    // Used only by the calling thread.
    uint64_t asked = 0, exchanges = 0;
    CommTotals totals = {};

    // Shared with the communication thread, guarded by its mutex.
    std::deque<Request> waiting = {};
    uint64_t finished = 0;
    Trace* trace = nullptr;

    // Used only by the communication thread.
    std::optional<Request> current = {};
};

class MpiThread {
public:
    explicit MpiThread(const CommSettings& settings) : settings_(settings) {
        queues_.push_back(std::make_unique<Queue>(*this, MPI_COMM_WORLD));
        thread_ = std::jthread([this] { run(); });
        wait(world(), push(world(), {"join", nullptr}));
    }

    // Does not finalize MPI after a failure, because that would wait for lost ranks.
    ~MpiThread() {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        changed_.notify_all();
    }

    Queue& world() { return *queues_[0]; }

    uint64_t enqueue(Queue& queue, Request request) {
        request.number = ++collectives_;
        settings_.note(request.number, request.name);
        return push(queue, std::move(request));
    }

    // Waits until this request and all earlier ones of the queue have finished. Rethrows the thread's error.
    void wait(Queue& queue, uint64_t number) {
        const double start_ms = steady_ms();
        std::unique_lock lock(mutex_);
        wait_until(lock, [&] { return queue.finished >= number || error_; });
        if (queue.finished < number) std::rethrow_exception(error_);
        const double end_ms = steady_ms();
        queue.totals.waited_ms += end_ms - start_ms;
        if (queue.trace)
            queue.trace->add({.lane = Lane::device, .name = "wait", .begin_ms = start_ms, .end_ms = end_ms});
    }

    void drain(Queue& queue) {
        std::unique_lock lock(mutex_);
        wait_until(lock, [&] { return queue.finished == queue.asked || error_; });
    }

    void observe(Queue& queue, Trace* trace) {
        const std::lock_guard lock(mutex_);
        queue.trace = trace;
    }

    Comm split(Queue& queue, int color, int key) {
        Comm group;
        // MPI_Comm_split() blocks, but not for long after the barrier.
        auto finish = [&] {
            MPI_Comm mpi = MPI_COMM_NULL;
            check_mpi(MPI_Comm_split(queue.mpi, color, key, &mpi), "MPI_Comm_split");
            check_mpi(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
            check_mpi(MPI_Comm_rank(mpi, &group.rank), "MPI_Comm_rank");
            check_mpi(MPI_Comm_size(mpi, &group.size), "MPI_Comm_size");
            if (group.size > 1) group.handle = queues_.emplace_back(std::make_unique<Queue>(*this, mpi)).get();
        };
        wait(queue, enqueue(queue, {"split", MPI_Ibarrier, finish}));
        return group;
    }

private:
    template <class Condition> void wait_until(std::unique_lock<std::mutex>& lock, const Condition& has_ended) {
        settings_.note_wait(true);
        changed_.wait(lock, has_ended);
        settings_.note_wait(false);
    }

    uint64_t push(Queue& queue, Request request) {
        const std::lock_guard lock(mutex_);
        queue.waiting.push_back(std::move(request));
        changed_.notify_all();
        return ++queue.asked;
    }

    void run() {
        try {
            join();
            constexpr int kEagerPolls = 100;
            for (int polls = 0; take_requests(); polls++) {
                for (size_t i = 0; i < queues_.size(); i++)  // a split adds queues
                    if (advance(*queues_[i])) polls = 0;
                pause_after(polls, kEagerPolls);
            }
            check_mpi(MPI_Finalize(), "MPI_Finalize");
        } catch (...) {
            const std::lock_guard lock(mutex_);
            error_ = std::current_exception();
            changed_.notify_all();
        }
    }

    void join() {
        int provided = 0, rank = 0, size = 0;
        const MPI_Comm comm = world().mpi;
        check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
        check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
        check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
        if (rank != settings_.rank || size != settings_.size)
            fail(Exit::config,
                 "this process is rank %d of %d, but MPI says rank %d of %d: start it with the mpirun of the MPI "
                 "library that it was built with (%s)",
                 settings_.rank, settings_.size, rank, size, comm_library());
    }

    // Takes the next request of each queue that has none in progress. Blocks if there is nothing to do. Returns false
    // if all requests have finished and there will be no others.
    bool take_requests() {
        std::unique_lock lock(mutex_);
        auto is_busy = [](const auto& queue) { return queue->current || !queue->waiting.empty(); };
        changed_.wait(lock, [&] { return stop_ || std::ranges::any_of(queues_, is_busy); });
        if (std::ranges::none_of(queues_, is_busy)) return false;
        for (const auto& queue : queues_) {
            if (queue->current || queue->waiting.empty()) continue;
            queue->current = std::move(queue->waiting.front());
            queue->waiting.pop_front();
        }
        return true;
    }

    // Begins the queue's current request, or finishes it if its operations have ended. Returns false if there was
    // nothing to do.
    bool advance(Queue& queue) {
        if (!queue.current) return false;
        Request& request = *queue.current;
        if (request.begin_ms == 0) {
            request.begin_ms = steady_ms();
            if (request.begin) {
                request.mpi.assign(request.operations, MPI_REQUEST_NULL);
                check_mpi(request.begin(queue.mpi, request.mpi.data()), request.name);
            }
            return true;
        }
        if (!has_ended(request)) {
            if (steady_ms() - request.begin_ms >= 1000 * settings_.deadline_s)
                fail(Exit::hang, "rank %d waited %.0f s for the other ranks in %s (collective %llu)", settings_.rank,
                     settings_.deadline_s, request.name, static_cast<unsigned long long>(request.number));
            return false;
        }
        if (request.finish) request.finish();
        const std::lock_guard lock(mutex_);
        if (queue.trace)
            queue.trace->add({.lane = Lane::communication,
                              .name = request.name,
                              .bytes = request.bytes,
                              .begin_ms = request.begin_ms,
                              .end_ms = steady_ms()});
        queue.current.reset();
        queue.finished++;
        changed_.notify_all();
        return true;
    }

    // Tests each operation on its own: a message of the wrong size is reported while others are missing.
    static bool has_ended(Request& request) {
        size_t pending = 0;
        for (size_t i = 0; i < request.mpi.size(); i++) {
            if (request.mpi[i] == MPI_REQUEST_NULL) continue;
            int done = 0;
            MPI_Status status;
            const int code = MPI_Test(&request.mpi[i], &done, &status);
            if (request.check && (done || code != MPI_SUCCESS)) request.check(i, code, status);
            check_mpi(code, request.name);
            pending += !done;
        }
        return pending == 0;
    }

    const CommSettings settings_;
    uint64_t collectives_ = 0;  // started; used only by the calling thread

    std::mutex mutex_;
    std::condition_variable changed_;
    bool stop_ = false;         // guarded by the mutex
    std::exception_ptr error_;  // guarded by the mutex
    // The first is the communicator of all ranks. Only the communication thread adds others, and uses them.
    std::vector<std::unique_ptr<Queue>> queues_;

    std::jthread thread_;  // last member, so that it is joined before the members that it uses are destroyed
};

Queue& queue_of(const Comm& comm) { return *static_cast<Queue*>(comm.handle); }
MpiThread& thread_of(const Comm& comm) { return queue_of(comm).thread; }

Ticket enqueue(const Comm& comm, Request request) {
    return {thread_of(comm).enqueue(queue_of(comm), std::move(request))};
}

}  // namespace

Comm open_comm(const CommSettings& settings) {
    if (settings.size == 1) return comm_single();
    auto* const thread = new MpiThread(settings);
    return {settings.rank, settings.size, &thread->world()};
}

void close_comm(Comm& comm) {
    if (comm.size > 1 && &queue_of(comm) == &thread_of(comm).world()) delete &thread_of(comm);
    comm = comm_single();
}

Comm split(const Comm& comm, int color, int key) {
    return comm.size == 1 ? comm_single() : thread_of(comm).split(queue_of(comm), color, key);
}

std::string comm_library() { return mpi_library(); }

std::string comm_launcher() { return "mpirun"; }

bool comm_needs_gather() { return false; }

void wait(Ticket ticket, const Comm& comm, Stream) {
    if (comm.size > 1 && ticket.number > 0) thread_of(comm).wait(queue_of(comm), ticket.number);
}

void observe(const Comm& comm, Trace* trace) {
    if (comm.size > 1) thread_of(comm).observe(queue_of(comm), trace);
}

void drain(const Comm& comm) noexcept {
    if (comm.size > 1) thread_of(comm).drain(queue_of(comm));
}

Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream) {
    if (comm.size == 1) return {};
    const int elements = checked_count(count, "all_reduce_sum");
    auto begin = [=](MPI_Comm mpi, MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, values, elements, MPI_DOUBLE, MPI_SUM, mpi, request);
    };
    return enqueue(comm, {"all_reduce_sum", begin, nullptr, all_reduce_bytes(count, comm.size)});
}

size_t reduce_scatter_scratch_bytes(Dtype inp, size_t count, int size, bool, Dtype) {
    return size == 1 ? 0 : count * size_t(size) * size_of(inp);
}

Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm& comm, Stream) {
    if (comm.size == 1) return reduce_scatter_alone(op);
    require_summable(op, comm);
    const int elements = checked_count(op.count, "reduce_scatter_sum");
    const size_t sent = size_t(comm.size - 1) * op.count * size_of(op.inp.dtype);
    queue_of(comm).totals.bytes_sent += sent;
    // MPI does not interpret the elements: only the size of their type matters.
    const MPI_Datatype type = op.inp.dtype == Dtype::fp32 ? MPI_FLOAT : MPI_UINT16_T;
    auto begin = [=](MPI_Comm mpi, MPI_Request* request) {
        return MPI_Ialltoall(op.inp.data, elements, type, op.scratch, elements, type, mpi, request);
    };
    auto finish = [op, size = comm.size] { tree_sum(op.out, {op.scratch, op.inp.dtype}, op.count, size, op.count); };
    return enqueue(comm, {"reduce_scatter_sum", begin, finish, double(sent)});
}

Ticket all_gather(void* out, const void* inp, size_t bytes, const Comm& comm, Stream) {
    if (comm.size == 1) return finished_in_place(out, inp, "all_gather");
    const int count = checked_count(bytes, "all_gather");
    const bool in_place = inp == static_cast<const std::byte*>(out) + size_t(comm.rank) * bytes;
    const size_t sent = size_t(comm.size - 1) * bytes;
    queue_of(comm).totals.bytes_sent += sent;
    auto begin = [=](MPI_Comm mpi, MPI_Request* request) {
        return MPI_Iallgather(in_place ? MPI_IN_PLACE : inp, count, MPI_BYTE, out, count, MPI_BYTE, mpi, request);
    };
    return enqueue(comm, {"all_gather", begin, nullptr, double(sent)});
}

Ticket exchange(const Exchange& op, const Comm& comm, Stream stream) {
    if (comm.size == 1) return exchange_alone(op, stream);
    Queue& queue = queue_of(comm);
    const size_t sent = checked_bytes(op, comm);
    queue.totals.bytes_sent += sent;
    std::vector<Part> receive = parts_of(op.receive), send = parts_of(op.send);
    const size_t operations = receive.size() + send.size();
    auto check = [receive, rank = comm.rank](size_t i, int code, const MPI_Status& status) {
        if (i < receive.size()) check_received(receive[i], rank, code, status);
    };
    // MPI keeps the order of a pair's messages. A separate tag keeps a surplus message out of the next exchange.
    const int tag = int(queue.exchanges++ % kTags);
    auto begin = [receive = std::move(receive), send = std::move(send), tag](MPI_Comm mpi, MPI_Request* request) {
        int code = MPI_SUCCESS;
        for (const Part& part : receive)
            if (code == MPI_SUCCESS) code = MPI_Irecv(part.data, part.bytes, MPI_BYTE, part.rank, tag, mpi, request++);
        for (const Part& part : send)
            if (code == MPI_SUCCESS) code = MPI_Isend(part.data, part.bytes, MPI_BYTE, part.rank, tag, mpi, request++);
        return code;
    };
    return enqueue(comm, {"exchange", begin, nullptr, double(sent), operations, check});
}

int all_reduce_max(int value, const Comm& comm) {
    if (comm.size == 1) return value;
    auto begin = [&value](MPI_Comm mpi, MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, mpi, request);
    };
    wait(enqueue(comm, {"all_reduce_max", begin}), comm, Stream());
    return value;
}

std::function<std::string(const std::string& mine)> launcher_share(const Comm& comm) {
    return [comm](const std::string& mine) {
        return share_text(mine, [&](void* data, size_t bytes) {
            const int count = checked_count(bytes, "broadcast");
            auto begin = [=](MPI_Comm mpi, MPI_Request* request) {
                return MPI_Ibcast(data, count, MPI_BYTE, 0, mpi, request);
            };
            wait(enqueue(comm, {"broadcast", begin}), comm, Stream());
        });
    };
}

CommTotals comm_totals(const Comm& comm) { return comm.size == 1 ? CommTotals() : queue_of(comm).totals; }

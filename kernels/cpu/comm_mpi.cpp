// Collectives between CPU ranks with MPI.
//
// A separate thread makes all MPI calls. It completes the requests one at a time, in order, by polling. So collectives
// make progress while other threads compute, and have the same order on every rank. Sums are computed here and not by
// MPI, because an MPI library's order of addition depends on its version and the message size: each rank receives all
// pieces of its share and adds them in the order of a tree.
#include <algorithm>
#include <climits>
#include <condition_variable>
#include <deque>
#include <exception>
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

// A request to the communication thread: `begin` starts `operations` MPI operations and returns MPI's error code,
// `finish` runs after their completion.
struct Request {
    const char* name;
    std::function<int(MPI_Request*)> begin;
    std::function<void()> finish;
    double bytes = 0;  // sent by this rank
    size_t operations = 1;
    // Called for each operation that ends, with its number and MPI's error code.
    std::function<void(size_t, int, const MPI_Status&)> check = nullptr;
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

class Queue {
public:
    explicit Queue(const CommSettings& settings) : settings_(settings) {
        thread_ = std::jthread([this] { run(); });
        wait(push({"join", nullptr, nullptr}));
    }

    // Does not finalize MPI after a failure, because that would wait for lost ranks.
    ~Queue() {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        changed_.notify_all();
    }

    uint64_t enqueue(Request request) {
        settings_.note(asked_ + 1, request.name);
        return push(std::move(request));
    }

    void enqueue_and_wait(Request request) { wait(enqueue(std::move(request))); }

    // Waits until this request and all earlier ones have finished. Rethrows the thread's error.
    void wait(uint64_t number) {
        const double start_ms = steady_ms();
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return finished_ >= number || error_; });
        if (finished_ < number) std::rethrow_exception(error_);
        const double end_ms = steady_ms();
        totals.waited_ms += end_ms - start_ms;
        if (trace_) trace_->add({.lane = Lane::device, .name = "wait", .begin_ms = start_ms, .end_ms = end_ms});
    }

    void drain() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return finished_ == asked_ || error_; });
    }

    void observe(Trace* trace) {
        const std::lock_guard lock(mutex_);
        trace_ = trace;
    }

    // Used only by the calling thread.
    CommTotals totals;
    uint64_t exchanges = 0;

private:
    uint64_t push(Request request) {
        const std::lock_guard lock(mutex_);
        waiting_.push_back(std::move(request));
        changed_.notify_all();
        return ++asked_;
    }

    void run() {
        try {
            join();
            Request request;
            while (next(request)) {
                const double start_ms = steady_ms();
                carry_out(request);
                const std::lock_guard lock(mutex_);
                if (trace_)
                    trace_->add({.lane = Lane::communication,
                                 .name = request.name,
                                 .bytes = request.bytes,
                                 .begin_ms = start_ms,
                                 .end_ms = steady_ms()});
                finished_++;
                changed_.notify_all();
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
        check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init");
        check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
        check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
        if (rank != settings_.rank || size != settings_.size)
            fail(Exit::config,
                 "this process is rank %d of %d, but MPI says rank %d of %d: start it with the mpirun of the MPI "
                 "library that it was built with (%s)",
                 settings_.rank, settings_.size, rank, size, comm_library());
    }

    // Waits for a request. Returns false if the queue is empty and stopped.
    bool next(Request& request) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
        if (waiting_.empty()) return false;
        request = std::move(waiting_.front());
        waiting_.pop_front();
        return true;
    }

    void carry_out(const Request& request) {
        if (!request.begin) return;
        std::vector<MPI_Request> mpi(request.operations, MPI_REQUEST_NULL);
        check_mpi(request.begin(mpi.data()), request.name);
        constexpr int kEagerPolls = 100;
        // Each operation is tested on its own: a message of the wrong size is reported while others are missing.
        auto is_done = [&] {
            size_t pending = 0;
            for (size_t i = 0; i < mpi.size(); i++) {
                if (mpi[i] == MPI_REQUEST_NULL) continue;
                int done = 0;
                MPI_Status status;
                const int code = MPI_Test(&mpi[i], &done, &status);
                if (request.check && (done || code != MPI_SUCCESS)) request.check(i, code, status);
                check_mpi(code, request.name);
                pending += !done;
            }
            return pending == 0;
        };
        if (!poll_until(settings_.deadline_s, kEagerPolls, is_done))
            fail(Exit::hang, "rank %d waited %.0f s for the other ranks in %s (collective %llu)", settings_.rank,
                 settings_.deadline_s, request.name, static_cast<unsigned long long>(finished_ + 1));
        if (request.finish) request.finish();
    }

    const CommSettings settings_;
    uint64_t asked_ = 0;  // used only by the calling thread

    // Shared with the communication thread, guarded by the mutex.
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Request> waiting_;
    uint64_t finished_ = 0;
    bool stop_ = false;
    std::exception_ptr error_;
    Trace* trace_ = nullptr;

    std::jthread thread_;  // last member, so that it is joined before the members that it uses are destroyed
};

Queue& queue_of(const Comm& comm) { return *static_cast<Queue*>(comm.handle); }

}  // namespace

Comm open_comm(const CommSettings& settings) {
    if (settings.size == 1) return comm_single();
    return {settings.rank, settings.size, new Queue(settings)};
}

void close_comm(Comm& comm) {
    delete static_cast<Queue*>(comm.handle);
    comm = comm_single();
}

std::string comm_library() { return mpi_library(); }

std::string comm_launcher() { return "mpirun"; }

bool comm_needs_gather() { return false; }

void wait(Ticket ticket, const Comm& comm, Stream) {
    if (comm.size > 1 && ticket.number > 0) queue_of(comm).wait(ticket.number);
}

void observe(const Comm& comm, Trace* trace) {
    if (comm.size > 1) queue_of(comm).observe(trace);
}

void drain(const Comm& comm) noexcept {
    if (comm.size > 1) queue_of(comm).drain();
}

Ticket all_reduce_sum(double* values, size_t count, const Comm& comm, Stream) {
    if (comm.size == 1) return {};
    const int elements = checked_count(count, "all_reduce_sum");
    auto begin = [=](MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, values, elements, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, request);
    };
    return {queue_of(comm).enqueue({"all_reduce_sum", begin, nullptr, all_reduce_bytes(count, comm.size)})};
}

size_t reduce_scatter_scratch_bytes(size_t count, int size, bool) {
    return size == 1 ? 0 : count * size_t(size) * sizeof(float);
}

Ticket reduce_scatter_sum(const ReduceScatter& op, const Comm& comm, Stream) {
    if (comm.size == 1) return finished_in_place(op.out, op.inp, "reduce_scatter_sum");
    const int elements = checked_count(op.count, "reduce_scatter_sum");
    const size_t sent = size_t(comm.size - 1) * op.count * sizeof(float);
    queue_of(comm).totals.bytes_sent += sent;
    auto begin = [=](MPI_Request* request) {
        return MPI_Ialltoall(op.inp, elements, MPI_FLOAT, op.scratch, elements, MPI_FLOAT, MPI_COMM_WORLD, request);
    };
    auto finish = [op, size = comm.size] {
        tree_sum(op.out, static_cast<const float*>(op.scratch), op.count, size, op.count);
    };
    return {queue_of(comm).enqueue({"reduce_scatter_sum", begin, finish, double(sent)})};
}

Ticket all_gather(void* out, const void* inp, size_t bytes, const Comm& comm, Stream) {
    if (comm.size == 1) return finished_in_place(out, inp, "all_gather");
    const int count = checked_count(bytes, "all_gather");
    const bool in_place = inp == static_cast<const std::byte*>(out) + size_t(comm.rank) * bytes;
    const size_t sent = size_t(comm.size - 1) * bytes;
    queue_of(comm).totals.bytes_sent += sent;
    auto begin = [=](MPI_Request* request) {
        return MPI_Iallgather(in_place ? MPI_IN_PLACE : inp, count, MPI_BYTE, out, count, MPI_BYTE, MPI_COMM_WORLD,
                              request);
    };
    return {queue_of(comm).enqueue({"all_gather", begin, nullptr, double(sent)})};
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
    auto begin = [receive = std::move(receive), send = std::move(send), tag](MPI_Request* request) {
        int code = MPI_SUCCESS;
        for (const Part& part : receive)
            if (code == MPI_SUCCESS)
                code = MPI_Irecv(part.data, part.bytes, MPI_BYTE, part.rank, tag, MPI_COMM_WORLD, request++);
        for (const Part& part : send)
            if (code == MPI_SUCCESS)
                code = MPI_Isend(part.data, part.bytes, MPI_BYTE, part.rank, tag, MPI_COMM_WORLD, request++);
        return code;
    };
    return {queue.enqueue({"exchange", begin, nullptr, double(sent), operations, check})};
}

int all_reduce_max(int value, const Comm& comm) {
    if (comm.size == 1) return value;
    auto begin = [&value](MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, request);
    };
    queue_of(comm).enqueue_and_wait({"all_reduce_max", begin, nullptr});
    return value;
}

std::function<std::string(const std::string& mine)> launcher_share(const Comm& comm) {
    return [comm](const std::string& mine) {
        return share_text(mine, [&](void* data, size_t bytes) {
            const int count = checked_count(bytes, "broadcast");
            auto begin = [=](MPI_Request* request) {
                return MPI_Ibcast(data, count, MPI_BYTE, 0, MPI_COMM_WORLD, request);
            };
            queue_of(comm).enqueue_and_wait({"broadcast", begin, nullptr});
        });
    };
}

CommTotals comm_totals(const Comm& comm) { return comm.size == 1 ? CommTotals() : queue_of(comm).totals; }

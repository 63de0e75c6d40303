#include "kernels/cpu/pool.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <strings.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/base/check.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr size_t kCacheLine = 64;

// Time that a thread spins before it sleeps. A step has more than a hundred loops with microseconds between them, and
// waking up takes tens of microseconds, so a thread with a dedicated core rarely sleeps between loops. A longer wait
// means that the other thread lost its core to another program; then it helps to yield this core. With OpenMP's
// OMP_WAIT_POLICY=passive, threads do not spin.
microseconds time_to_spin() {
    const char* const policy = std::getenv("OMP_WAIT_POLICY");
    return microseconds(policy && strcasecmp(policy, "passive") == 0 ? 0 : 1000);
}

// The indices of a part that no thread has taken.
struct alignas(kCacheLine) Part {
    std::atomic<size_t> next;
    size_t end;
};

// Returns the OpenMP place (a set of cores) for thread `id` of `threads`, or -1 if threads are not bound. OpenMP has
// bound the calling thread to the first place, and new threads would inherit it.
int place_of(int id, int threads) {
    const int places = omp_get_num_places();
    if (places == 0 || omp_get_proc_bind() == omp_proc_bind_false) return -1;
    const bool is_spread = threads > places || omp_get_proc_bind() == omp_proc_bind_spread;
    return (std::max(0, omp_get_place_num()) + (is_spread ? int(int64_t(id) * places / threads) : id)) % places;
}

// Binds the calling thread. If the system call fails, the thread keeps its affinity, as in OpenMP.
void bind_to_place(int place) {
    std::vector<int> cores(size_t(omp_get_place_num_procs(place)));
    omp_get_place_proc_ids(place, cores.data());
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core : cores) CPU_SET(size_t(core), &set);
    sched_setaffinity(0, sizeof(set), &set);
}

struct Task {
    Loop loop;
    void (*run)(void*, size_t, size_t);
    void* context;
};

class Pool {
public:
    // Only one loop at a time uses the pool. Not a mutex, because a nested loop tries it on the owning thread.
    bool try_claim() { return !is_claimed_.exchange(true, std::memory_order_acquire); }
    void release() { is_claimed_.store(false, std::memory_order_release); }

    void run(const Task& task, int threads) {
        start_threads(threads);
        task_ = task;
        threads_ = threads;
        n_parts_ = task.loop.in_order ? 1 : size_t(threads);
        const size_t share = task.loop.n / n_parts_, left = task.loop.n % n_parts_;  // the first `left` get one more
        for (size_t i = 0, begin = 0; i < n_parts_; begin = parts_[i++].end) {
            parts_[i].next.store(begin, std::memory_order_relaxed);
            parts_[i].end = begin + share + (i < left);
        }
        gate_ = kOpen;
        loops_++;
        loops_.notify_all();
        take_grains(0);
        if (gate_.fetch_and(~kOpen) != kOpen) wait_for_threads_inside();
    }

private:
    // Bits of the gate: threads may enter the loop; the caller sleeps; the count of threads inside.
    static constexpr uint32_t kOpen = 1, kCallerSleeps = 2, kInside = 4;

    void start_threads(int threads) {
        if (threads <= started_) return;
        parts_ = std::make_unique<Part[]>(size_t(threads));  // no other thread is inside a loop
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are handled by other threads
        int error = 0;
        while (started_ < threads && !error) {
            try {
                const int id = started_, place = place_of(id, threads);
                std::thread([this, id, place] {
                    if (place >= 0) bind_to_place(place);
                    serve(id);
                }).detach();
                started_++;
            } catch (const std::system_error& failure) {
                error = failure.code().value();
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error)
            fail(Exit::os, "cannot start thread %d of %d: %s", started_ + 1, threads,
                 std::generic_category().message(error));
    }

    [[noreturn]] void serve(int id) {
        for (uint32_t last = 0;;) {
            if (!spin_until([&] { return loops_ != last; })) loops_.wait(last);
            last = loops_;
            if (!enter()) continue;
            if (id < threads_) take_grains(id);
            leave();
        }
    }

    bool enter() {
        uint32_t gate = gate_;
        while (gate & kOpen)
            if (gate_.compare_exchange_weak(gate, gate + kInside)) return true;
        return false;
    }

    void leave() {
        if (gate_.fetch_sub(kInside) == kInside + kCallerSleeps) gate_.notify_one();
    }

    void wait_for_threads_inside() {
        if (spin_until([&] { return gate_ < kInside; })) return;
        uint32_t gate = gate_.fetch_or(kCallerSleeps) | kCallerSleeps;
        while (gate >= kInside) {
            gate_.wait(gate);
            gate = gate_;
        }
    }

    void take_grains(int id) {
        const size_t grain = task_.loop.grain;
        for (size_t i = 0; i < n_parts_; i++) {
            Part& part = parts_[(size_t(id) + i) % n_parts_];
            while (part.next.load(std::memory_order_relaxed) < part.end) {
                const size_t begin = part.next.fetch_add(grain, std::memory_order_relaxed);
                if (begin < part.end) task_.run(task_.context, begin, std::min(part.end, begin + grain));
            }
        }
    }

    // Returns false if the condition still does not hold and the thread should sleep. Reading the clock is the pause
    // between checks.
    template <class Condition> bool spin_until(const Condition& holds) {
        for (const Clock::time_point end = Clock::now() + spin_; Clock::now() < end;)
            if (holds()) return true;
        return false;
    }

    const microseconds spin_ = time_to_spin();

    // Written by the caller before it opens the gate; read by threads that have entered.
    Task task_{};
    int threads_ = 1;  // that share the loop
    std::unique_ptr<Part[]> parts_;
    size_t n_parts_ = 0;
    int started_ = 1;  // threads, including the caller

    alignas(kCacheLine) std::atomic<uint32_t> loops_ = 0;  // number of loops started; threads wait for it to change
    alignas(kCacheLine) std::atomic<uint32_t> gate_ = 0;
    alignas(kCacheLine) std::atomic<bool> is_claimed_ = false;
};

// Never destroyed, because its threads wait on it until the process ends.
Pool& pool() {
    static Pool& pool = *new Pool;
    return pool;
}

}  // namespace

int loop_threads() { return std::max(1, omp_get_max_threads()); }

void run_loop(const Loop& loop, void (*run)(void*, size_t, size_t), void* context) {
    if (loop.n == 0) return;
    const int threads = loop_threads();
    if (threads == 1 || !pool().try_claim()) {
        run(context, 0, loop.n);
        return;
    }
    struct Release {
        ~Release() { pool().release(); }
    } release;
    if (loop.n > loop.grain)
        pool().run({loop, run, context}, threads);
    else
        run(context, 0, loop.n);
}

#include "kernels/cpu/pool.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/check.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr size_t kCacheLine = 64;

// How long a thread spins before it sleeps. A step is a hundred loops and more, with microseconds between them, and it
// takes tens of microseconds to wake up: on cores of its own, a thread that waits for the next loop hardly ever sleeps.
// Where cores are shared, it gives up its own as soon as another thread is likely to have lost its.
constexpr microseconds kSpin{1000}, kSpinOnSharedCores{20};
constexpr microseconds kShared{20'000};  // how long cores count as shared after a thread has lost one

// Notices that other programs run on the cores: then threads of this process lose theirs before they wait for anything.
class SharedCores {
public:
    bool seen(Clock::time_point now) {
        if (now.time_since_epoch() < until_.load(std::memory_order_relaxed)) return true;
        rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        if (lost_.exchange(usage.ru_nivcsw, std::memory_order_relaxed) == usage.ru_nivcsw) return false;
        until_.store(now.time_since_epoch() + kShared, std::memory_order_relaxed);
        return true;
    }

private:
    std::atomic<long> lost_ = 0;  // how often a thread of this process has lost its core
    std::atomic<Clock::duration> until_{};
};

// The indices of a part that no thread has taken yet.
struct alignas(kCacheLine) Part {
    std::atomic<size_t> next;
    size_t end;
};

// A place is a set of cores that OpenMP binds a thread to; it has bound the calling thread already.
class Places {
public:
    // Thread `id` of `threads` to its place; the thread that it runs on becomes that one.
    static int place_of(int id, int threads) {
        const int places = omp_get_num_places();
        if (places == 0 || omp_get_proc_bind() == omp_proc_bind_false) return kNone;
        const bool is_spread = threads > places || omp_get_proc_bind() == omp_proc_bind_spread;
        return (std::max(0, omp_get_place_num()) + (is_spread ? int(int64_t(id) * places / threads) : id)) % places;
    }

    static void bind_to(int place) {
        if (place == kNone) return;
        std::vector<int> cores(size_t(omp_get_place_num_procs(place)));
        omp_get_place_proc_ids(place, cores.data());
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int core : cores) CPU_SET(size_t(core), &set);
        sched_setaffinity(0, sizeof(set), &set);  // a wish, as with OpenMP
    }

private:
    static constexpr int kNone = -1;
};

class Pool {
public:
    // One loop at a time has the pool's threads. Not a mutex: a nested loop tries it on the thread that holds it.
    bool try_claim() { return !is_claimed_.exchange(true, std::memory_order_acquire); }
    void release() { is_claimed_.store(false, std::memory_order_release); }

    void run(const Loop& loop, int threads) {
        start_threads(threads);
        loop_ = loop;
        for (int i = 0; i < loop.parts; i++) {
            parts_[size_t(i)].next.store(loop.n * size_t(i) / size_t(loop.parts), std::memory_order_relaxed);
            parts_[size_t(i)].end = loop.n * size_t(i + 1) / size_t(loop.parts);
        }
        threads_ = threads;
        gate_.store(kOpen, std::memory_order_release);
        loops_.fetch_add(1, std::memory_order_release);
        loops_.notify_all();
        take_chunks(0);
        if (gate_.fetch_and(~kOpen, std::memory_order_acq_rel) != kOpen) wait_for_threads_inside();
    }

private:
    // The gate: whether threads may enter the loop, whether the caller sleeps, and how many threads are inside.
    static constexpr uint32_t kOpen = 1, kCallerSleeps = 2, kInside = 4;

    void start_threads(int threads) {
        if (threads <= started_) return;
        // No thread is inside a loop: the parts may move.
        if (threads > int(n_parts_)) {
            parts_ = std::make_unique<Part[]>(size_t(threads));
            n_parts_ = size_t(threads);
        }
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that expect them
        int error = 0;
        while (started_ < threads && !error) {
            try {
                const int id = started_, place = Places::place_of(id, threads);
                std::thread([this, id, place] { Places::bind_to(place), serve(id); }).detach();
                started_++;
            } catch (const std::system_error& failure) {
                error = failure.code().value();
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error)
            fail(Exit::os, "cannot start thread %d of %d: %s", started_ + 1, threads,
                 std::generic_category().message(error).c_str());
    }

    [[noreturn]] void serve(int id) {
        for (uint32_t last = 0;;) {
            const auto has_begun = [&] { return loops_.load(std::memory_order_acquire) != last; };
            if (!spin_until(has_begun)) loops_.wait(last, std::memory_order_acquire);
            last = loops_.load(std::memory_order_acquire);
            if (!enter()) continue;
            if (id < threads_) take_chunks(id);
            leave();
        }
    }

    bool enter() {
        uint32_t gate = gate_.load(std::memory_order_relaxed);
        while (gate & kOpen)
            if (gate_.compare_exchange_weak(gate, gate + kInside, std::memory_order_acquire)) return true;
        return false;
    }

    void leave() {
        if (gate_.fetch_sub(kInside, std::memory_order_acq_rel) == kInside + kCallerSleeps) gate_.notify_one();
    }

    void wait_for_threads_inside() {
        const auto are_gone = [&] { return gate_.load(std::memory_order_acquire) < kInside; };
        if (spin_until(are_gone)) return;
        uint32_t gate = gate_.fetch_or(kCallerSleeps, std::memory_order_acq_rel) | kCallerSleeps;
        while (gate >= kInside) {
            gate_.wait(gate, std::memory_order_acquire);
            gate = gate_.load(std::memory_order_acquire);
        }
    }

    void take_chunks(int id) {
        for (int i = 0; i < loop_.parts; i++) {
            Part& part = parts_[size_t(id + i) % size_t(loop_.parts)];
            while (part.next.load(std::memory_order_relaxed) < part.end) {
                const size_t begin = part.next.fetch_add(loop_.chunk, std::memory_order_relaxed);
                if (begin < part.end) loop_.run(loop_.body, begin, std::min(part.end, begin + loop_.chunk));
            }
        }
    }

    // False: the condition does not hold yet, and it is better to sleep. Reading the clock is the pause of this loop.
    template <class Condition> bool spin_until(const Condition& holds) {
        const Clock::time_point begin = Clock::now();
        Clock::time_point look = begin + kSpinOnSharedCores;
        for (;;) {
            if (holds()) return true;
            const Clock::time_point now = Clock::now();
            if (now < look) continue;
            if (now >= begin + kSpin || shared_cores_.seen(now)) return false;
            look = now + kSpinOnSharedCores;
        }
    }

    // Written by the caller before it opens the gate, read by threads that have entered.
    Loop loop_{};
    int threads_ = 1;  // that share it
    std::unique_ptr<Part[]> parts_;
    size_t n_parts_ = 0;
    int started_ = 1;  // threads, the caller included

    alignas(kCacheLine) std::atomic<uint32_t> loops_ = 0;  // that have begun: what threads wait for
    alignas(kCacheLine) std::atomic<uint32_t> gate_ = 0;
    alignas(kCacheLine) std::atomic<bool> is_claimed_ = false;
    SharedCores shared_cores_;
};

// Never destroyed: its threads wait in it until the process has ended.
Pool& pool() {
    static Pool& pool = *new Pool;
    return pool;
}

}  // namespace

int loop_threads() { return std::max(1, omp_get_max_threads()); }

void run_loop(const Loop& loop) {
    if (loop.n == 0) return;
    const int threads = loop_threads();
    if (threads == 1 || !pool().try_claim()) {
        loop.run(loop.body, 0, loop.n);
        return;
    }
    struct Release {
        ~Release() { pool().release(); }
    } release;
    if (loop.n > loop.chunk)
        pool().run(loop, threads);
    else
        loop.run(loop.body, 0, loop.n);
}

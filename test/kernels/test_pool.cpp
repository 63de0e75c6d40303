// The thread pool of parallel_for and parallel_blocks. No result depends on the machine's speed: a thread that must
// wait for another waits up to a minute, and then a check fails.
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "test/support/catch.h"

namespace {

class Threads {
public:
    explicit Threads(int count) { omp_set_num_threads(count); }
    ~Threads() { omp_set_num_threads(before_); }

private:
    int before_ = omp_get_max_threads();
};

// How often each index ran. Not atomic: the tests also check that run_loop orders its threads' writes.
using Counts = std::vector<int>;

bool all_are(const Counts& counts, int expected) {
    for (int count : counts)
        if (count != expected) return false;
    return true;
}

template <class Condition> bool holds_within_a_minute(const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::yield();
    }
    return true;
}

// Runs loops until a thread other than the caller has taken part in one.
bool another_thread_helps() {
    const auto caller = std::this_thread::get_id();
    std::atomic<bool> helped = false;
    const auto one_loop = [&] {
        run_loop({.n = 4, .grain = 1, .in_order = true}, [&](size_t, size_t) {
            if (std::this_thread::get_id() != caller) helped = true;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
        return bool(helped);
    };
    return holds_within_a_minute(one_loop);
}

}  // namespace

TEST_CASE("a loop runs each index once, on no more threads than OpenMP has", "[cpu]") {
    for (int threads : {8, 1, 2, 5, 3}) {
        const Threads set(threads);
        CHECK(loop_threads() == threads);
        for (size_t n : {0, 1, 2, 3, 7, 8, 9, 63, 1000, 4097})
            for (size_t grain : {1, 3, 64, 10000})
                for (bool in_order : {false, true}) {
                    INFO(threads << " threads, n " << n << ", grain " << grain << ", in order " << in_order);
                    Counts counts(n);
                    std::vector<std::thread::id> ran_on(n);
                    std::atomic<bool> is_too_long = false;
                    run_loop({.n = n, .grain = grain, .in_order = in_order}, [&](size_t begin, size_t end) {
                        if (threads > 1 && n > grain && end - begin > grain) is_too_long = true;
                        for (size_t i = begin; i < end; i++) counts[i]++, ran_on[i] = std::this_thread::get_id();
                    });
                    CHECK(all_are(counts, 1));
                    CHECK(!is_too_long);
                    CHECK(std::set(ran_on.begin(), ran_on.end()).size() <= size_t(threads));
                }
    }
}

TEST_CASE("parallel_for and parallel_blocks cover their ranges", "[cpu]") {
    for (int threads : {1, 2, 8}) {
        const Threads set(threads);
        for (size_t n : {0, 1, 5, 100, 1001}) {
            Counts counts(n);
            parallel_for(n, [&](size_t i) { counts[i]++; });
            CHECK(all_are(counts, 1));
            for (size_t block : {1, 7, 1000}) {
                std::atomic<size_t> wrong = 0;
                parallel_blocks(n, block, [&](size_t begin, size_t end) {
                    if (begin % block || end != std::min(n, begin + block)) wrong++;
                    for (size_t i = begin; i < end; i++) counts[i]++;
                });
                CHECK(wrong == 0);
            }
            CHECK(all_are(counts, 4));
        }
    }
}

TEST_CASE("a loop within a loop runs on the thread that calls it", "[cpu]") {
    const Threads set(4);
    std::atomic<int> elsewhere = 0, runs = 0;
    parallel_blocks(20, 1, [&](size_t, size_t) {
        const auto caller = std::this_thread::get_id();
        parallel_for(50, [&](size_t) {
            runs++;
            if (std::this_thread::get_id() != caller) elsewhere++;
        });
    });
    CHECK(runs == 20 * 50);
    CHECK(elsewhere == 0);
}

// A thread that loses its core delays only the indices that it has taken.
TEST_CASE("a thread that is stuck delays a loop by no more than its own grain", "[cpu]") {
    const Threads set(2);
    for (bool in_order : {false, true}) {
        constexpr size_t kN = 1000, kGrain = 10;
        const auto caller = std::this_thread::get_id();
        std::atomic<bool> is_stuck = false, waited_in_vain = false;
        std::atomic<size_t> others = 0;
        run_loop({.n = kN, .grain = kGrain, .in_order = in_order}, [&](size_t begin, size_t end) {
            const bool is_caller = std::this_thread::get_id() == caller;
            // The caller waits for the other thread to take a grain; that thread then waits for the rest of the loop.
            const bool got_it = is_caller
                                    ? holds_within_a_minute([&] { return bool(is_stuck); })
                                    : (is_stuck = true, holds_within_a_minute([&] { return others == kN - kGrain; }));
            if (!got_it) waited_in_vain = true;
            if (is_caller) others += end - begin;
        });
        INFO("in order " << in_order);
        CHECK(is_stuck);
        CHECK(!waited_in_vain);
    }
}

TEST_CASE("a loop returns after its last grain, even if the caller has to sleep until then", "[cpu]") {
    const Threads set(2);
    const auto caller = std::this_thread::get_id();
    Counts counts(2);
    std::atomic<bool> is_taken = false;
    run_loop({.n = 2, .grain = 1, .in_order = true}, [&](size_t i, size_t) {
        if (std::this_thread::get_id() == caller)
            holds_within_a_minute([&] { return bool(is_taken); });
        else
            is_taken = true, std::this_thread::sleep_for(std::chrono::milliseconds(100));
        counts[i]++;
    });
    CHECK(all_are(counts, 1));
}

TEST_CASE("threads that sleep are woken up by the next loop", "[cpu]") {
    const Threads set(2);
    for (int i = 0; i < 3; i++) {
        REQUIRE(another_thread_helps());
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

TEST_CASE("loops that two threads start at the same time do not affect each other", "[cpu]") {
    std::atomic<int> wrong = 0;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 2; caller++)
        callers.emplace_back([&] {
            for (int i = 0; i < 300; i++) {
                Counts counts(100);
                parallel_for(100, [&](size_t k) { counts[k]++; });
                parallel_blocks(100, 3, [&](size_t begin, size_t end) {
                    for (size_t k = begin; k < end; k++) counts[k]++;
                });
                if (!all_are(counts, 2)) wrong++;
            }
        });
    for (std::thread& caller : callers) caller.join();
    CHECK(wrong == 0);
}

TEST_CASE("many more threads than cores run thousands of short loops", "[cpu]") {
    const Threads set(4 * int(std::thread::hardware_concurrency()) + 1);
    Counts counts(64);
    for (int i = 0; i < 3000; i++) parallel_blocks(64, 1, [&](size_t k, size_t) { counts[k]++; });
    CHECK(all_are(counts, 3000));
}

// The child has none of the parent's threads. A loop that waited for one would hang.
TEST_CASE("loops run in a child process", "[cpu]") {
    const Threads set(3);
    REQUIRE(another_thread_helps());
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        Counts counts(1000);
        parallel_for(1000, [&](size_t i) { counts[i]++; });
        parallel_blocks(1000, 10, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) counts[i]++;
        });
        _exit(all_are(counts, 2) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(another_thread_helps());
}

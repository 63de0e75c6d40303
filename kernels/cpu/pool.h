// The threads that share the loops of kernels/cpu/parallel.h, which is what the ops call.
//
// There are as many as omp_get_max_threads() says, the calling thread included. The first loop with work for them
// starts them, and they stay until the process ends. A thread that waits spins for a moment, then sleeps: spinning uses
// up the time that the scheduler grants it, and it lacks this time for work where other programs run on the same cores.
//
// Indices are handed out in grains to the threads that are running. So a thread that has lost its core delays a loop by
// its current grain, and a thread that has not woken up in time delays nothing.
//
// After fork(), the child's loops run on its one thread. Threads are bound to places if OpenMP binds its threads
// (OMP_PROC_BIND, OMP_PLACES).
#pragma once

#include <cstddef>
#include <type_traits>

// A loop over [0, n) whose indices may run on any thread and in any order.
struct Loop {
    size_t n;
    size_t grain;   // indices that a thread takes at a time, at least 1
    bool in_order;  // threads take grains from the front of [0, n); else thread i of k begins with the i-th k-th of it
};

// Calls run(context, begin, end) for grains [begin, end) that make up [0, n), and returns when all have been run. A
// loop within a loop, and one that begins while another thread's runs, has the calling thread alone. `run` must not
// throw. Fails with Exit::os, before anything has run, if a thread cannot be started.
void run_loop(const Loop& loop, void (*run)(void*, size_t, size_t), void* context);

// The same for a function object that is called with (begin, end).
template <class Run> void run_loop(const Loop& loop, Run&& run) {
    using Object = std::remove_reference_t<Run>;
    run_loop(
        loop, [](void* context, size_t begin, size_t end) { (*static_cast<Object*>(context))(begin, end); }, &run);
}

// How many threads share a loop that begins now: at least 1.
int loop_threads();

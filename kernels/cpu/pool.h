// The thread pool of the loops in kernels/cpu/parallel.h. Ops call parallel.h, not this header.
//
// The pool has omp_get_max_threads() threads, including the calling thread. The first loop that needs them starts them,
// and they stay until the process ends. A waiting thread spins briefly, then sleeps: if other programs run on the same
// cores, spinning would use up the thread's scheduler time.
//
// Running threads take the indices in grains. So a thread that loses its core delays a loop by at most its current
// grain, and a thread that wakes up late delays nothing.
//
// After fork(), loops of the child run on its only thread. Threads are bound to places if OpenMP binds its threads
// (OMP_PROC_BIND, OMP_PLACES).
#pragma once

#include <cstddef>
#include <type_traits>

// A loop over [0, n). Any thread may run any index, in any order.
struct Loop {
    size_t n;
    size_t grain;   // indices that a thread takes at a time, at least 1
    bool in_order;  // take grains from the front of [0, n); otherwise thread i of k starts in part i of k equal parts
};

// Calls run(context, begin, end) for grains [begin, end) that cover [0, n), and returns after the last one. A nested
// loop, or a loop started during another thread's loop, runs only on the calling thread. `run` must not throw. Fails
// with Exit::os, before any call, if a thread cannot be started.
void run_loop(const Loop& loop, void (*run)(void*, size_t, size_t), void* context);

// The same for a function object with arguments (begin, end).
template <class Run> void run_loop(const Loop& loop, Run&& run) {
    using Object = std::remove_reference_t<Run>;
    run_loop(
        loop, [](void* context, size_t begin, size_t end) { (*static_cast<Object*>(context))(begin, end); }, &run);
}

// Returns the number of threads for a loop that starts now, at least 1.
int loop_threads();

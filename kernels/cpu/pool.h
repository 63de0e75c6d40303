// The threads that share the loops of kernels/cpu/parallel.h; the callers of that header do not need this one.
//
// As many as omp_get_max_threads() says, the calling thread included; the others are started by the first loop that has
// work for them and wait for the next one for the rest of the process. Waiting spins for a moment, then sleeps: a
// thread that spins uses up the time that the scheduler has for it, and then lacks it for work when other programs want
// the cores, too. Indices are handed out in chunks, to whichever thread is there. So a thread that has lost its core
// delays a loop by the chunk that it has in hand, and one that has not woken up in time is not waited for.
//
// After a fork() loops of the child run on its one thread. Threads are bound to places where OpenMP binds its threads
// (OMP_PROC_BIND, OMP_PLACES).
#pragma once

#include <cstddef>

// A loop over [0, n) whose indices may run on any thread and in any order. `run` does those in [begin, end).
struct Loop {
    size_t n;
    size_t chunk;  // indices that a thread takes at a time, at least 1
    // 1: all threads take their chunks from the front of [0, n). More: [0, n) is cut into so many parts of equal size;
    // thread i begins with part i, and helps with the others when its own is done.
    int parts;
    void (*run)(void* body, size_t begin, size_t end);
    void* body;
};

// Returns when all indices have run. Within a loop of this process, and next to one that another thread has begun, the
// calling thread runs them alone. Fails with Exit::os if a thread cannot be started.
void run_loop(const Loop& loop);

// How many threads a loop that begins now would have: at least 1.
int loop_threads();

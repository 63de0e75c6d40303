// Parallel loops whose results do not depend on the number of threads.
//
// The split into pieces depends only on the sizes. Any thread may run any piece, so a body must not write data that
// another piece reads or writes. Sums over pieces must be computed afterwards, in the order of the pieces. Bodies must
// not throw. A nested loop runs only on the calling thread.
//
// The loops use the thread pool of kernels/cpu/pool.h, with omp_get_max_threads() threads.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "kernels/cpu/pool.h"

// Calls body(i) for every i in [0, n). For many equal and cheap pieces. Each thread runs a contiguous range of i, the
// same in every loop with the same n, unless another thread lost its core and needs help.
template <class Body> void parallel_for(size_t n, Body&& body) {
    constexpr size_t kGrains = 8;  // per thread; other threads can take the ones that it has not started
    const size_t grain = n / (kGrains * size_t(loop_threads())) + 1;
    run_loop({.n = n, .grain = grain, .in_order = false}, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) body(i);
    });
}

// Calls body(begin, end) for blocks of `block` elements of [0, n); the last block may be shorter. Idle threads take the
// blocks in order. For pieces of unequal cost; large equal blocks cost no more than with a fixed assignment.
template <class Body> void parallel_blocks(size_t n, size_t block, Body&& body) {
    const size_t n_blocks = (n + block - 1) / block;
    run_loop({.n = n_blocks, .grain = 1, .in_order = true}, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) body(i * block, std::min(n, (i + 1) * block));
    });
}

// Returns memory of the calling thread, aligned to 64 bytes, with undefined content. It grows to the largest request
// and is kept, so the steady state allocates nothing. The next call on the same thread returns the same memory. So only
// one user at a time is allowed, and the content is valid only during the piece of work that requested it.
inline std::byte* thread_memory(size_t bytes) {
    static constexpr std::align_val_t kAlignment{64};
    struct Release {
        void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
    };
    thread_local std::unique_ptr<std::byte, Release> memory;
    thread_local size_t capacity = 0;
    if (bytes > capacity) {
        memory.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
        capacity = bytes;
    }
    return memory.get();
}

// The same for `count` elements.
template <class T> T* thread_scratch(size_t count) { return reinterpret_cast<T*>(thread_memory(count * sizeof(T))); }

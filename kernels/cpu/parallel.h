// Loops over threads whose results cannot depend on how many threads there are.
//
// How the work is cut depends on the sizes alone; which thread does a piece is unspecified. So a body must write
// nothing that another piece reads or writes, and a sum across pieces is made afterwards, in the order of the pieces.
// Bodies must not throw. Called from within a parallel loop these run on the calling thread alone.
//
// The threads are those of kernels/cpu/pool.h, as many as omp_get_max_threads() says.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "kernels/cpu/pool.h"

// body(i) for every i in [0, n): for many equal and cheap pieces. A thread runs a contiguous range of i, the same one
// in each loop over as many pieces, unless another thread has lost its core and is behind.
template <class Body> void parallel_for(size_t n, Body&& body) {
    constexpr size_t kGrains = 8;  // of a thread: what others can still take when it is behind
    const size_t grain = n / (kGrains * size_t(loop_threads())) + 1;
    run_loop({.n = n, .grain = grain, .in_order = false}, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) body(i);
    });
}

// body(begin, end) for [0, n) cut into blocks of `block` elements, the last one shorter. Threads take blocks in order,
// as they become free: for pieces of unequal cost. With large equal blocks this costs nothing over a fixed assignment.
template <class Body> void parallel_blocks(size_t n, size_t block, Body&& body) {
    const size_t n_blocks = (n + block - 1) / block;
    run_loop({.n = n_blocks, .grain = 1, .in_order = true}, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) body(i * block, std::min(n, (i + 1) * block));
    });
}

// Memory of the calling thread, 64-byte aligned, any content. It is kept and grows to the largest request, so the
// steady state allocates nothing. The next call on the same thread returns the same memory: one user at a time, and its
// content is valid only during the piece of work that requested it.
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

// The same, as room for `count` elements.
template <class T> T* thread_scratch(size_t count) { return reinterpret_cast<T*>(thread_memory(count * sizeof(T))); }

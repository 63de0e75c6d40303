// Loops over OpenMP threads whose results cannot depend on how many threads there are.
//
// The cutting of the work depends on the sizes alone; which thread does a piece is left open. So a body must write
// nothing that another piece reads or writes, and a sum across pieces is made afterwards, in the order of the pieces.
// Bodies must not throw. Called from within a parallel loop these run on the calling thread alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

// body(i) for every i in [0, n), contiguous ranges of i to each thread: for many equal and cheap pieces.
template <class Body> void parallel_for(size_t n, Body&& body) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) body(i);
}

// body(begin, end) for [0, n) cut into blocks of `block` elements, the last one shorter. Threads take blocks in order,
// as they become free: for pieces of unequal cost. With large equal blocks this costs nothing over a fixed assignment.
template <class Body> void parallel_blocks(size_t n, size_t block, Body&& body) {
    const size_t n_blocks = (n + block - 1) / block;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < n_blocks; i++) body(i * block, std::min(n, (i + 1) * block));
}

// Memory of the calling thread, 64-byte aligned, any content. It is kept and grows to the largest request, so the
// steady state allocates nothing. The next call on the same thread hands out the same memory: one user at a time, and
// nothing in it outlives the piece of work that asked for it.
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

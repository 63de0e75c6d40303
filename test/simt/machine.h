// The simulated streaming multiprocessor: CUDA threads are fibers, one cluster of blocks is resident at a time.
//
// Threads run until they wait. The default order is adversarial: the last warp first, each warp as far as possible;
// with a seed, warps and lanes are chosen at random. Each CUDA thread has two orders in the race detector: the generic
// one, and the one of its asynchronous units (TMA, wgmma); only fence.proxy.async carries the first into the second.
#pragma once

#include <functional>

#include "kernels/base/check.h"
#include "test/simt/fault.h"
#include "test/simt/options.h"
#include "test/simt/sanitizers.h"
#include "test/simt/vector_types.h"

namespace simt {

// Limits of a block on sm_90.
inline constexpr int kMaxThreads = 1024, kMaxCluster = 8, kNamedBarriers = 16;

// A shared address is (rank in the cluster) << kRankShift | offset.
inline constexpr uint32_t kRankShift = 24, kOffsetMask = (1u << kRankShift) - 1, kArenaBytes = 256 * 1024;

inline constexpr int kWarpLanes = 32, kMaxWarps = kMaxThreads / kWarpLanes * kMaxCluster;

// The order of a meeting point: two alternating addresses for each of a thread's two orders. With one address, a fast
// warp's next arrival would order a slow warp's reads and hide the race.
using Order = char*;

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
    int expected = 0;  // of the generation that is gathering
};

// Lanes of a warp that perform an operation together. The last to arrive performs it for all.
struct Meeting {
    uint32_t mask = 0, arrived = 0;
    unsigned generation = 0;
    const char* what = nullptr;
    bool may_end = false;  // lanes that have ended are not needed
    uint64_t in[kWarpLanes], out[kWarpLanes];
};

struct Block {
    char* arena = nullptr;              // its shared memory
    uint32_t used_bytes = kArenaBytes;  // the rest of the arena is unused
    uint3 index{};
    int rank = 0, alive = 0, exited = 0;
    Barrier named[kNamedBarriers];
    int votes[2] = {};
};

// A stack and the sanitizers' state for it. Reused from block to block.
struct Strand {
    void* sp = nullptr;
    char* stack = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* tsan[2] = {};          // ThreadSanitizer's fibers: the running order, the asynchronous order
    bool broken = false;         // stopped inside an instruction: cannot be unwound, must be recreated
};

struct Fiber {
    Strand* strand = nullptr;
    bool has_async_order = false;
    uint3 thread{};
    Block* block = nullptr;
    int id = 0;     // in the cluster, whole warps: id / 32 is the warp, id % 32 the lane
    int local = 0;  // in its block
    bool done = true;
    const char* waits = nullptr;     // what it waits for
    const void* key = nullptr;       // the meeting point that will wake it
    bool (*ready)(void*) = nullptr;  // polled instead of a key, if no thread wakes it
    void* ready_argument = nullptr;
    bool fenced = false;  // __threadfence was called in this block
    const void* last_atomic = nullptr;

    int lane() const { return id % kWarpLanes; }
    int warp() const { return id / kWarpLanes; }
};

// One grid of work for the machine.
struct Grid {
    std::string name;
    dim3 blocks, threads;
    uint32_t shared_bytes = 0;
    int cluster = 1;
    std::function<void()> body;  // the work of each thread
};

struct Machine {
    const Grid* grid = nullptr;
    Fiber* me = nullptr;  // the running thread
    Block blocks[kMaxCluster];
    Fiber fibers[kMaxThreads * kMaxCluster];  // suspended threads keep pointers to them
    int cluster = 1, fiber_count = 0, alive = 0;
    uint32_t runnable[kMaxWarps] = {}, lanes_alive[kMaxWarps] = {};
    Meeting meetings[kMaxWarps][kWarpLanes];  // by the lowest lane of the mask
    Barrier cluster_barrier;
    bool abandoning = false;

    // The values of threadIdx and similar variables.
    uint3 thread_index{}, block_index{};
    dim3 block_dim, grid_dim;
};

[[gnu::const]] Machine& machine();

// The running thread; a fault if none runs.
Fiber& me();

// The lanes of a warp that have not ended.
inline uint32_t lanes_alive(int warp) { return machine().lanes_alive[warp]; }

// Runs all blocks of a grid, in the order of the options. Faults are recorded, never thrown.
void run_grid(const Grid& grid);

// ---- waiting ----

// Suspends the running thread until wake(key) or wake_warp(key).
void wait_for_key(const void* key, const char* what);
void wake(const void* key);
// For waiting threads that all belong to one warp.
void wake_warp(int warp, const void* key);

void wait_until(bool (*ready)(void*), void* argument, const char* what);

// Suspends until ready() is true.
template <class Ready> void wait_until(Ready ready, const char* what) {
    if (ready()) return;
    wait_until([](void* argument) { return (*static_cast<Ready*>(argument))(); }, &ready, what);
}

// Ends the launch: unwinds the running thread, then all others.
[[noreturn]] void abandon_launch();
// The same for a thread that stopped inside an instruction and cannot be unwound.
void stop_broken_thread();

// Lets other threads run first: a polling thread must not block the machine.
void yield();

// ---- shared memory ----

// Before and after a block: initializes its shared memory, and checks for writes after its end.
void prepare_arena(Block& block, uint32_t shared_bytes);
void check_arena(Block& block, uint32_t shared_bytes);

char* dynamic_shared(size_t bytes);
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address);

// ---- orders for the race detector ----

// Addresses for the orders of meeting points; cleared between blocks, so that blocks of a launch stay unordered.
enum class Place { named_barrier, warp, cluster, warpgroup, thread, handover, mbarrier };
Order order_of(Place place, uint32_t index);
void forget_orders(int cluster);

void release_both(Order order);
void acquire_both(Order order);

// Runs `work` in the given order of the race detector, without being checked.
template <class Work> void on_order(void* order, Work work) {
    if (!tsan()) return work();
    struct Visit {
        void* back = __tsan_get_current_fiber();
        explicit Visit(void* there) {
            __tsan_switch_to_fiber(there, 1);
            __tsan_ignore_thread_begin();
        }
        ~Visit() {  // also when a fault unwinds
            __tsan_ignore_thread_end();
            __tsan_switch_to_fiber(back, 1);
        }
    } visit(order);
    work();
}
// The asynchronous order of a thread, created on first use.
void* async_order(Fiber& fiber);
template <class Work> void as_async(Fiber& fiber, Work work) {
    if (!tsan()) return work();
    on_order(async_order(fiber), work);
}

// ---- hooks of the asynchronous twins ----

struct Hooks {
    void (*on_start)() = nullptr;   // start of a cluster
    bool (*on_idle)() = nullptr;    // no thread can run: finish an operation in flight; false if there is none
    void (*on_finish)() = nullptr;  // end of a cluster, after all its threads
};
std::vector<Hooks>& hooks();

}  // namespace simt

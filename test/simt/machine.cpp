// The scheduler: selects the next thread, and handles deadlocks.
#include "test/simt/machine.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "test/simt/context.h"
#include "test/simt/memory_fault.h"

namespace simt {

namespace {

// Unwinds a thread of a launch that has ended with a fault.
struct Abandoned {};

// Under the race detector, successive blocks run on different strands, since the same strand would order them. Its time
// is proportional to the number of its fibers, at each barrier of each fiber. Small blocks alternate between three sets
// of strands. Of the large blocks of a grid, one in eight has a fiber for each thread. The others alternate between two
// sets in which the lanes of a warp share a fiber: there it finds races between warps and between blocks.
constexpr int kSmallSets = 3, kWarpSets = 2, kStrandSets = kSmallSets + kWarpSets;
constexpr uint32_t kSmallBlock = 256, kPeriod = 8;

struct Scheduler {
    void* sp = nullptr;
    void* tsan = nullptr;
    void* fake_stack = nullptr;
    const void* stack_bottom = nullptr;  // of the host's stack, as AddressSanitizer knows it
    size_t stack_bytes = 0;
    Fiber* came_from = nullptr;
    int current_warp = 0;
    bool only_askers = false;                 // every thread that runs only polls
    char started = 0, finished = 0;           // orders: before the grid's first instruction, after its last
    std::deque<Strand> strands[kStrandSets];  // of a set, by the thread's number in the cluster
    int set = 0;
    bool used_sets[kStrandSets] = {};     // used by this grid
    std::set<std::string> async_kernels;  // kernels that have used asynchronous units
    bool async_orders = false;            // this launch has orders for them
};

Scheduler& scheduler() {
    static Scheduler instance;
    return instance;
}

void set_indices(const Fiber& fiber) {
    Machine& m = machine();
    m.thread_index = fiber.thread;
    m.block_index = fiber.block->index;
}

// Switches from the running context (null: the scheduler) to another one (null: the scheduler).
void switch_to(Fiber* from, Fiber* to) {
    Scheduler& s = scheduler();
    const int quiet = std::exchange(Quiet::depth, 0);
    const bool shares = tsan() && from && s.set >= kSmallSets;  // then another lane must not be quiet meanwhile
    for (int i = 0; shares && i < quiet; i++) __tsan_ignore_thread_end();
    machine().me = to;
    if (to) {
        set_indices(*to);
        s.current_warp = to->warp();
    }
    if (asan())
        __sanitizer_start_switch_fiber(from ? &from->strand->fake_stack : &s.fake_stack,
                                       to ? to->strand->stack : s.stack_bottom, to ? kStackBytes : s.stack_bytes);
    if (tsan()) __tsan_switch_to_fiber(to ? to->strand->tsan[0] : s.tsan, 1);
    s.came_from = from;
    simt_switch_stack(from ? &from->strand->sp : &s.sp, to ? to->strand->sp : s.sp);
    // Resumed here, later.
    if (asan()) {
        const bool from_host = s.came_from == nullptr;
        __sanitizer_finish_switch_fiber(from ? from->strand->fake_stack : s.fake_stack,
                                        from_host ? &s.stack_bottom : nullptr, from_host ? &s.stack_bytes : nullptr);
    }
    for (int i = 0; shares && i < quiet; i++) __tsan_ignore_thread_begin();
    Quiet::depth = quiet;
}

// The next thread that can run, or null.
Fiber* pick() {
    Machine& m = machine();
    Scheduler& s = scheduler();
    const int warps = m.fiber_count / kWarpLanes;
    if (options().seed && random_below(8) == 0) s.current_warp = int(random_below(uint32_t(warps)));
    uint32_t lanes = m.runnable[s.current_warp];
    for (int warp = warps - 1, start = s.current_warp; !lanes && warp >= 0; warp--)
        lanes = m.runnable[s.current_warp = options().seed ? (warp + start) % warps : warp];
    if (!lanes) return nullptr;
    int lane = __builtin_ctz(lanes);
    if (options().seed)
        for (uint32_t skip = random_below(uint32_t(__builtin_popcount(lanes))); skip; skip--) {
            lanes &= lanes - 1;
            lane = __builtin_ctz(lanes);
        }
    return &m.fibers[size_t(s.current_warp) * kWarpLanes + size_t(lane)];
}

void set_runnable(const Fiber& fiber, bool runnable) {
    uint32_t& lanes = machine().runnable[fiber.warp()];
    const uint32_t bit = 1u << fiber.lane();
    lanes = runnable ? lanes | bit : lanes & ~bit;
}

// Switches to a thread that can run; returns when this thread runs again.
void suspend() {
    Machine& m = machine();
    Fiber* self = m.me;
    if (m.abandoning) throw Abandoned();
    Fiber* next = pick();
    if (next != self) switch_to(self, next);
    if (m.abandoning) throw Abandoned();
}

// A thread has ended, after its last instruction or by unwinding.
void end_of_thread(Fiber& fiber) {
    Machine& m = machine();
    fiber.done = true;
    set_runnable(fiber, false);
    m.alive--;
    m.lanes_alive[fiber.warp()] &= ~(1u << fiber.lane());
    fiber.block->alive--;
    fiber.block->exited++;
    if (m.abandoning) return;
    for (Meeting& meeting : m.meetings[fiber.warp()]) {
        if (!meeting.arrived || !(meeting.mask >> fiber.lane() & 1)) continue;
        if (!meeting.may_end) {
            note_fault(format("this thread ends while lanes 0x%08x of its warp wait for it in %s with mask 0x%08x",
                              meeting.arrived, meeting.what, meeting.mask));
            m.abandoning = true;
        } else if (meeting.arrived == (meeting.mask & lanes_alive(fiber.warp()))) {
            meeting.arrived = 0;
            meeting.generation++;
            wake_warp(fiber.warp(), &meeting);
        }
    }
    const Barrier& barrier = fiber.block->named[0];
    if (barrier.arrived) {
        note_fault(format("this thread ends while %d threads of its block wait in __syncthreads", barrier.arrived));
        m.abandoning = true;
    }
    if (fiber.block->alive == 0)
        for (int id = 1; id < kNamedBarriers; id++)
            if (fiber.block->named[id].arrived)
                note_fault(format("%d arrivals are left at barrier %d when the block ends",
                                  fiber.block->named[id].arrived, id));
    Barrier& all = m.cluster_barrier;
    if (all.arrived && all.arrived >= m.alive) {
        all.arrived = 0;
        all.generation++;
        wake(&all);
    }
}

// Each thread of the machine runs the blocks in turn on the same stack.
[[noreturn]] void thread_main() {
    Scheduler& s = scheduler();
    if (asan()) {
        const bool from_host = s.came_from == nullptr;
        __sanitizer_finish_switch_fiber(nullptr, from_host ? &s.stack_bottom : nullptr,
                                        from_host ? &s.stack_bytes : nullptr);
    }
    for (;;) {
        Fiber& self = *machine().me;
        try {
            acquire_order(&s.started);
            if (!machine().abandoning) machine().grid->body();
        } catch (const Abandoned&) {
            // The cause has already been recorded as a fault.
        }
        Fiber* next = nullptr;
        {
            Quiet quiet;
            end_of_thread(self);
            next = machine().abandoning ? nullptr : pick();
        }
        switch_to(&self, next);
    }
}

// The strand of lane 0 if the lanes of the warp share its fibers of the race detector, else null.
Strand* owner_of_orders(const Fiber& fiber) {
    Scheduler& s = scheduler();
    const bool shares = s.set >= kSmallSets && fiber.lane() > 0;
    return shares ? &s.strands[s.set][size_t(fiber.id - fiber.lane())] : nullptr;
}

void retire(Strand& strand, bool owns_orders) {
    free_stack(strand.stack);
    for (void* order : strand.tsan)
        if (order && owns_orders) __tsan_destroy_fiber(order);
    strand = {};
}

// Creating a fiber of the race detector takes a millisecond, so strands are kept.
void prepare_strand(Fiber& fiber) {
    Scheduler& s = scheduler();
    auto& strands = s.strands[s.set];
    if (strands.size() <= size_t(fiber.id)) strands.resize(size_t(fiber.id) + 1);
    Strand& strand = strands[size_t(fiber.id)];
    fiber.strand = &strand;
    const Strand* owner = owner_of_orders(fiber);
    if (strand.broken) retire(strand, !owner);
    if (!strand.stack) {
        strand.stack = allocate_stack();
        strand.sp = first_frame(strand.stack, thread_main);
        if (tsan() && !owner) strand.tsan[0] = __tsan_create_fiber(0);
    }
    if (owner) strand.tsan[0] = owner->tsan[0];
}

void give_async_order(Fiber& fiber, char* start) {
    Strand& strand = *fiber.strand;
    if (const Strand* owner = owner_of_orders(fiber))
        strand.tsan[1] = owner->tsan[1];
    else if (!strand.tsan[1])
        strand.tsan[1] = __tsan_create_fiber(0);
    fiber.has_async_order = true;
    on_order(strand.tsan[1], [start] { __tsan_acquire(start); });
}

void prepare_cluster(const Grid& grid, uint32_t first_block) {
    Machine& m = machine();
    Scheduler& s = scheduler();
    const int threads = int(grid.threads.x * grid.threads.y * grid.threads.z);
    const int padded = (threads + kWarpLanes - 1) / kWarpLanes * kWarpLanes;
    m.grid = &grid;
    m.cluster = grid.cluster;
    m.block_dim = grid.threads;
    m.grid_dim = grid.blocks;
    m.fiber_count = padded * grid.cluster;
    m.alive = threads * grid.cluster;
    m.abandoning = false;
    m.cluster_barrier.arrived = 0;
    for (int warp = 0; warp < m.fiber_count / kWarpLanes; warp++)
        for (Meeting& meeting : m.meetings[warp]) meeting.arrived = 0;
    forget_orders(grid.cluster);
    for (int rank = 0; rank < grid.cluster; rank++) {
        Block& block = m.blocks[rank];
        const uint32_t i = first_block + uint32_t(rank);
        block.rank = rank;
        block.index = {i % grid.blocks.x, i / grid.blocks.x % grid.blocks.y, i / (grid.blocks.x * grid.blocks.y)};
        block.alive = threads;
        block.exited = block.votes[0] = block.votes[1] = 0;
        for (Barrier& barrier : block.named) barrier.arrived = 0;
        prepare_arena(block, grid.shared_bytes);
    }
    std::fill(std::begin(m.runnable), std::end(m.runnable), 0u);
    std::fill(std::begin(m.lanes_alive), std::end(m.lanes_alive), 0u);
    for (int id = 0; id < m.fiber_count; id++) {
        Fiber& fiber = m.fibers[id];
        const int t = id % padded;
        fiber.id = id;
        fiber.local = t;
        fiber.block = &m.blocks[id / padded];
        fiber.done = t >= threads;
        fiber.waits = nullptr, fiber.key = nullptr, fiber.ready = nullptr;
        fiber.fenced = false;
        fiber.last_atomic = nullptr;
        if (fiber.done) continue;
        m.lanes_alive[fiber.warp()] |= 1u << fiber.lane();
        const auto x = grid.threads.x, y = grid.threads.y;
        fiber.thread = {uint32_t(t) % x, uint32_t(t) / x % y, uint32_t(t) / (x * y)};
        prepare_strand(fiber);
        fiber.has_async_order = false;
        if (s.async_orders) give_async_order(fiber, &s.started);
        set_runnable(fiber, true);
    }
}

// Wakes the polling threads whose condition now holds.
bool poll() {
    Machine& m = machine();
    bool woke = false;
    for (int id = 0; id < m.fiber_count; id++) {
        Fiber& fiber = m.fibers[id];
        if (fiber.done || !fiber.ready || !fiber.ready(fiber.ready_argument)) continue;
        fiber.ready = nullptr;
        set_runnable(fiber, true);
        woke = true;
    }
    return woke;
}

bool finish_something() {
    try {
        for (const Hooks& hook : hooks())
            if (hook.on_idle && hook.on_idle()) return true;
    } catch (const Abandoned&) {  // a fault of an asynchronous operation in flight
        machine().me = nullptr;
        return true;
    }
    return false;
}

void report_deadlock() {
    Machine& m = machine();
    std::map<std::string, std::vector<int>> waiting;
    for (int id = 0; id < m.fiber_count; id++) {
        const Fiber& fiber = m.fibers[id];
        if (fiber.done) continue;
        std::string what = fiber.waits ? fiber.waits : "?";
        const Meeting& meeting = m.meetings[fiber.warp()][0];
        if (fiber.key >= &meeting && fiber.key < &meeting + kWarpLanes)
            what += format(" with mask 0x%08x", static_cast<const Meeting*>(fiber.key)->mask);
        waiting[what].push_back(id);
    }
    std::string text = "deadlock: no thread can run;";
    for (const auto& [what, ids] : waiting) {
        const Fiber& first = m.fibers[size_t(ids[0])];
        text += format(" %zu threads wait in %s (the first is thread %d of block %u),", ids.size(), what.c_str(),
                       first.local, first.block->index.x);
    }
    text.pop_back();
    note_fault(text);
}

// Runs the resident cluster until it ends.
void run_cluster() {
    Machine& m = machine();
    constexpr int kPatience = 100000;  // unsuccessful polls after which nothing more can happen
    for (int in_vain = 0; m.alive > 0 && !m.abandoning;) {
        if (scheduler().only_askers) {
            scheduler().only_askers = false;
            in_vain = poll() || finish_something() ? 0 : in_vain + 1;
            if (in_vain > kPatience) {
                report_deadlock();
                m.abandoning = true;
                break;
            }
        }
        if (options().seed && random_below(16) == 0) finish_something();
        if (options().seed) poll();
        if (Fiber* next = pick())
            switch_to(nullptr, next);
        else if (!poll() && !finish_something()) {
            report_deadlock();
            m.abandoning = true;
        }
    }
    // After a fault: unwinds every thread that is still suspended.
    for (int id = 0; id < m.fiber_count; id++) {
        Fiber& fiber = m.fibers[id];
        if (!fiber.done) switch_to(nullptr, &fiber);
    }
}

}  // namespace

Machine& machine() {
    static Machine instance;
    return instance;
}

Fiber& me() {
    Machine& m = machine();
    require(m.me, "simt: a function of kernels was called outside a kernel");
    return *m.me;
}

std::vector<Hooks>& hooks() {
    static std::vector<Hooks> instance;
    return instance;
}

// The work of the grid's threads happens before the host's next action. Once per grid: under the race detector an order
// takes some microseconds for each of the thousands of strands.
static void join_strands() {
    if (!tsan()) return;
    Scheduler& s = scheduler();
    for (int set = 0; set < kStrandSets; set++) {
        const size_t most = std::min(s.strands[set].size(), size_t(machine().fiber_count));
        for (size_t id = 0; s.used_sets[set] && id < most; id++)
            if (void* order = s.strands[set][id].tsan[0]) on_order(order, [&] { __tsan_release(&s.finished); });
        s.used_sets[set] = false;
    }
    __tsan_acquire(&s.finished);
}

void run_grid(const Grid& grid) {
    Quiet quiet;
    Machine& m = machine();
    Scheduler& s = scheduler();
    const MemoryFaultHandler handler;
    s.async_orders = tsan() && s.async_kernels.count(grid.name);
    s.tsan = tsan() ? __tsan_get_current_fiber() : nullptr;
    m.cluster = 0;
    release_order(&s.started);
    const uint32_t resident = grid.threads.x * grid.threads.y * grid.threads.z * uint32_t(grid.cluster);
    const bool is_small = resident <= kSmallBlock;
    const uint32_t period = is_small ? kSmallSets : kPeriod;
    uint32_t number = is_small ? uint32_t(s.set) : kPeriod - 1;  // the first large block has a fiber for each thread
    std::vector<uint32_t> order(grid.blocks.x * grid.blocks.y * grid.blocks.z / uint32_t(grid.cluster));
    std::iota(order.rbegin(), order.rend(), 0u);  // the last block first: code must not rely on the first
    if (options().seed)
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_below(uint32_t(i))]);
    for (uint32_t cluster : order) {
        if (tsan()) {
            number = options().seed ? random_below(period) : (number + 1) % period;
            s.set = int(is_small || number == 0 ? number : kSmallSets + number % kWarpSets);
        }
        s.used_sets[s.set] = true;
        prepare_cluster(grid, cluster * uint32_t(grid.cluster));
        for (const Hooks& hook : hooks())
            if (hook.on_start) hook.on_start();
        run_cluster();
        for (const Hooks& hook : hooks())
            if (hook.on_finish) hook.on_finish();
        for (int rank = 0; rank < m.cluster; rank++) check_arena(m.blocks[rank], grid.shared_bytes);
        if (m.abandoning) break;
    }
    join_strands();
    m.grid = nullptr, m.fiber_count = 0, m.abandoning = false;
}

void wait_for_key(const void* key, const char* what) {
    Fiber& fiber = me();
    fiber.waits = what;
    fiber.key = key;
    set_runnable(fiber, false);
    suspend();
    fiber.key = nullptr;
}

static void wake_range(int first, int end, const void* key) {
    for (int id = first; id < end; id++) {
        const Fiber& fiber = machine().fibers[id];
        if (fiber.key == key && !fiber.done) set_runnable(fiber, true);
    }
}

void wake(const void* key) { wake_range(0, machine().fiber_count, key); }

void wake_warp(int warp, const void* key) { wake_range(warp * kWarpLanes, (warp + 1) * kWarpLanes, key); }

void wait_until(bool (*ready)(void*), void* argument, const char* what) {
    Fiber& fiber = me();
    fiber.waits = what;
    fiber.ready = ready;
    fiber.ready_argument = argument;
    set_runnable(fiber, false);
    suspend();
    fiber.ready = nullptr;
}

void yield() {
    Fiber& fiber = me();
    set_runnable(fiber, false);
    fiber.waits = "its turn";
    Fiber* next = pick();
    set_runnable(fiber, true);
    if (machine().abandoning) throw Abandoned();
    scheduler().only_askers = next == nullptr;  // then the scheduler advances asynchronous work
    switch_to(&fiber, next);
    if (machine().abandoning) throw Abandoned();
}

void abandon_launch() {
    machine().abandoning = true;
    throw Abandoned();
}

void stop_broken_thread() {
    Machine& m = machine();
    Fiber& fiber = *m.me;
    fiber.strand->broken = true;
    m.abandoning = true;
    end_of_thread(fiber);
    switch_to(&fiber, nullptr);
}

// A kernel's first use of asynchronous units may come after barriers that their orders should include. The orders start
// with everything that has happened so far, which may hide a race in this block; the next block is exact.
void* async_order(Fiber& fiber) {
    if (!tsan()) return nullptr;
    Scheduler& s = scheduler();
    Machine& m = machine();
    if (!s.async_orders) {
        static char so_far;
        s.async_orders = true;
        s.async_kernels.insert(m.grid->name);
        auto each = [&](auto work) {
            for (int id = 0; id < m.fiber_count; id++)
                if (Fiber& other = m.fibers[id]; !other.done) work(other);
        };
        __tsan_release(&so_far);
        each([&](Fiber& other) {
            if (&other != m.me) on_order(other.strand->tsan[0], [] { __tsan_release(&so_far); });
        });
        each([&](Fiber& other) { give_async_order(other, &so_far); });
    }
    return fiber.strand->tsan[1];
}

}  // namespace simt

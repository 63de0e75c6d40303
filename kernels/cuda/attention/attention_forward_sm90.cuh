// The parts of attention_forward_sm90.cu without tensor cores: shapes, the division of work, masks.
#pragma once

#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/cuda/attention/attention_sm90.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"

namespace ops::sm90 {

inline constexpr int kUnit = 64;   // queries of a warpgroup
inline constexpr int kKeys = 128;  // per tile
inline constexpr int kWarps = 4;   // of a warpgroup
inline constexpr int kTaskStages = 2;

// Sizes. The warpgroups of a block have 65,536 registers together.
template <int kHeadSize> struct Shape {
    static constexpr int kConsumers = kHeadSize == 64 ? 3 : 2;  // warpgroups
    static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
    static constexpr int kStages = kHeadSize == 64 ? 4 : 2;
    static constexpr bool kHasHalfTiles = kHeadSize == 128;  // more registers than heads of 64 have
    static constexpr int kProducerRegisters = kHeadSize == 64 ? 32 : 40;
    static constexpr int kConsumerRegisters = kHeadSize == 64 ? 160 : 232;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kWarpgroupThreads);
};

// The kernel's argument. The queries of a key-value head are `units` of 64 rows (QueryRows).
struct ForwardSm90 {
    CUtensorMap key_map;             // of qkv, boxes of a tile of keys or values
    CUtensorMap query_map, out_map;  // boxes of a warp's 16 rows
    AttentionForward op;
    int units;         // of a head
    int tasks;         // of a head: as few as possible
    int heads;         // of all samples
    int paired_heads;  // an even number of them, the first ones
};

// A task: adjacent units of a head, one for each of the first `count` consumers.
struct Task {
    int batch, kv_head, begin, count;  // `begin`: the first row
};

// The tasks of a thread block, which is persistent. Causal tasks differ in length: number i of a head has about i + 1
// shares of work. The tasks of paired heads form items of two tasks with the same work, so that blocks that take items
// in turn finish together: i and tasks - 1 - i of a head, and the middle ones of two heads. The tasks of the last
// heads, about three per block, are items themselves, the longest first. Blocks take items in turn, every other time in
// reverse order. In a model of the costs with 132 blocks and at least 15 tasks per block, the last block ends at most
// 5 % after the mean (not measured).
class Tasks {
public:
    __device__ __forceinline__ explicit Tasks(const ForwardSm90& op) : op_(op) {}

    // Returns false at the end.
    __device__ __forceinline__ bool next(Task& task) {
        const int blocks = int(gridDim.x), block = int(blockIdx.x);
        const int item = round_ * blocks + (round_ % 2 ? blocks - 1 - block : block);
        const int n_pairs = op_.paired_heads / 2 * op_.tasks, half = op_.tasks / 2;
        int head, number;
        if (item < n_pairs) {
            const int i = item % op_.tasks, of_second_head = i >= half && i < 2 * half ? 1 : 0;
            const int shorter = i - of_second_head * half;
            head = item / op_.tasks * 2 + (i == 2 * half ? int(is_second_) : of_second_head);
            number = i == 2 * half ? half : is_second_ ? shorter : op_.tasks - 1 - shorter;
            if (is_second_) round_++;
            is_second_ = !is_second_;
        } else {
            const int heads = op_.heads - op_.paired_heads, place = item - n_pairs;
            if (place >= heads * op_.tasks) return false;
            head = op_.paired_heads + place % heads;
            number = op_.tasks - 1 - place / heads;
            round_++;
        }
        // The last tasks have one more unit than the first ones.
        const int least = op_.units / op_.tasks, first_larger = op_.tasks - op_.units % op_.tasks;
        task.batch = head / op_.op.n_kv_head;
        task.kv_head = head % op_.op.n_kv_head;
        task.begin = (number * least + max(0, number - first_larger)) * kUnit;
        task.count = least + (number >= first_larger ? 1 : 0);
        return true;
    }

private:
    const ForwardSm90& op_;
    int round_ = 0;
    bool is_second_ = false;  // of a pair
};

// A consumer warp's part of a task: 16 adjacent positions of a head. The producer prepares it, because it takes
// divisions.
struct WarpTask {
    int batch = -1;                              // -1: no further task
    int first_thread = 0;                        // of the warp
    int head = 0, position = 0;                  // of the first query
    int skipped_before = 0, skipped_behind = 0;  // tiles of the task that the unit does not see; without a unit, all
                                                 // are before
    int begin = 0, end = 0;                      // tiles that the unit sees
    int whole_end = 0;  // end, or end - 1 if the unit sees only the first half of the last of several

    __device__ __forceinline__ static WarpTask none() { return {}; }
    __device__ __forceinline__ static WarpTask of(const ForwardSm90& op, const Task& task, int consumer, int warp,
                                                  bool has_half_tiles) {
        const AttentionLayout at(op.op);
        const VisibleKeys visible(op.op, task.batch);
        const QueryRows<kRunRows, true> rows(at, task.kv_head, task.begin);
        const QueryRows<kRunRows, true> unit(at, task.kv_head, task.begin + consumer * kUnit);
        const KeyTiles all = tiles_of_block<true>(rows, task.count * kUnit, kKeys, visible, at.seq_len);
        if (consumer >= task.count) return {.batch = task.batch, .skipped_before = all.end - all.begin};
        const KeyTiles seen = tiles_of_block<true>(unit, kUnit, kKeys, visible, at.seq_len);
        const int row = warp * kRunRows, last_key = min(unit.position(kUnit - 1), at.seq_len - 1);
        const bool has_half = has_half_tiles && seen.end - seen.begin > 1 && last_key % kKeys < kKeys / 2;
        return {.batch = task.batch,
                .first_thread = (1 + consumer) * kWarpgroupThreads + warp * 32,
                .head = unit.head(row),
                .position = unit.position(row),
                .skipped_before = seen.begin - all.begin,
                .skipped_behind = all.end - seen.end,
                .begin = seen.begin,
                .end = seen.end,
                .whole_end = seen.end - (has_half ? 1 : 0)};
    }
};

// The queries of a lane: rows 8 half + g of the warp.
struct LaneQueries {
    int position[2], first_key[2];

    __device__ __forceinline__ LaneQueries(const ForwardSm90& op, const WarpTask& task) {
        const VisibleKeys visible(op.op, task.batch);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            position[half] = task.position + 8 * half + int(threadIdx.x) % 32 / 4;
            first_key[half] = visible.first(min(position[half], op.op.seq_len - 1));
        }
    }

    // Masks scores of keys [key, key + 8 kN) that the query does not see.
    template <int kN> __device__ __forceinline__ void mask(float (&scores)[1][kN][4], int key) const {
        if (key + 8 * kN - 1 <= position[0] && first_key[1] <= key) return;
        const int lane_key = key + int(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int last = position[half] - lane_key, first = first_key[half] - lane_key;
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * n + i < first || 8 * n + i > last) scores[0][n][2 * half + i] = kMasked;
        }
    }
};

template <class T, int kHeadSize> struct Shared {
    using S = Shape<kHeadSize>;
    alignas(1024) T key[S::kStages][kKeys][kHeadSize];
    alignas(1024) T value[S::kStages][kKeys][kHeadSize];
    alignas(1024) T query[S::kConsumers][kUnit][kHeadSize];
    alignas(1024) T out[S::kConsumers][kUnit][kHeadSize];
    WarpTask task[kTaskStages][S::kConsumers * kWarps];
    RingBarriers<S::kStages> keys, values;
    RingBarriers<1> queries[S::kConsumers];
    RingBarriers<kTaskStages> tasks;
};

// Consumers issue their products in turn, one tile each, so that one computes exponentials while others multiply.
template <int kConsumers> class Turns {
public:
    __device__ __forceinline__ explicit Turns(int consumer)
        : mine_(1 + consumer), next_(consumer + 1 == kConsumers ? 1 : 2 + consumer), is_first_(consumer == 0) {
        if (next_ == 1) pass();
    }
    __device__ __forceinline__ void take() { ptx::bar_sync(mine_, 2 * kWarpgroupThreads); }
    __device__ __forceinline__ void pass() { ptx::bar_arrive(next_, 2 * kWarpgroupThreads); }
    // So that no barrier has arrivals left.
    __device__ __forceinline__ void end() {
        if (is_first_) take();
    }

private:
    int mine_, next_;
    bool is_first_;
};

}  // namespace ops::sm90

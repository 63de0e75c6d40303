// A thread block of attention_backward for sm_90a: its work, its shared memory, and the warps that copy between that
// and global memory.
#pragma once

#include "kernels/cuda/attention/attention_backward_sm90.cuh"
#include "kernels/cuda/attention/attention_sm90.cuh"
#include "kernels/cuda/launch.cuh"

namespace ops {

inline constexpr int kConsumers = 2, kConsumerWarps = 8;
inline constexpr int kStages = 2;  // of queries and of their gradients, and of keys

// Named barriers; the last two have one for each consumer.
enum BarrierNumber { CONSUMERS = 1, SUMS_EMPTY = 2, SUMS_FULL = 4 };
inline constexpr int kSumsThreads = kWarpgroupThreads + 32;

// Arguments of the kernel.
struct BackwardArguments {
    CUtensorMap qkv, dout, dqkv;  // boxes of 16 positions
    CUtensorMap sums;             // boxes of a warpgroup's sums, 16 rows of 256
    BackwardWork work;
    const float* statistics;  // as in BackwardScratch
    const int* seen;
    const int* tile_ends;
    int n_head;
    int run_step, position_step;  // from one tile to the next: kRuns % group, kRuns / group * kRunRows
    float scale;
    float* dqkv_amax;
};

template <int kHeadSize> struct BackwardTiles {
    static constexpr int kRows = kTileQueries<kHeadSize>;
    using Keys = Sm90Tile<kBlockKeys, kHeadSize>;
    using Queries = Sm90Tile<kRows, kHeadSize>;
    using Scores = Sm90Tile<kBlockKeys, kRows>;  // transposed: the rows are keys
};

template <int kHeadSize> struct BackwardShared {
    using Of = BackwardTiles<kHeadSize>;
    alignas(1024) char key[kStages][Of::Keys::kBytes];
    alignas(1024) char value[Of::Keys::kBytes];
    alignas(1024) char query[kStages][Of::Queries::kBytes];
    alignas(1024) char dout[kStages][Of::Queries::kBytes];
    alignas(1024) char dscores[2][Of::Scores::kBytes];  // of two tiles
    alignas(128) float sums[kConsumers][kSumsOfWarpgroup];
    alignas(16) float statistics[kStages][2 * Of::kRows];
    alignas(16) int seen[kStages][2 * Of::kRows];
    RingBarriers<kStages> query_ring, dout_ring, key_ring;
    RingBarriers<1> value_ring;

    // Where dK and dV are on their way to global memory. With heads of 64, dscores has room for both, so that the next
    // values are loaded at once.
    __device__ char* dkey() { return dscores[0]; }
    __device__ char* dvalue() { return kHeadSize == kBoxColumns ? dscores[1] : value; }
};

// A key block in its part, and the tiles of queries that see it.
struct KeyBlock {
    uint32_t round;
    int first_key, begin, end;
    int previous_end;  // of the part's key block before, 0 for the first
};

// The work of a block: the gradients of a part's key blocks, and its sums of dQ.
struct BackwardPart {
    const BackwardWork& work;
    const int* tile_ends;
    int part = int(blockIdx.x), kv_head = int(blockIdx.y), b = int(blockIdx.z), unit = work.unit(b, kv_head);

    __device__ __forceinline__ explicit BackwardPart(const BackwardArguments& op)
        : work(op.work), tile_ends(op.tile_ends) {}

    // Calls visit(KeyBlock) for the part's key blocks in ascending order.
    template <int kHeadSize, class Visit> __device__ __forceinline__ void for_each_key_block(Visit visit) const {
        int end = 0;
        for (int round = 0;; round++) {
            const int key_block = work.key_block(part, round), previous_end = end;
            if (key_block >= work.n_key_blocks) return;
            end = tile_ends[b * work.n_key_blocks + key_block];
            visit(KeyBlock{uint32_t(round), key_block * kBlockKeys, work.first_tile(key_block, kTileQueries<kHeadSize>),
                           end, previous_end});
        }
    }
};

// The place of item `number` in a ring.
template <int kCount> __device__ __forceinline__ RingPlace<kCount> place_of(uint32_t number) {
    return {number % kCount, number / kCount % 2};
}

// ---- the warps of the first warpgroup ----

// The box of a tile of queries that a lane loads: 16 positions of one head, 64 columns. One box per lane.
template <int kHeadSize> struct QueryBox {
    static constexpr int kRuns = kTileQueries<kHeadSize> / kRunRows;
    int of_group, position;  // the run's head in the group, and its first position

    __device__ __forceinline__ QueryBox(const BackwardWork& work, int tile) {
        const int run = tile * kRuns + lane() % kRuns;
        of_group = run % work.group;
        position = run / work.group * kRunRows;
    }
    // To the next tile.
    __device__ __forceinline__ void advance(const BackwardArguments& op) {
        of_group += op.run_step;
        position += op.position_step;
        if (of_group < op.work.group) return;
        of_group -= op.work.group;
        position += kRunRows;
    }
    __device__ __forceinline__ void load(char* tile, const CUtensorMap& map, uint32_t bar, int first_head,
                                         int b) const {
        if (lane() >= kRuns * BackwardTiles<kHeadSize>::Queries::kBoxes) return;
        const int column = lane() / kRuns * kBoxColumns;
        ptx::tma_load(
            ptx::shared_address(tile) + BackwardTiles<kHeadSize>::Queries::offset(lane() % kRuns * kRunRows, column),
            &map, bar, (first_head + of_group) * kHeadSize + column, position, b);
    }
    static __device__ __forceinline__ int lane() { return int(threadIdx.x % 32); }
};

// Starts the copies of a block of keys or values, from `column` of qkv on.
template <int kHeadSize>
__device__ __forceinline__ void load_keys(char* tile, const CUtensorMap& map, uint32_t bar, int column, int position,
                                          int b) {
    using Keys = typename BackwardTiles<kHeadSize>::Keys;
    constexpr int kRuns = kBlockKeys / kRunRows;
    const int lane = int(threadIdx.x % 32), run = lane % kRuns, box = lane / kRuns * kBoxColumns;
    if (lane < kRuns * Keys::kBoxes)
        ptx::tma_load(ptx::shared_address(tile) + Keys::offset(run * kRunRows, box), &map, bar, column + box,
                      position + run * kRunRows, b);
}

// Waits until the stage is empty and returns its barrier, which expects `bytes`. All lanes of a warp call it.
template <int kCount>
__device__ __forceinline__ uint32_t begin_fill(RingBarriers<kCount>& ring, const RingPlace<kCount>& at,
                                               uint32_t bytes) {
    if (threadIdx.x % 32 == 0) ring.begin_fill(at, bytes);
    __syncwarp();
    return ptx::shared_address(&ring.full[at.stage]);
}

template <int kHeadSize>
__device__ __forceinline__ void load(BackwardShared<kHeadSize>& s, const BackwardArguments& op) {
    using Of = BackwardTiles<kHeadSize>;
    const BackwardPart part(op);
    const BackwardWork& work = op.work;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const int first_head = part.kv_head * work.group;
    constexpr uint32_t kRowBytes = 2 * Of::kRows * sizeof(float);
    uint32_t number = 0;  // of the tile
    part.for_each_key_block<kHeadSize>([&](const KeyBlock& block) {
        QueryBox<kHeadSize> box(work, block.begin);
        for (int tile = block.begin; tile < block.end; tile++, number++, box.advance(op)) {
            const RingPlace<kStages> place = place_of<kStages>(number);
            uint32_t bar = begin_fill(s.dout_ring, place, Of::Queries::kBytes);  // empty before the queries' stage
            box.load(s.dout[place.stage], op.dout, bar, first_head, part.b);
            bar = begin_fill(s.query_ring, place, Of::Queries::kBytes + 2 * kRowBytes);
            box.load(s.query[place.stage], op.qkv, bar, first_head, part.b);
            if (is_first_lane) {
                ptx::bulk_load(ptx::shared_address(s.statistics[place.stage]),
                               op.statistics + (size_t(part.unit) * work.n_tiles + tile) * (2 * Of::kRows), kRowBytes,
                               bar);
                ptx::bulk_load(ptx::shared_address(s.seen[place.stage]),
                               op.seen + (size_t(part.b) * work.n_tiles + tile) * (2 * Of::kRows), kRowBytes, bar);
            }
            if (tile > block.begin) continue;
            const RingPlace<kStages> key = place_of<kStages>(block.round);
            const int column = (op.n_head + part.kv_head) * kHeadSize;
            bar = begin_fill(s.key_ring, key, Of::Keys::kBytes);
            load_keys<kHeadSize>(s.key[key.stage], op.qkv, bar, column, block.first_key, part.b);
            bar = begin_fill(s.value_ring, place_of<1>(block.round), Of::Keys::kBytes);
            load_keys<kHeadSize>(s.value, op.qkv, bar, column + work.n_kv_head * kHeadSize, block.first_key, part.b);
        }
    });
}

// Stores a consumer's sums of dQ, or adds them to the sums of the earlier key blocks. One lane starts the copies. It
// waits for the copies of a key block before the next one adds to the same places, so the order is always the same.
template <int kHeadSize>
__device__ __forceinline__ void store_sums_of_queries(BackwardShared<kHeadSize>& s, const BackwardArguments& op,
                                                      int consumer) {
    const BackwardPart part(op);
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const uint32_t from = ptx::shared_address(s.sums[consumer]);
    part.for_each_key_block<kHeadSize>([&](const KeyBlock& block) {
        if (is_first_lane) ptx::bulk_wait<0>();
        for (int tile = block.begin; tile < block.end; tile++) {
            if (is_first_lane) ptx::bulk_wait_read<0>();
            __syncwarp();
            ptx::bar_arrive(SUMS_EMPTY + consumer, kSumsThreads);
            ptx::bar_sync(SUMS_FULL + consumer, kSumsThreads);
            if (!is_first_lane) continue;
            const int row = int(op.work.sums(part.part, part.unit, tile) + consumer) * 16;
            if (tile < block.previous_end)
                ptx::tma_store<true>(&op.sums, from, 0, row);
            else
                ptx::tma_store(&op.sums, from, 0, row);
            ptx::bulk_commit();
        }
    });
    if (is_first_lane) ptx::bulk_wait<0>();
}

}  // namespace ops

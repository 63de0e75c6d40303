// Shared by the attention kernels of sm_90a: tiles of heads in shared memory, tensor maps, and a ring of stages.
//
// A tile has rows of kColumns 16-bit numbers. It consists of adjacent boxes of 64 columns (128 bytes), as
// tensor copies (TMA) write them with the 128-byte swizzle. A tile is aligned to 1024 bytes, the swizzle's period.
#pragma once

#include "kernels/cuda/attention/attention_layout.cuh"  // IWYU pragma: export
#include "kernels/cuda/hopper/ptx_hopper.cuh"           // IWYU pragma: export
#include "kernels/cuda/hopper/tensor_map.h"             // IWYU pragma: export
#include "kernels/cuda/launch.cuh"
#include "kernels/numeric.h"
#include "kernels/tensor.h"

namespace ops {

inline constexpr int kBoxColumns = 64, kBoxRowBytes = 128;
inline constexpr int kRunRows = 16;            // adjacent queries of one head: QueryRows<kRunRows, ...>, a warp's rows
inline constexpr int kWarpgroupThreads = 128;  // four warps, which issue a product of 64 rows together

template <int kRows, int kColumns> struct Sm90Tile {
    static_assert(kColumns % kBoxColumns == 0 && kRows % 8 == 0);
    static constexpr int kBoxes = kColumns / kBoxColumns;
    static constexpr uint32_t kBoxBytes = kRows * kBoxRowBytes, kBytes = kBoxes * kBoxBytes;

    // The bytes from a tile to its row `row` of the box of column `column`, a multiple of 64. Swizzled if the row is
    // not a multiple of 8.
    static __device__ __forceinline__ uint32_t offset(int row, int column = 0) {
        return uint32_t(column / kBoxColumns) * kBoxBytes + uint32_t(row) * kBoxRowBytes;
    }
    // The descriptor of an operand whose depth is along the columns (K-major): rows from `row` on, a multiple of 8, are
    // M or N; columns [16 k, 16 k + 16) are the depth. No transposition.
    static __device__ __forceinline__ uint64_t along_columns(uint32_t tile, int row, int k) {
        return moved(ptx::wgmma_descriptor(tile, 16, 8 * kBoxRowBytes, ptx::SWIZZLE_128),
                     offset(row, 16 * k) + uint32_t(k % 4 * 32));
    }
    // The descriptor of an operand whose depth is along the rows (MN-major, transposed): columns from `column` on, a
    // multiple of 64, are M or N; rows [16 k, 16 k + 16) are the depth.
    static __device__ __forceinline__ uint64_t along_rows(uint32_t tile, int k, int column = 0) {
        return moved(ptx::wgmma_descriptor(tile, kBoxBytes, 8 * kBoxRowBytes, ptx::SWIZZLE_128),
                     offset(16 * k, column));
    }
    // A descriptor with an address `bytes` further on: no carry leaves the low half, so 32 bits are added.
    static __device__ __forceinline__ uint64_t moved(uint64_t descriptor, uint32_t bytes) {
        return (descriptor >> 32 << 32) | (uint32_t(descriptor) + bytes / 16);
    }

    // Starts loading the tile: rows from `position` on of a sample, columns from `column` on of the tensor. The map's
    // boxes have kRows rows. The barrier must expect kBytes. One thread calls it.
    static __device__ __forceinline__ void load(uint32_t tile, const CUtensorMap& map, uint32_t bar, int column,
                                                int position, int sample) {
#pragma unroll
        for (int box = 0; box < kBoxes; box++)
            ptx::tma_load(tile + box * kBoxBytes, &map, bar, column + box * kBoxColumns, position, sample);
    }
    // The same for rows of a block of queries, from the block's row `row` on, of a tensor with kColumns columns per
    // head. The group's heads begin in column 0. The map's boxes have kRunRows rows. Rows of positions from seq_len on
    // become 0.
    static __device__ __forceinline__ void load_queries(uint32_t tile, const CUtensorMap& map, uint32_t bar,
                                                        const QueryRows<kRunRows, true>& rows, int row, int sample) {
#pragma unroll 1
        for (int run = 0; run < kRows; run += kRunRows)
#pragma unroll
            for (int box = 0; box < kBoxes; box++)
                ptx::tma_load(tile + offset(run) + box * kBoxBytes, &map, bar,
                              rows.head(row + run) * kColumns + box * kBoxColumns, rows.position(row + run), sample);
    }
};

// The map of a tensor (batch, seq_len, columns) for boxes of `box_rows` positions of one sample and 64 columns.
// Positions outside a sequence are 0 in loads, and stores omit them.
template <class Op> CUtensorMap make_attention_map(ConstView tensor, size_t columns, const Op& op, int box_rows) {
    const uint64_t row_bytes = columns * size_of(tensor.dtype);
    return make_tensor_map(tensor, {.rank = 3,
                                    .size = {columns, uint64_t(op.seq_len), uint64_t(op.batch)},
                                    .strides = {row_bytes, row_bytes * uint64_t(op.seq_len)},
                                    .box = {kBoxColumns, uint32_t(box_rows), 1},
                                    .swizzle = ptx::SWIZZLE_128});
}

// The place of a producer or a consumer in a ring of stages. `parity` belongs to the stage's current fill: a consumer
// waits for `full` with it, a producer for `empty` with the other one (which returns at once the first time).
template <int kStages> struct RingPlace {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// Barriers of a ring, in shared memory. A producer waits until a stage is empty, announces its bytes and starts copies;
// consumers wait until it is full, and arrive at `empty` when they have read it.
template <int kStages> struct RingBarriers {
    uint64_t full[kStages], empty[kStages];

    // Call in one thread, before fence_mbarrier_init() and a barrier of the block. `readers`, `writers`: arrivals per
    // stage.
    __device__ __forceinline__ void init(uint32_t readers, uint32_t writers = 1) {
#pragma unroll
        for (int stage = 0; stage < kStages; stage++) {
            ptx::mbarrier_init(ptx::shared_address(&full[stage]), writers);
            ptx::mbarrier_init(ptx::shared_address(&empty[stage]), readers);
        }
    }
    __device__ __forceinline__ void wait_empty(const RingPlace<kStages>& at) {
        ptx::mbarrier_wait(ptx::shared_address(&empty[at.stage]), at.parity ^ 1);
    }
    // Waits for an empty stage and expects `bytes`. Returns the address of the barrier for the copies.
    __device__ __forceinline__ uint32_t begin_fill(const RingPlace<kStages>& at, uint32_t bytes) {
        wait_empty(at);
        const uint32_t bar = ptx::shared_address(&full[at.stage]);
        ptx::mbarrier_arrive_expect_tx(bar, bytes);
        return bar;
    }
    __device__ __forceinline__ void wait_full(const RingPlace<kStages>& at) {
        ptx::mbarrier_wait(ptx::shared_address(&full[at.stage]), at.parity);
    }
    __device__ __forceinline__ void release(const RingPlace<kStages>& at) {
        ptx::mbarrier_arrive(ptx::shared_address(&empty[at.stage]));
    }
};

}  // namespace ops

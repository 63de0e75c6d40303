// The passes of attention_backward for sm_90a before and after the products, with one block per tile of queries.
//
// Before: reads out and dout, and writes the statistics of each row in the order of the tiles. After: reads each part's
// sums of dQ once, and writes the queries' columns of dqkv. Both are limited by memory.
#include "kernels/cuda/attention/attention_backward_sm90.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

// The end of the tiles with queries that see the key block.
template <int kHeadSize>
__device__ __forceinline__ int end_of_tiles(const BackwardWork& work, const VisibleKeys& visible, int key_block) {
    const int last_key = min((key_block + 1) * kBlockKeys, work.seq_len) - 1;
    const int queries = visible.end_of_queries(last_key, work.seq_len);
    const int rows = (queries + kRunRows - 1) / kRunRows * kRunRows * work.group;
    return (rows + kTileQueries<kHeadSize> - 1) / kTileQueries<kHeadSize>;
}

template <class T, int kHeadSize> __device__ __forceinline__ void prepare(const BackwardPass& pass) {
    constexpr int kRows = kTileQueries<kHeadSize>, kLanes = kHeadSize / kPackNumbers;
    const AttentionBackward& op = pass.op;
    const BackwardWork& work = pass.work;
    const AttentionLayout at(op);
    const int tile = int(blockIdx.x), kv_head = int(blockIdx.y), b = int(blockIdx.z);
    const QueryRows<kRunRows, true> rows(at, kv_head, tile * kRows);
    float* statistics = pass.scratch.statistics + (size_t(work.unit(b, kv_head)) * work.n_tiles + tile) * (2 * kRows);
    for (int row = int(threadIdx.x) / kLanes; row < kRows; row += kThreads / kLanes) {
        const int head = rows.head(row), position = rows.position(row), lane = int(threadIdx.x) % kLanes;
        float lse = 0, sum = 0;
        if (position < at.seq_len) {
            const size_t place = at.out(b, head, position) + lane * kPackNumbers;
            sum = dot_of_packs<T>(*reinterpret_cast<const uint4*>(op.out.template as<T>() + place),
                                  *reinterpret_cast<const uint4*>(op.dout.template as<T>() + place));
            lse = op.lse[at.lse(b, head, position)];
        }
        sum = lanes_reduce<kLanes>(sum, Sum());
        if (lane == 0) statistics[row] = lse * kLog2E, statistics[kRows + row] = sum;
    }
    if (kv_head > 0) return;
    const VisibleKeys visible(op, b);
    int* seen = pass.scratch.seen + (size_t(b) * work.n_tiles + tile) * (2 * kRows);
    if (threadIdx.x < kRows) {
        const int row = int(threadIdx.x), position = rows.position(row);
        seen[row] = visible.first(min(position, at.seq_len - 1));
        seen[kRows + row] = position;
    }
    if (tile > 0) return;
    for (int key_block = int(threadIdx.x); key_block < work.n_key_blocks; key_block += kThreads)
        pass.scratch.tile_ends[size_t(b) * work.n_key_blocks + key_block] =
            end_of_tiles<kHeadSize>(work, visible, key_block);
}

// Whether the part has sums of the tile.
template <int kHeadSize> __device__ __forceinline__ bool has_sums(const BackwardPass& pass, int b, int part, int tile) {
    const BackwardWork& work = pass.work;
    const int* ends = pass.scratch.tile_ends + size_t(b) * work.n_key_blocks;
    for (int round = 0;; round++) {
        const int key_block = work.key_block(part, round);
        if (key_block >= work.n_key_blocks || tile < work.first_tile(key_block, kTileQueries<kHeadSize>)) return false;
        if (tile < ends[key_block]) return true;
    }
}

// A warp adds the sums of 16 rows and 64 columns, in the registers of the warp that computed them.
template <class T, int kHeadSize> __device__ __forceinline__ void finish(const BackwardPass& pass) {
    constexpr int kRows = kTileQueries<kHeadSize>, kWarpRows = 16;
    struct Shared {
        alignas(kTileAlignment<kBoxColumns>) T rows[kThreads / 32 * kWarpRows][kBoxColumns];
    };
    auto& s = shared_memory<Shared>();
    const AttentionBackward& op = pass.op;
    const BackwardWork& work = pass.work;
    const AttentionLayout at(op);
    const int tile = int(blockIdx.x), kv_head = int(blockIdx.y), b = int(blockIdx.z);
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, group = warp / 4, warp_of_group = warp % 4;
    float sums[1][kBoxColumns / 8][4] = {};
    for (int part = 0; part < work.n_parts; part++) {
        if (!has_sums<kHeadSize>(pass, b, part, tile)) continue;
        const size_t place = work.sums(part, work.unit(b, kv_head), tile) + size_t(group);
        const float* from = pass.scratch.sums + place * kSumsOfWarpgroup + (warp_of_group * 32 + lane) * 4;
#pragma unroll
        for (int n = 0; n < kBoxColumns / 8; n++) {
            const float4 addend = *reinterpret_cast<const float4*>(from + n * (kWarpgroupThreads * 4));
            sums[0][n][0] += addend.x, sums[0][n][1] += addend.y;
            sums[0][n][2] += addend.z, sums[0][n][3] += addend.w;
        }
    }
    // With heads of 64, the second warpgroup computed the second half of the rows; with heads of 128, of the columns.
    const int row = warp_of_group * kWarpRows + (kHeadSize == kBoxColumns ? group * 64 : 0);
    const int column = kHeadSize == kBoxColumns ? 0 : group * kBoxColumns;
    const QueryRows<kRunRows, true> rows(at, kv_head, tile * kRows);
    const auto place = [&](int r) {
        const int position = rows.position(row + r);
        return position < at.seq_len ? int64_t(at.query(b, rows.head(row + r), position)) : -1;
    };
    scatter_rows<T, kBoxColumns>(op.dqkv.template as<T>() + column, op.dqkv.amax, &s.rows[0][0], warp * kWarpRows, sums,
                                 place, [&](int, int) { return op.scale; });
}

template <class T, int kHeadSize>
__global__ void __launch_bounds__(kThreads)
    attention_backward_prepare_kernel(const __grid_constant__ BackwardPass pass) {
    if constexpr (ptx::kHasHopper) prepare<T, kHeadSize>(pass);
}
template <class T, int kHeadSize>
__global__ void __launch_bounds__(kThreads)
    attention_backward_finish_kernel(const __grid_constant__ BackwardPass pass) {
    if constexpr (ptx::kHasHopper) finish<T, kHeadSize>(pass);
}

dim3 grid_of(const BackwardWork& work) {
    return dim3(unsigned(work.n_tiles), unsigned(work.n_kv_head), unsigned(work.batch));
}

}  // namespace

template <class T, int kHeadSize> void prepare_backward_sm90(const BackwardPass& pass, Stream stream) {
    launch(attention_backward_prepare_kernel<T, kHeadSize>,
           {"attention_backward_prepare", grid_of(pass.work), kThreads}, stream, pass);
}

template <class T, int kHeadSize> void finish_backward_sm90(const BackwardPass& pass, Stream stream) {
    launch(attention_backward_finish_kernel<T, kHeadSize>,
           {"attention_backward_finish", grid_of(pass.work), kThreads, kThreads / 32 * 16 * kBoxColumns * sizeof(T)},
           stream, pass);
}

template void prepare_backward_sm90<bf16, 64>(const BackwardPass&, Stream);
template void prepare_backward_sm90<bf16, 128>(const BackwardPass&, Stream);
template void prepare_backward_sm90<fp16, 64>(const BackwardPass&, Stream);
template void prepare_backward_sm90<fp16, 128>(const BackwardPass&, Stream);
template void finish_backward_sm90<bf16, 64>(const BackwardPass&, Stream);
template void finish_backward_sm90<bf16, 128>(const BackwardPass&, Stream);
template void finish_backward_sm90<fp16, 64>(const BackwardPass&, Stream);
template void finish_backward_sm90<fp16, 128>(const BackwardPass&, Stream);

}  // namespace ops

// Shared by the three kernels of attention_backward for sm_90a: the division of the work, and the scratch between them.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention/attention_layout.cuh"  // IWYU pragma: export
#include "kernels/cuda/attention/attention_sm90.cuh"    // IWYU pragma: export
#include "kernels/device.h"
#include "kernels/ops.h"

namespace ops {

inline constexpr int kBlockKeys = 128;
inline constexpr int kSumsOfWarpgroup = 64 * 64;  // of dQ, per tile of queries: a warpgroup's accumulator

inline constexpr int kTileNumbers = 8192;  // of a tile of queries
template <int kHeadSize> inline constexpr int kTileQueries = kTileNumbers / kHeadSize;

// The work of an op. The rows of a kv head are QueryRows<kRunRows, true>, in tiles. Its blocks of 128 keys are divided
// into parts; the kernel's blocks process one part each.
struct BackwardWork {
    int batch, n_kv_head, group, seq_len;
    int n_tiles, n_key_blocks, n_parts;

    explicit BackwardWork(const AttentionBackward& op)
        : batch(op.batch), n_kv_head(op.n_kv_head), group(op.n_head / op.n_kv_head), seq_len(op.seq_len) {
        const int tile_queries = kTileNumbers / op.head_size;
        const int rows = (seq_len + kRunRows - 1) / kRunRows * kRunRows * group;
        n_tiles = (rows + tile_queries - 1) / tile_queries;
        n_key_blocks = (seq_len + kBlockKeys - 1) / kBlockKeys;
        n_parts = parts_of(int64_t(seq_len) * group * op.head_size);
    }

    HOST_DEVICE int unit(int b, int kv_head) const { return b * n_kv_head + kv_head; }
    // The key block of a part's round. Rounds go through the parts in alternating directions, because an early key
    // block has more queries than a late one. If the result is not below n_key_blocks, the part is complete.
    HOST_DEVICE int key_block(int part, int round) const {
        return round * n_parts + (round % 2 ? n_parts - 1 - part : part);
    }
    // The first tile with a query at or after the block's first key.
    HOST_DEVICE int first_tile(int key_block, int tile_queries) const {
        return key_block * kBlockKeys * group / tile_queries;
    }
    // The index of a tile's sums of dQ in units of a warpgroup's accumulator.
    HOST_DEVICE size_t sums(int part, int unit, int tile) const {
        return ((size_t(part) * size_t(batch * n_kv_head) + size_t(unit)) * size_t(n_tiles) + size_t(tile)) * 2;
    }

private:
    // Parts decide the order of the sums of dQ, so their number depends only on what a kv head and its group are, not
    // on how many there are. Each part has its own sums in scratch, written and read once. With at least two key blocks
    // each, the parts have about the same work.
    int parts_of(int64_t queries_numbers) const {
        const int wanted = int(std::min<int64_t>(queries_numbers / (3 << 16), n_key_blocks / 2));
        return std::max(wanted, 1);
    }
};

// The arrays in scratch.
struct BackwardScratch {
    float* sums;        // (parts, batch, n_kv_head, tiles, 2, 64 * 64): dQ before its scale, as accumulators lie
    float* statistics;  // (batch, n_kv_head, tiles, 2, tile's rows): lse log2(e), then dout . out; 0 for other rows
    int* seen;          // (batch, tiles, 2, tile's rows): the first and the last key that a row sees
    int* tile_ends;     // (batch, key blocks): the end of the tiles with queries that see the key block
    size_t bytes;

    BackwardScratch(const BackwardWork& work, int head_size, void* scratch) {
        const size_t units = size_t(work.batch) * size_t(work.n_kv_head);
        const size_t tile_numbers = 2 * size_t(kTileNumbers / head_size) * size_t(work.n_tiles);
        bytes = 0;
        auto take = [&](auto*& array, size_t count) {
            array =
                scratch
                    ? reinterpret_cast<std::remove_reference_t<decltype(array)>>(static_cast<char*>(scratch) + bytes)
                    : nullptr;
            bytes += count * sizeof *array;
        };
        take(sums, work.sums(work.n_parts, 0, 0) * kSumsOfWarpgroup);
        take(statistics, units * tile_numbers);
        take(seen, size_t(work.batch) * tile_numbers);
        take(tile_ends, size_t(work.batch) * size_t(work.n_key_blocks));
    }
};

// Arguments of the kernels before and after the products.
struct BackwardPass {
    AttentionBackward op;
    BackwardWork work;
    BackwardScratch scratch;
};

// Computes everything in scratch except the sums. In attention_backward_sm90_passes.cu.
template <class T, int kHeadSize> void prepare_backward_sm90(const BackwardPass& pass, Stream stream);
// Adds the parts' sums of dQ in order, and stores them, scaled and rounded, in dqkv.
template <class T, int kHeadSize> void finish_backward_sm90(const BackwardPass& pass, Stream stream);

}  // namespace ops

// What the attention kernels share: the assignment of work to thread blocks, and the statistics of a query.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/shared/attention_layout.h"

namespace ops {

// A query's values that the backward op keeps between its kernels: exp(score - lse) is exp2(score log2(e) - lse_log2).
struct alignas(8) QueryStatistics {
    float lse_log2;
    float dout_out;  // dout . out
};

inline constexpr float kLog2E = 1.44269504f;

// One block of threads works on rows [begin, begin + block_rows) of one key-value head: its keys, or the queries of its
// group. The blocks of a head are neighbours, so that its keys and values stay in the L2 cache. Grid (blocks of a head,
// heads, batch): the compiler keeps what depends on blockIdx alone in uniform registers, of which there are enough.
struct AttentionTask {
    int batch, kv_head, begin;
};

enum class LongestBlock { first, last };  // under the causal mask the blocks of a head differ; the longest starts first

__device__ inline AttentionTask attention_task(int block_rows, LongestBlock longest) {
    const int block = int(longest == LongestBlock::first ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    return {int(blockIdx.z), int(blockIdx.y), block * block_rows};
}

// The queries of a key-value head as rows: kRun neighbouring queries of one head, then as many of the group's next head
// at the same positions. So a block's rows, whatever the group, see nearly the same keys, and those are read once for
// all of its heads. `begin` is a multiple of kRun. Ungrouped, a row is a position.
template <int kRun, bool kGrouped> struct QueryRows {
    int first_head, group, begin;

    __device__ __forceinline__ QueryRows(const AttentionLayout& at, int kv_head, int begin_row)
        : first_head(kGrouped ? kv_head * at.group() : kv_head), group(kGrouped ? at.group() : 1), begin(begin_row) {}

    // Of a row of the block; positions from seq_len on do not exist. They never fall from one row to the next but
    // within a group.
    __device__ __forceinline__ int head(int row) const {
        return kGrouped ? first_head + (begin + row) / kRun % group : first_head;
    }
    __device__ __forceinline__ int position(int row) const {
        return kGrouped ? (begin + row) / kRun / group * kRun + row % kRun : begin + row;
    }
    static int count(const AttentionLayout& at) {
        return kGrouped ? (at.seq_len + kRun - 1) / kRun * kRun * at.group() : at.seq_len;
    }
};

// A grid for this many rows of each of a sample's key-value heads.
template <class Op> dim3 attention_grid(const Op& op, int rows, int block_rows) {
    constexpr int kLargest = 65535;
    require(op.batch <= kLargest && op.n_kv_head <= kLargest,
            "attention: batch %d and %d heads; a grid holds %d of each", op.batch, op.n_kv_head, kLargest);
    return dim3(unsigned((rows + block_rows - 1) / block_rows), unsigned(op.n_kv_head), unsigned(op.batch));
}

// What a kernel is compiled for. `plain` and `dropout` are for GPT-2's attention: neither windows nor documents nor
// soft caps nor groups. `any` asks the op for each of them. Three and not one for every combination, since compiling
// them takes nvcc minutes; head sizes beside 64 and 128 have `any` alone.
enum class AttentionKind { plain, dropout, any };

// start.template operator()<kHeadSize, kKind>() of the kernel for the op; false if the head size has none.
template <class Op, class Start> bool for_attention_kernel(const Op& op, Start start) {
    using enum AttentionKind;
    const bool is_plain = !(op.window > 0 || op.softcap > 0 || op.first_key) && op.n_head == op.n_kv_head;
    const auto start_any = [&]<int kHeadSize>() { return start.template operator()<kHeadSize, any>(); };
    const auto start_best = [&]<int kHeadSize>() {
        if (!is_plain) return start_any.template operator()<kHeadSize>();
        return op.dropout ? start.template operator()<kHeadSize, dropout>()
                          : start.template operator()<kHeadSize, plain>();
    };
    if (op.head_size == 64) return start_best.template operator()<64>();
    if (op.head_size == 96) return start_any.template operator()<96>();
    if (op.head_size == 128) return start_best.template operator()<128>();
    if (op.head_size == 256) return start_any.template operator()<256>();
    return false;
}

template <class Op> void require_attention_sizes(const Op& op) {
    require(op.batch > 0 && op.seq_len > 0 && op.head_size > 0, "attention: batch %d, seq_len %d, head_size %d",
            op.batch, op.seq_len, op.head_size);
    require(op.n_kv_head > 0 && op.n_head > 0 && op.n_head % op.n_kv_head == 0,
            "attention: n_head %d is not a multiple of n_kv_head %d", op.n_head, op.n_kv_head);
    require(op.scale > 0, "attention: scale %g is not positive", double(op.scale));
    require(op.window >= 0 && op.softcap >= 0, "attention: window %d, softcap %g; 0 is none", op.window,
            double(op.softcap));
}

}  // namespace ops

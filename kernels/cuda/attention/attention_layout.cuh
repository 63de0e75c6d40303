// Shared by the attention kernels: the assignment of work to thread blocks, and the statistics of a query.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"

namespace ops {

// Values of a query that the backward op's kernels share. exp(score - lse) is exp2(score log2(e) - lse_log2).
struct alignas(8) QueryStatistics {
    float lse_log2;
    float dout_out;  // dout . out
};

// A thread block processes rows [begin, begin + block_rows) of one key-value head: its keys, or the queries of its
// group. Blocks of a head are adjacent in the grid, so that its keys and values stay in the L2 cache. The grid is
// (blocks of a head, heads, batch), so the compiler puts values that depend only on blockIdx into uniform registers.
struct AttentionTask {
    int batch, kv_head, begin;
};

enum class LongestBlock { first, last };  // causal: blocks of a head differ in length; start with the longest

__device__ inline AttentionTask attention_task(int block_rows, LongestBlock longest) {
    const int block = int(longest == LongestBlock::first ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    return {int(blockIdx.z), int(blockIdx.y), block * block_rows};
}

// The queries of a key-value head as rows: kRun adjacent queries of one head, then kRun queries of the group's next
// head at the same positions. So the rows of a block see nearly the same keys for any group size, and the keys are read
// once for all heads of the group. `begin` is a multiple of kRun. Without groups, a row is a position.
template <int kRun, bool kGrouped> struct QueryRows {
    int first_head, group, begin;

    __device__ __forceinline__ QueryRows(const AttentionLayout& at, int kv_head, int begin_row)
        : first_head(kGrouped ? kv_head * at.group() : kv_head), group(kGrouped ? at.group() : 1), begin(begin_row) {}

    // Head and position of a row of the block; positions from seq_len on do not exist. Positions never decrease from
    // row to row, except within a group.
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

// The grid for `rows` rows per key-value head of each sample.
template <class Op> dim3 attention_grid(const Op& op, int rows, int block_rows) {
    constexpr int kMax = 65535;
    require(op.batch <= kMax && op.n_kv_head <= kMax, "attention: batch %d and %d heads; the maximum is %d each",
            op.batch, op.n_kv_head, kMax);
    return dim3(unsigned((rows + block_rows - 1) / block_rows), unsigned(op.n_kv_head), unsigned(op.batch));
}

// The features that a kernel is compiled for. `plain` and `dropout` are for GPT-2's attention, without windows,
// documents, soft caps and groups. `any` checks the op for each of them at run time. There are three kinds instead of
// all combinations, because nvcc takes minutes to compile them; head sizes other than 64 and 128 have only `any`.
// `chunk` is `any` with the keys of a chunk; there, the other head sizes use the general kernels.
enum class AttentionKind { plain, dropout, any, chunk };
constexpr bool has_all_features(AttentionKind kind) { return kind >= AttentionKind::any; }

template <AttentionKind kKind, class T, class Op>
__device__ __forceinline__ KeyRows<T> key_rows(const Op& op, int b, int kv_head, int first = 0) {
    if constexpr (kKind == AttentionKind::chunk)
        return KeyRows<T>::of_chunk(op, b, kv_head, first);
    else
        return KeyRows<T>::of_qkv(op, b, kv_head, first);
}

template <AttentionKind kKind, class Op> __device__ __forceinline__ VisibleKeys visible_keys(const Op& op, int b) {
    if constexpr (kKind == AttentionKind::chunk)
        return VisibleKeys::of(op, b);
    else if constexpr (requires { op.first_key; })
        return VisibleKeys(op, b);
    else
        return VisibleKeys();
}

// Calls start.template operator()<kHeadSize, kKind>() for the op. Returns false if the head size has no kernel.
template <class Op, class Start> bool for_attention_kernel(const Op& op, Start start) {
    using enum AttentionKind;
    const bool is_plain = !(op.window > 0 || op.softcap > 0 || op.first_key) && op.n_head == op.n_kv_head;
    const auto start_best = [&]<int kHeadSize>() {
        if (op.chunk) return start.template operator()<kHeadSize, chunk>();
        if (!is_plain) return start.template operator()<kHeadSize, any>();
        return op.dropout ? start.template operator()<kHeadSize, dropout>()
                          : start.template operator()<kHeadSize, plain>();
    };
    if (op.head_size == 64) return start_best.template operator()<64>();
    if (op.head_size == 128) return start_best.template operator()<128>();
    if (op.chunk) return false;
    if (op.head_size == 96) return start.template operator()<96, any>();
    if (op.head_size == 256) return start.template operator()<256, any>();
    return false;
}

// Calls start.template operator()<kMaxHeadSize>() with the smallest size that holds head_size, for kernels without
// tensor cores.
template <class Start> void for_head_size(int head_size, Start start) {
    require(head_size <= 256, "attention: head_size is %d, but must be at most 256", head_size);
    if (head_size <= 64)
        start.template operator()<64>();
    else if (head_size <= 128)
        start.template operator()<128>();
    else
        start.template operator()<256>();
}

// So the kernel depends on the op's other arrays, and all chunks use one with the same units of running sums.
inline void require_aligned_chunk(std::initializer_list<ConstView> arrays) {
    require(are_aligned(16, arrays), "attention: the arrays of a chunk are not aligned to 16 bytes");
}

}  // namespace ops

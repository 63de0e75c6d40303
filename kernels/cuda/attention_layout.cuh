// What the attention kernels share: the assignment of work to thread blocks, and the statistics of a query.
#pragma once

#include <limits>

#include "kernels/attention_layout.h"
#include "kernels/check.h"
#include "kernels/cuda/vector.cuh"

namespace ops {

// A query's values that the backward op keeps between its kernels: exp(score - lse) is exp2(score log2(e) - lse_log2).
struct alignas(8) QueryStatistics {
    float lse_log2;
    float dout_out;  // dout . out
};

inline constexpr float kLog2E = 1.44269504f;

// One block of threads works on rows [begin, begin + block_rows) of one head. The blocks of a head are neighbours, so
// that its keys and values stay in the L2 cache. Grid (blocks of a head, heads, batch): the compiler keeps what depends
// on blockIdx alone in uniform registers, of which there are enough.
struct AttentionTask {
    int batch, head, begin;
};

enum class LongestBlock { first, last };  // under the causal mask the blocks of a head differ; the longest starts first

__device__ inline AttentionTask attention_task(int block_rows, LongestBlock longest) {
    const int block = int(longest == LongestBlock::first ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    return {int(blockIdx.z), int(blockIdx.y), block * block_rows};
}

template <class Op> dim3 attention_grid(const Op& op, int heads, int block_rows) {
    constexpr int kLargest = 65535;
    require(op.batch <= kLargest && heads <= kLargest, "attention: batch %d and %d heads; a grid holds %d of each",
            op.batch, heads, kLargest);
    return dim3(unsigned((op.seq_len + block_rows - 1) / block_rows), unsigned(heads), unsigned(op.batch));
}

template <class Op> void require_attention_sizes(const Op& op) {
    require(op.batch > 0 && op.seq_len > 0 && op.head_size > 0, "attention: batch %d, seq_len %d, head_size %d",
            op.batch, op.seq_len, op.head_size);
    require(op.n_kv_head > 0 && op.n_head > 0 && op.n_head % op.n_kv_head == 0,
            "attention: n_head %d is not a multiple of n_kv_head %d", op.n_head, op.n_kv_head);
    require(op.scale > 0, "attention: scale %g is not positive", double(op.scale));
}

}  // namespace ops

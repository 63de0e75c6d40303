// The memory layout of attention heads, and the assignment of work to thread blocks.
#pragma once

#include <cstddef>
#include <limits>

#include "kernels/check.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"

namespace ops {

// Element offsets into qkv and dqkv, out and dout, lse.
struct AttentionLayout {
    int seq_len, n_head, n_kv_head, head_size;

    template <class Op>
    HOST_DEVICE explicit AttentionLayout(const Op& op)
        : seq_len(op.seq_len), n_head(op.n_head), n_kv_head(op.n_kv_head), head_size(op.head_size) {}

    HOST_DEVICE int group() const { return n_head / n_kv_head; }  // query heads that share a key-value head
    HOST_DEVICE size_t qkv_step() const { return size_t(n_head + 2 * n_kv_head) * head_size; }
    HOST_DEVICE size_t out_step() const { return size_t(n_head) * head_size; }
    HOST_DEVICE size_t query(int b, int head, int t) const {
        return (size_t(b) * seq_len + t) * qkv_step() + size_t(head) * head_size;
    }
    HOST_DEVICE size_t key(int b, int kv_head, int t) const { return query(b, n_head + kv_head, t); }
    HOST_DEVICE size_t value(int b, int kv_head, int t) const { return query(b, n_head + n_kv_head + kv_head, t); }
    HOST_DEVICE size_t out(int b, int head, int t) const {
        return (size_t(b) * seq_len + t) * out_step() + size_t(head) * head_size;
    }
    HOST_DEVICE size_t lse(int b, int head, int t) const { return (size_t(b) * n_head + head) * seq_len + t; }
};

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

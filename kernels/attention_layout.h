// The memory layout of attention heads, the same in every backend.
#pragma once

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

}  // namespace ops

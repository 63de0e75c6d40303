// Checks the arguments of QK norm and RoPE, for both backends. Fails with Exit::internal and the op's name.
#pragma once

#include "kernels/base/check.h"
#include "kernels/ops.h"

namespace ops {

template <class Op> void require_heads(const char* name, const Op& op) {
    require(op.n_head > 0 && op.n_kv_head > 0 && op.head_size > 0, "%s: %d and %d heads of %d elements", name,
            op.n_head, op.n_kv_head, op.head_size);
    require(op.rotary >= 0 && op.rotary <= op.head_size && op.rotary % 2 == 0,
            "%s: rotary is %d, but must be even and at most the head size %d", name, op.rotary, op.head_size);
    require((op.rotary > 0) == (op.table != nullptr), "%s: rotary is %d, but table is %s", name, op.rotary,
            op.table ? "not null" : "null");
    require(op.rstd || (!op.q_weight && !op.k_weight), "%s: norm weights require rstd", name);
    require(op.batch % 2 == 0 || op.starts.first == op.starts.second,
            "%s: %d sequences are not two chunks each, at positions %d and %d", name, op.batch, op.starts.first,
            op.starts.second);
}

inline void require_valid(const QkNormRopeForward& op) { require_heads("qk_norm_rope_forward", op); }

inline void require_valid(const QkNormRopeBackward& op) {
    require_heads("qk_norm_rope_backward", op);
    require(op.raw || (!op.q_weight && !op.k_weight), "qk_norm_rope_backward: norm weights require raw");
    require(op.raw || op.qkv || !op.rstd, "qk_norm_rope_backward: a norm requires raw or qkv");
    require(op.rstd || (!op.dq_weight && !op.dk_weight), "qk_norm_rope_backward: weight gradients require rstd");
}

}  // namespace ops

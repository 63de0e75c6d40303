// A block with norms before attention and MLP, as in GPT-2 (Radford et al., "Language Models are Unsupervised Multitask
// Learners", section 2.3) and Llama. GptShape defines which parts it has:
//
//     residual_mid = residual + attn_proj(attention(heads(qkv(norm1(residual)))))
//     output = residual_mid + mlp(norm2(residual_mid))
//
// Adding a branch to the residual stream is fused with the next norm, so a block begins with the sum that the previous
// block left open. Dropout, if enabled, acts inside attention and on each branch before the sum. Read the backward pass
// from the bottom up: each line is the backward of one line of forward.
#include "model/block.h"

void block_forward(const LayerContext& x, const BlockWeights& w, ResidualSum in, const BlockActivations& a) {
    residual_norm_forward(x, w.norm1, in, a.residual, a.norm1);
    qkv_forward(x, w.qkv, a.norm1.out, a.qkv);
    heads_forward(x, w.q_norm, w.k_norm, a.qkv, a.attn);
    attention_forward(x, a.qkv, a.attn);
    row_parallel_forward(x, w.attn_proj, a.attn.out, a.attn_proj);
    dropout_forward(x, DropoutSite::attn_proj, a.attn_proj);
    residual_norm_forward(x, w.norm2, {a.residual, a.attn_proj}, a.residual_mid, a.norm2);
    mlp_forward(x, w.fc, w.fc_proj, a.norm2.out, a.mlp);
    dropout_forward(x, DropoutSite::mlp, a.mlp.out);
}

void block_backward(const LayerContext& x, const BlockWeights& w, const BlockActivations& a, const BlockGradients& d) {
    const ConstView dmlp = dropout_backward(x, DropoutSite::mlp, d.dresidual, d.dmlp);
    mlp_backward(x, w.fc, w.fc_proj, a.norm2.out, a.mlp, dmlp, d.dfc, d.dact, d.dbranch);
    residual_norm_backward(x, w.norm2, a.residual_mid, a.norm2, d.dbranch, d.dresidual, true);
    const ConstView dattn = dropout_backward(x, DropoutSite::attn_proj, d.dresidual, d.dattn);
    row_parallel_backward(x, w.attn_proj, a.attn.out, dattn, d.dbranch);
    attention_backward(x, a.qkv, a.attn, d.dbranch, d.dqkv);
    heads_backward(x, w.q_norm, w.k_norm, a.qkv, a.attn, d.dqkv);
    qkv_backward(x, w.qkv, a.norm1.out, d.dqkv, d.dbranch);
    residual_norm_backward(x, w.norm1, a.residual, a.norm1, d.dbranch, d.dresidual, true);
}

void block_backward_weights(const LayerContext& x, const BlockWeights& w, const BlockActivations& a,
                            const BlockGradients& d) {
    row_parallel_backward_weight(x, w.fc_proj, a.mlp.act, d.dmlp);
    column_parallel_backward_weight(x, w.fc, a.norm2.out, d.dfc);
    row_parallel_backward_weight(x, w.attn_proj, a.attn.out, d.dattn);
    column_parallel_backward_weight(x, w.qkv, a.norm1.out, d.dqkv);
}

// The backward pass: forward.cpp's list read upwards.
#include <cmath>

#include "model/sharding.h"
#include "model/state.h"

namespace {

// Brings back what forward's buffers no longer hold of this block.
template <class Act> void recompute_block(GptState<Act>& s, int layer) {
    const Recompute level = s.options.recompute;
    const auto& a = s.acts.block[size_t(layer)];
    if (level >= Recompute::norm) block_norm1_forward(s, layer);
    if (level >= Recompute::block) {
        block_body_forward(s, layer);
        return;
    }
    if (level >= Recompute::norm) block_norm2_forward(s, layer);
    if (level >= Recompute::gelu) {
        const size_t rows = size_t(s.options.batch) * size_t(s.options.seq_len);
        ops::gelu_forward<Act>({.out = a.fc_gelu, .inp = a.fc, .count = rows * size_t(s.options.shape.hidden())},
                               s.stream);
    }
}

// A linear layer's two gradients: dweight and dbias from what went in, dinp from the weight. With pre_gelu the layer's
// input was gelu(pre_gelu), and dinp becomes the gradient of pre_gelu.
template <class Act> struct LinearBackward {
    Act* dinp;            // (B T, k)  =
    float* dweight;       // (n, k)
    float* dbias;         // (n)
    const Act* dout;      // (B T, n)
    const Act* inp;       // (B T, k)
    const Act* weight;    // (n, k)
    const Act* pre_gelu;  // (B T, k), or null
    int n, k;
};

template <class Act> void linear_backward(GptState<Act>& s, const LinearBackward<Act>& linear, const MicroStep& micro) {
    const int BT = s.options.batch * s.options.seq_len;
    ops::matmul_backward_weight<Act>({.dweight = linear.dweight,
                                      .dbias = linear.dbias,
                                      .scratch = s.scratch,
                                      .dout = linear.dout,
                                      .inp = linear.inp,
                                      .rows = BT,
                                      .n = linear.n,
                                      .k = linear.k,
                                      .accumulate = micro.accumulate},
                                     s.stream);
    ops::matmul_backward_input<Act>({.dinp = linear.dinp,
                                     .dout = linear.dout,
                                     .weight = linear.weight,
                                     .pre_gelu = linear.pre_gelu,
                                     .rows = BT,
                                     .n = linear.n,
                                     .k = linear.k},
                                    s.stream);
}

// The gradient of a norm's input is added to the residual stream's, which already carries the way around the branch.
template <class Act> struct BranchNormBackward {
    float *dweight, *dbias;    // (C)
    const Act *inp, *weight;   // (B T, C), (C)
    const float *mean, *rstd;  // (B T)
};

template <class Act>
void branch_norm_backward(GptState<Act>& s, const BranchNormBackward<Act>& norm, const MicroStep& micro) {
    ops::norm_backward<Act>({.dinp = s.acts.dresidual,
                             .dweight = norm.dweight,
                             .dbias = norm.dbias,
                             .scratch = s.scratch,
                             .dout = s.acts.dbranch,
                             .inp = norm.inp,
                             .weight = norm.weight,
                             .mean = norm.mean,
                             .rstd = norm.rstd,
                             .rows = s.options.batch * s.options.seq_len,
                             .cols = s.options.shape.n_embd,
                             .accumulate_dinp = true,
                             .accumulate = micro.accumulate},
                            s.stream);
}

// Turns s.acts.dresidual from the gradient of the block's output into that of its input.
template <class Act> void block_backward(GptState<Act>& s, int layer, const MicroStep& micro) {
    const auto& w = s.params.block[size_t(layer)];
    const auto& g = s.grads.block[size_t(layer)];
    const auto& a = s.acts.block[size_t(layer)];
    const GptShape& shape = s.options.shape;
    const int C = shape.n_embd, H = shape.hidden(), QKV = shape.qkv_channels();
    Act *dresidual = s.acts.dresidual, *dbranch = s.acts.dbranch, *dwide = s.acts.dwide;

    // residual = residual_mid + fc_proj(gelu(fc(norm2(residual_mid))))
    linear_backward<Act>(
        s, {dwide, g.fc_proj_weight, g.fc_proj_bias, dresidual, a.fc_gelu, w.fc_proj_weight, a.fc, C, H}, micro);
    linear_backward<Act>(s, {dbranch, g.fc_weight, g.fc_bias, dwide, a.norm2, w.fc_weight, nullptr, H, C}, micro);
    branch_norm_backward<Act>(
        s, {g.norm2_weight, g.norm2_bias, a.residual_mid, w.norm2_weight, a.norm2_mean, a.norm2_rstd}, micro);

    // residual_mid = residual + attn_proj(attention(qkv(norm1(residual))))
    linear_backward<Act>(
        s, {dbranch, g.attn_proj_weight, g.attn_proj_bias, dresidual, a.attn, w.attn_proj_weight, nullptr, C, C},
        micro);
    ops::attention_backward<Act>({.dqkv = dwide,
                                  .scratch = s.scratch,
                                  .dout = dbranch,
                                  .qkv = a.qkv,
                                  .out = a.attn,
                                  .lse = a.attn_lse,
                                  .batch = s.options.batch,
                                  .seq_len = s.options.seq_len,
                                  .n_head = shape.n_head,
                                  .n_kv_head = shape.n_kv_head,
                                  .head_size = shape.head_size(),
                                  .scale = 1.0f / std::sqrt(float(shape.head_size()))},
                                 s.stream);
    linear_backward<Act>(s, {dbranch, g.qkv_weight, g.qkv_bias, dwide, a.norm1, w.qkv_weight, nullptr, QKV, C}, micro);
    branch_norm_backward<Act>(s, {g.norm1_weight, g.norm1_bias, a.residual, w.norm1_weight, a.norm1_mean, a.norm1_rstd},
                              micro);
}

}  // namespace

template <class Act> void trunk_backward(GptState<Act>& s, const MicroStep& micro) {
    const GptShape& shape = s.options.shape;
    const int B = s.options.batch, T = s.options.seq_len, C = shape.n_embd;

    ops::norm_backward<Act>({.dinp = s.acts.dresidual,
                             .dweight = s.grads.norm_f_weight,
                             .dbias = s.grads.norm_f_bias,
                             .scratch = s.scratch,
                             .dout = s.acts.dbranch,
                             .inp = s.acts.residual_f,
                             .weight = s.params.norm_f_weight,
                             .mean = s.acts.norm_f_mean,
                             .rstd = s.acts.norm_f_rstd,
                             .rows = B * T,
                             .cols = C,
                             .accumulate_dinp = false,
                             .accumulate = micro.accumulate},
                            s.stream);
    for (int layer = shape.n_layer - 1; layer >= 0; layer--) {
        const int index = s.layout.bucket_of_layer(layer);
        const Bucket& bucket = s.layout.buckets[size_t(index)];
        need_params(s, index);
        expect_params(s, index - 1);
        if (layer + 1 == bucket.first_layer + bucket.n_layers) begin_grads(s, index);
        recompute_block(s, layer);
        block_backward(s, layer, micro);
        if (layer == bucket.first_layer) end_grads(s, index, micro);
    }
    // The tied head has written or added to dwte already.
    ops::embedding_backward<Act>({.dwte = s.grads.wte,
                                  .dwpe = s.grads.wpe,
                                  .scratch = s.scratch,
                                  .dout = s.acts.dresidual,
                                  .tokens = s.tokens,
                                  .batch = B,
                                  .seq_len = T,
                                  .channels = C,
                                  .vocab = shape.padded_vocab(),
                                  .n_positions = shape.n_positions,
                                  .accumulate = micro.accumulate},
                                 s.stream);
    end_grads(s, 0, micro);
}

template void trunk_backward(GptState<float>&, const MicroStep&);
template void trunk_backward(GptState<bf16>&, const MicroStep&);
template void trunk_backward(GptState<fp16>&, const MicroStep&);

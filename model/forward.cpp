// The forward pass, one statement per op. backward.cpp is the same list read upwards.
#include <algorithm>
#include <cmath>

#include "model/sharding.h"
#include "model/state.h"

template <class Act> void block_norm1_forward(GptState<Act>& s, int layer) {
    const auto& w = s.params.block[size_t(layer)];
    const auto& a = s.acts.block[size_t(layer)];
    ops::norm_forward<Act>({.out = a.norm1,
                            .mean = a.norm1_mean,
                            .rstd = a.norm1_rstd,
                            .inp = a.residual,
                            .weight = w.norm1_weight,
                            .bias = w.norm1_bias,
                            .rows = s.options.batch * s.options.seq_len,
                            .cols = s.options.shape.n_embd,
                            .eps = kNormEps},
                           s.stream);
}

template <class Act> void block_norm2_forward(GptState<Act>& s, int layer) {
    const auto& w = s.params.block[size_t(layer)];
    const auto& a = s.acts.block[size_t(layer)];
    ops::norm_forward<Act>({.out = a.norm2,
                            .mean = a.norm2_mean,
                            .rstd = a.norm2_rstd,
                            .inp = a.residual_mid,
                            .weight = w.norm2_weight,
                            .bias = w.norm2_bias,
                            .rows = s.options.batch * s.options.seq_len,
                            .cols = s.options.shape.n_embd,
                            .eps = kNormEps},
                           s.stream);
}

// From the block's first norm to the MLP's activation.
template <class Act> void block_body_forward(GptState<Act>& s, int layer) {
    const auto& w = s.params.block[size_t(layer)];
    const auto& a = s.acts.block[size_t(layer)];
    const GptShape& shape = s.options.shape;
    const int B = s.options.batch, T = s.options.seq_len, BT = B * T, C = shape.n_embd;

    ops::matmul_forward<Act>({.out = a.qkv,
                              .pre_gelu = nullptr,
                              .inp = a.norm1,
                              .weight = w.qkv_weight,
                              .bias = w.qkv_bias,
                              .rows = BT,
                              .n = shape.qkv_channels(),
                              .k = C},
                             s.stream);
    ops::attention_forward<Act>({.out = a.attn,
                                 .lse = a.attn_lse,
                                 .qkv = a.qkv,
                                 .batch = B,
                                 .seq_len = T,
                                 .n_head = shape.n_head,
                                 .n_kv_head = shape.n_kv_head,
                                 .head_size = shape.head_size(),
                                 .scale = 1.0f / std::sqrt(float(shape.head_size()))},
                                s.stream);
    ops::matmul_forward<Act>({.out = s.acts.branch,
                              .pre_gelu = nullptr,
                              .inp = a.attn,
                              .weight = w.attn_proj_weight,
                              .bias = w.attn_proj_bias,
                              .rows = BT,
                              .n = C,
                              .k = C},
                             s.stream);

    ops::residual_norm_forward<Act>({.residual = a.residual_mid,
                                     .out = a.norm2,
                                     .mean = a.norm2_mean,
                                     .rstd = a.norm2_rstd,
                                     .inp = a.residual,
                                     .branch = s.acts.branch,
                                     .weight = w.norm2_weight,
                                     .bias = w.norm2_bias,
                                     .rows = BT,
                                     .cols = C,
                                     .eps = kNormEps},
                                    s.stream);
    ops::matmul_forward<Act>({.out = a.fc_gelu,
                              .pre_gelu = a.fc,
                              .inp = a.norm2,
                              .weight = w.fc_weight,
                              .bias = w.fc_bias,
                              .rows = BT,
                              .n = shape.hidden(),
                              .k = C},
                             s.stream);
}

namespace {

// The MLP's second product, added to the residual and normalised for whoever comes next: the next block, or the head.
template <class Act> void block_end_forward(GptState<Act>& s, int layer) {
    const auto& w = s.params.block[size_t(layer)];
    const auto& a = s.acts.block[size_t(layer)];
    const int BT = s.options.batch * s.options.seq_len, C = s.options.shape.n_embd;
    const bool is_last = layer + 1 == s.options.shape.n_layer;
    const auto* next = is_last ? nullptr : &s.acts.block[size_t(layer) + 1];
    const auto* next_w = is_last ? nullptr : &s.params.block[size_t(layer) + 1];

    ops::matmul_forward<Act>({.out = s.acts.branch,
                              .pre_gelu = nullptr,
                              .inp = a.fc_gelu,
                              .weight = w.fc_proj_weight,
                              .bias = w.fc_proj_bias,
                              .rows = BT,
                              .n = C,
                              .k = s.options.shape.hidden()},
                             s.stream);
    ops::residual_norm_forward<Act>({.residual = is_last ? s.acts.residual_f : next->residual,
                                     .out = is_last ? s.acts.norm_f : next->norm1,
                                     .mean = is_last ? s.acts.norm_f_mean : next->norm1_mean,
                                     .rstd = is_last ? s.acts.norm_f_rstd : next->norm1_rstd,
                                     .inp = a.residual_mid,
                                     .branch = s.acts.branch,
                                     .weight = is_last ? s.params.norm_f_weight : next_w->norm1_weight,
                                     .bias = is_last ? s.params.norm_f_bias : next_w->norm1_bias,
                                     .rows = BT,
                                     .cols = C,
                                     .eps = kNormEps},
                                    s.stream);
}

}  // namespace

template <class Act> void trunk_forward(GptState<Act>& s) {
    need_params(s, 0);
    ops::embedding_forward<Act>({.out = s.acts.block[0].residual,
                                 .tokens = s.tokens,
                                 .wte = s.params.wte,
                                 .wpe = s.params.wpe,
                                 .batch = s.options.batch,
                                 .seq_len = s.options.seq_len,
                                 .channels = s.options.shape.n_embd},
                                s.stream);
    const int last = s.options.shape.n_layer - 1;
    need_params(s, s.layout.bucket_of_layer(0));
    block_norm1_forward(s, 0);
    for (int layer = 0; layer <= last; layer++) {
        const int bucket = s.layout.bucket_of_layer(layer);
        expect_params(s, bucket + 1);
        block_body_forward(s, layer);
        if (layer < last) need_params(s, s.layout.bucket_of_layer(layer + 1));
        block_end_forward(s, layer);
    }
}

template <class Act> void head_forward_backward(GptState<Act>& s, Pass pass, const MicroStep& micro) {
    const GptShape& shape = s.options.shape;
    const int BT = s.options.batch * s.options.seq_len, C = shape.n_embd, Vp = shape.padded_vocab();
    const int chunk = std::min(s.options.head_rows, BT);

    if (pass == Pass::train) begin_grads(s, 0);
    for (int row = 0; row < BT; row += chunk) {
        const int rows = std::min(chunk, BT - row);
        const Act* norm_f = s.acts.norm_f + size_t(row) * size_t(C);
        ops::matmul_forward<Act>({.out = s.acts.logits,
                                  .pre_gelu = nullptr,
                                  .inp = norm_f,
                                  .weight = s.params.wte,
                                  .bias = nullptr,
                                  .rows = rows,
                                  .n = Vp,
                                  .k = C},
                                 s.stream);
        ops::cross_entropy<Act>({.logits = s.acts.logits,
                                 .loss = s.acts.loss + row,
                                 .targets = s.targets + row,
                                 .loss_scale = &s.scalars->loss_scale,
                                 .rows = rows,
                                 .vocab = shape.vocab_size,
                                 .padded_vocab = Vp,
                                 .grad_scale = micro.grad_scale,
                                 .write_dlogits = pass == Pass::train},
                                s.stream);
        if (pass == Pass::evaluate) continue;

        ops::matmul_backward_weight<Act>({.dweight = s.grads.wte,
                                          .dbias = nullptr,
                                          .scratch = s.scratch,
                                          .dout = s.acts.logits,
                                          .inp = norm_f,
                                          .rows = rows,
                                          .n = Vp,
                                          .k = C,
                                          .accumulate = micro.accumulate || row > 0},
                                         s.stream);
        ops::matmul_backward_input<Act>({.dinp = s.acts.dbranch + size_t(row) * size_t(C),
                                         .dout = s.acts.logits,
                                         .weight = s.params.wte,
                                         .pre_gelu = nullptr,
                                         .rows = rows,
                                         .n = Vp,
                                         .k = C},
                                        s.stream);
    }
    ops::loss_sum({.out = s.sums + step_sums(s).loss(s.options.rank, micro.index),
                   .loss = s.acts.loss,
                   .rows = BT,
                   .accumulate = false},
                  s.stream);
}

#define INSTANTIATE(Act)                                    \
    template void block_norm1_forward(GptState<Act>&, int); \
    template void block_norm2_forward(GptState<Act>&, int); \
    template void block_body_forward(GptState<Act>&, int);  \
    template void trunk_forward(GptState<Act>&);            \
    template void head_forward_backward(GptState<Act>&, Pass, const MicroStep& micro);
INSTANTIATE(float)
INSTANTIATE(bf16)
INSTANTIATE(fp16)
#undef INSTANTIATE

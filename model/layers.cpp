#include "model/layers.h"

#include <algorithm>
#include <cmath>

void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out) {
    run(x.stream, ops::embedding_forward,
        {.out = out.view,
         .tokens = tokens,
         .wte = wte.weight.value,
         .wpe = wpe.weight.value,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .channels = wte.weight.cols});
}

void embedding_backward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                        ConstView dout) {
    run(x.stream, ops::embedding_backward,
        {.dwte = wte.weight.grad,
         .dwpe = wpe.weight.grad,
         .scratch = x.scratch,
         .dout = dout,
         .tokens = tokens,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .channels = wte.weight.cols,
         .vocab = wte.weight.rows,
         .n_positions = wpe.weight.rows,
         .accumulate = x.accumulate});
}

void residual_norm_forward(const LayerContext& x, const LayerWeights& w, ResidualSum in, const Activation& residual,
                           const NormActivations& norm) {
    const bool adds = in.branch && !x.has(residual);
    if (!adds && x.has(norm.out)) return;
    run(x.stream, ops::residual_norm_forward,
        {.residual = adds ? residual.view : nullptr,
         .out = norm.out.view,
         .mean = norm.mean.view.as<float>(),
         .rstd = norm.rstd.view.as<float>(),
         .inp = adds ? in.residual : residual,
         .branch = adds ? in.branch : nullptr,
         .weight = w.weight.value,
         .bias = w.bias.value,
         .rows = x.rows,
         .cols = w.weight.rows,
         .eps = kNormEps},
        {w.weight.name});
}

void residual_norm_backward(const LayerContext& x, const LayerWeights& w, ConstView residual,
                            const NormActivations& norm, ConstView dout, View dresidual, bool accumulate_dresidual) {
    run(x.stream, ops::norm_backward,
        {.dinp = dresidual,
         .dweight = w.weight.grad,
         .dbias = w.bias.grad,
         .scratch = x.scratch,
         .dout = dout,
         .inp = residual,
         .weight = w.weight.value,
         .mean = norm.mean.view.as<float>(),
         .rstd = norm.rstd.view.as<float>(),
         .rows = x.rows,
         .cols = w.weight.rows,
         .accumulate_dinp = accumulate_dresidual,
         .accumulate = x.accumulate},
        {w.weight.name});
}

void linear_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                    View pre_activation) {
    if (x.has(out)) return;
    run(x.stream, ops::matmul_forward,
        {.out = out.view,
         .pre_activation = pre_activation,
         .inp = inp,
         .weight = w.weight.value,
         .bias = w.bias.value,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = pre_activation ? ActivationFunction::gelu_new : ActivationFunction::none},
        {w.weight.name});
}

void linear_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                     ConstView pre_activation) {
    run(x.stream, ops::matmul_backward_weight,
        {.dweight = w.weight.grad,
         .dbias = w.bias.grad,
         .scratch = x.scratch,
         .dout = dout,
         .inp = inp,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .accumulate = x.accumulate},
        {w.weight.name});
    run(x.stream, ops::matmul_backward_input,
        {.dinp = dinp,
         .dout = dout,
         .weight = w.weight.value,
         .kept = pre_activation,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = pre_activation ? ActivationFunction::gelu_new : ActivationFunction::none},
        {w.weight.name});
}

static ops::Dropout dropout_op(const LayerContext& x, DropoutSite site, View out, ConstView inp) {
    return {.out = out,
            .inp = inp,
            .mask = x.dropout_at(site),
            .batch = x.batch,
            .count = size_t(x.seq_len) * size_t(x.shape->n_embd)};
}

void dropout_forward(const LayerContext& x, DropoutSite site, const Activation& out) {
    if (!x.dropout || x.has(out)) return;
    run(x.stream, ops::dropout, dropout_op(x, site, out.view, out));
}

ConstView dropout_backward(const LayerContext& x, DropoutSite site, ConstView dout, View buffer) {
    if (!x.dropout) return dout;
    run(x.stream, ops::dropout, dropout_op(x, site, buffer, dout));
    return buffer;
}

void attention_forward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn) {
    if (x.has(attn.out)) return;
    run(x.stream, ops::attention_forward,
        {.out = attn.out.view,
         .lse = attn.lse.view.as<float>(),
         .qkv = qkv,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .n_head = x.shape->n_head,
         .n_kv_head = x.shape->n_kv_head,
         .head_size = x.shape->head_size(),
         .scale = 1.0f / std::sqrt(float(x.shape->head_size())),
         .dropout = x.dropout_at(DropoutSite::attention)});
}

void attention_backward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn, ConstView dout,
                        View dqkv) {
    run(x.stream, ops::attention_backward,
        {.dqkv = dqkv,
         .scratch = x.scratch,
         .dout = dout,
         .qkv = qkv,
         .out = attn.out,
         .lse = attn.lse.view.as<float>(),
         .batch = x.batch,
         .seq_len = x.seq_len,
         .n_head = x.shape->n_head,
         .n_kv_head = x.shape->n_kv_head,
         .head_size = x.shape->head_size(),
         .scale = 1.0f / std::sqrt(float(x.shape->head_size())),
         .dropout = x.dropout_at(DropoutSite::attention)});
}

void mlp_forward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                 const MlpActivations& mlp) {
    if (!x.has(mlp.fc))
        linear_forward(x, fc, inp, mlp.gelu, mlp.fc.view);
    else if (!x.has(mlp.gelu))
        run(x.stream, ops::activation_forward,
            {.out = mlp.gelu.view, .inp = mlp.fc, .count = size_t(x.rows) * size_t(fc.weight.rows)});
    linear_forward(x, proj, mlp.gelu, mlp.out);
}

void mlp_backward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                  const MlpActivations& mlp, ConstView dout, View dhidden, View dinp) {
    linear_backward(x, proj, mlp.gelu, dout, dhidden, mlp.fc);
    linear_backward(x, fc, inp, dhidden, dinp);
}

void head_forward_backward(const LayerContext& x, const LayerWeights& wte, ConstView inp, int head_rows,
                           const HeadPass& head) {
    const size_t C = size_t(wte.weight.cols);
    const bool is_training = bool(head.dinp);
    LayerContext part = x;
    for (int row = 0; row < x.rows; row += head_rows) {
        part.rows = std::min(head_rows, x.rows - row);
        part.accumulate = x.accumulate || row > 0;
        const ConstView rows = inp.from(size_t(row) * C);
        linear_forward(part, wte, rows, {head.logits});
        run(x.stream, ops::cross_entropy,
            {.logits = head.logits,
             .loss = head.loss + row,
             .targets = head.targets + row,
             .loss_scale = head.loss_scale,
             .rows = part.rows,
             .vocab = x.shape->vocab_size,
             .padded_vocab = wte.weight.rows,
             .grad_scale = head.grad_scale,
             .write_dlogits = is_training});
        if (is_training) linear_backward(part, wte, rows, head.logits, head.dinp.from(size_t(row) * C));
    }
}

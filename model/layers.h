// The layers of a GPT as forward/backward pairs: each forward function stands next to the one that undoes it.
//
// A backward function takes the gradient of the layer's output, writes the gradient of its input and adds to, or
// overwrites, the gradients of its parameters. Shapes are documented in activations.h and tensors.cpp.
#pragma once

#include "kernels/op_work.h"
#include "model/activations.h"
#include "model/tensors.h"

// Where dropout acts: on the sum of the embeddings; and in each block on the probabilities of attention, and on what
// attention and MLP add to the residual stream. A mask's site is kDropoutsPerBlock * layer + this.
enum class DropoutSite : uint32_t { embedding, attention, attn_proj, mlp };
inline constexpr uint32_t kDropoutsPerBlock = 3;

// The arguments of every layer besides its parameters and activations.
struct LayerContext {
    const GptShape* shape;
    int batch, seq_len;  // B, T
    int rows;            // B T, or fewer for the head
    OpStream stream;
    void* scratch;                  // as large as the largest op needs; null where there is no backward pass
    bool accumulate;                // parameter gradients are added to the present values
    bool is_recomputing;            // forward runs again for backward: what has been kept is not computed
    ops::DropoutMask dropout = {};  // of this pass, none in evaluation; its site is that of DropoutSite::embedding

    // Of block `layer`.
    LayerContext of_block(size_t layer) const {
        LayerContext x = *this;
        x.stream.layer = int(layer);
        x.dropout.site = uint32_t(layer) * kDropoutsPerBlock;
        return x;
    }
    ops::DropoutMask dropout_at(DropoutSite site) const {
        ops::DropoutMask mask = dropout;
        mask.site += uint32_t(site);
        return mask;
    }
    bool has(const Activation& activation) const { return is_recomputing && activation.is_kept; }
};

// The residual stream and what a layer adds to it. No branch: nothing is to be added.
struct ResidualSum {
    ConstView residual, branch;
};

inline constexpr float kNormEps = 1e-5f;  // GPT-2's

// out = wte[token] + wpe[position]
void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out);
// Adds to the gradient of wte, which already holds the tied head's part.
void embedding_backward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                        ConstView dout);

// residual = in.residual + in.branch, out = norm(residual). Without a branch `residual` is the input.
void residual_norm_forward(const LayerContext& x, const LayerWeights& w, ResidualSum in, const Activation& residual,
                           const NormActivations& norm);
// dresidual = the gradient of `residual`, added to the stream's own gradient with accumulate_dresidual.
void residual_norm_backward(const LayerContext& x, const LayerWeights& w, ConstView residual,
                            const NormActivations& norm, ConstView dout, View dresidual, bool accumulate_dresidual);

// out = inp weight^T + bias. With pre_activation this is the sum, and out = gelu(pre_activation).
void linear_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                    View pre_activation = nullptr);
// With pre_activation `inp` is gelu(pre_activation), and dinp becomes the gradient of pre_activation.
void linear_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                     ConstView pre_activation = nullptr);

// Drops elements of a layer's output in place, by the pass's mask of the site; does nothing in a pass without dropout.
void dropout_forward(const LayerContext& x, DropoutSite site, const Activation& out);
// Returns the gradient of what was dropped from: in `buffer`, which may be `dout`; `dout` in a pass without dropout.
ConstView dropout_backward(const LayerContext& x, DropoutSite site, ConstView dout, View buffer);

// Causal self-attention over the packed queries, keys and values.
void attention_forward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn);
void attention_backward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn, ConstView dout,
                        View dqkv);

// out = proj(gelu(fc(inp)))
void mlp_forward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                 const MlpActivations& mlp);
// dhidden: buffer for the gradient of fc's output. dinp may be dout.
void mlp_backward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                  const MlpActivations& mlp, ConstView dout, View dhidden, View dinp);

// The head's arguments besides the layer's input, and its outputs.
struct HeadPass {
    View logits;              // (head rows, Vp), buffer: a few rows at a time, overwritten with their gradients
    float* loss;              // (B, T)  =
    const int* targets;       // (B, T)
    const float* loss_scale;  // (1)
    float grad_scale;         // weight of each target's loss
    View dinp;                // (B, T, C)  =, or null for the forward pass only
};

// Logits and losses, and with head.dinp the gradients of wte and of the input, for as many rows at a time as fit into
// head.logits, so that logits and their gradients never exist for all rows at once.
void head_forward_backward(const LayerContext& x, const LayerWeights& wte, ConstView inp, int head_rows,
                           const HeadPass& head);

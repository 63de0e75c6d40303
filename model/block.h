// One block of the model, forward and backward.
#pragma once

#include "kernels/tensor.h"
#include "model/activations.h"
#include "model/layers.h"
#include "model/tensors.h"

// The gradients that a block's backward pass works on. The last ones are of the outputs of the linear layers and of the
// gate.
struct BlockGradients {
    View dresidual;  // (B, T, C), of the residual stream: the block's output on entry, its input on return
    View dbranch;    // (B, T, max(C, NH HS)), buffer
    View dmlp;       // (B, T, C), buffer: of fc_proj
    View dact;       // (B, T, hidden), buffer
    View dfc;        // (B, T, fc channels), buffer
    View dattn;      // (B, T, C), buffer: of attn_proj
    View dqkv;       // (B, T, qkv channels), buffer
};

// `in` is the block's input; the block computes its sum. The block's last branch is left in a.mlp.out; the next block's
// input is the sum of a.residual_mid and this branch. With x.is_recomputing, computes only the activations that
// backward needs and that were not kept.
void block_forward(const LayerContext& x, const BlockWeights& w, ResidualSum in, const BlockActivations& a);

// With x.defers_weights, leaves the gradients of the linear layers' parameters to block_backward_weights(), for which
// the activations and dmlp, dfc, dattn and dqkv must be kept.
void block_backward(const LayerContext& x, const BlockWeights& w, const BlockActivations& a, const BlockGradients& d);
void block_backward_weights(const LayerContext& x, const BlockWeights& w, const BlockActivations& a,
                            const BlockGradients& d);

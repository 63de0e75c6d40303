// One block of the model, forward and backward.
#pragma once

#include "model/layers.h"

// The gradients that a block's backward pass works on.
struct BlockGradients {
    View dresidual;  // (B, T, C), of the residual stream: of the block's output before, of its input after
    View dbranch;    // (B, T, max(C, NH HS)), buffer
    View dwide;      // (B, T, max(fc channels, qkv channels, C)), buffer
};

// `in` is the block's input, whose sum the block computes. Its last branch is left in a.mlp.out; the sum of that and
// a.residual_mid is the next block's input. With x.is_recomputing only what backward needs and was not kept is
// computed.
void block_forward(const LayerContext& x, const BlockWeights& w, ResidualSum in, const BlockActivations& a);

void block_backward(const LayerContext& x, const BlockWeights& w, const BlockActivations& a, const BlockGradients& d);

// Activations: what forward keeps for backward, and the buffers of both. The table in activations.cpp lists which of
// them each recompute level keeps.
#pragma once

#include "model/arena.h"
#include "model/options.h"

// The output of a layer, in memory.
struct Activation {
    View view;
    bool is_kept = true;  // until backward has read it; else backward computes it again

    operator ConstView() const { return view; }
};

struct NormActivations {
    Activation out;         // (B, T, C)
    Activation mean, rstd;  // (B, T)
};

struct AttentionActivations {
    Activation out;  // (B, T, C)
    Activation lse;  // (B, NH, T)
};

struct MlpActivations {
    Activation fc;    // (B, T, 4C), before the activation function
    Activation gelu;  // (B, T, 4C), after it
    Activation out;   // (B, T, C)
};

struct BlockActivations {
    Activation residual;  // (B, T, C), the block's input
    NormActivations norm1;
    Activation qkv;  // (B, T, qkv channels)
    AttentionActivations attn;
    Activation attn_proj;     // (B, T, C)
    Activation residual_mid;  // (B, T, C), residual + attn_proj
    NormActivations norm2;
    MlpActivations mlp;
};

struct GptActivations {
    std::vector<BlockActivations> block;  // (L)
    Activation residual_f;                // (B, T, C), the last block's output
    NormActivations norm_f;
    Activation logits;     // (head rows, Vp), overwritten with their gradients
    Activation loss;       // (B, T)
    Activation dresidual;  // (B, T, C), gradient of the residual stream, updated block by block
    Activation dbranch;    // (B, T, C), gradient of a norm's or of attention's output
    Activation dwide;      // (B, T, 4C), gradient of fc, then of qkv
};

// Allocates every activation in the arena, which only counts the bytes if it has no memory.
GptActivations place_activations(const GptOptions& options, Arena& arena);

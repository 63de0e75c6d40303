// Activations: the tensors that forward keeps for backward, and the buffers of both. The table in activations.cpp lists
// which of them each recompute level keeps.
#pragma once

#include "kernels/tensor.h"
#include "model/arena.h"
#include "model/options.h"
#include "model/schedule.h"

// (B, T) is this rank's part of the batch: with context parallelism, two chunks of each sequence
// (ContextParallel::part). With tensor parallelism, a rank has B T / ranks rows of an activation with C channels and of
// the norms' statistics, in the order of (B, T), and its part of other channels for all rows.

// The output of a layer, in memory.
struct Activation {
    View view;
    bool is_kept = true;  // until backward has read it; else backward recomputes it
    View on_host = {};    // its memory until backward, if other activations use the view's too: see model/offload.h
    int window = 0;       // number of the view, if on_host

    operator ConstView() const { return view; }
};

// Activations that a model does not need are null.
struct NormActivations {
    Activation out;         // (B, T, C)
    Activation mean, rstd;  // (B, T); no mean with RMSNorm
};

struct AttentionActivations {
    Activation raw;   // (B, T, (NH + NKV) HS), queries and keys before QK norm with weights
    Activation rstd;  // (B, T, NH + NKV), of QK norm
    Activation out;   // (B, T, NH HS)
    Activation lse;   // (B, NH, T)
};

struct MlpActivations {
    Activation fc;   // (B, T, fc channels), before the activation function
    Activation act;  // (B, T, hidden), after it and the gate
    Activation out;  // (B, T, C)
};

struct BlockActivations {
    Activation residual;  // (B, T, C), the block's input
    NormActivations norm1;
    Activation qkv;  // (B, T, qkv channels), queries and keys as attention reads them
    AttentionActivations attn;
    Activation attn_proj;     // (B, T, C)
    Activation residual_mid;  // (B, T, C), residual + attn_proj
    NormActivations norm2;
    MlpActivations mlp;
    Activation dmlp, dfc, dattn, dqkv;  // as in BlockGradients, if a pass of weights needs them
};

// The activations of one micro-step on a stage. All micro-steps share the buffers from `gathered`.
struct GptActivations {
    Activation embedding;                 // (B, T, C), if it is normed
    NormActivations norm_e;               // its out is the first block's residual
    std::vector<BlockActivations> block;  // (L), null on other stages
    Activation residual_f;                // (B, T, C), the last block's output
    NormActivations norm_f;
    Activation gathered;   // (B, T, C), all ranks' rows of a layer's input or gradient, or a term of their sum
    Activation terms;      // (parts, B, T, C), of a sum over ranks
    Activation logits;     // (head rows, Vp), overwritten with their gradients
    Activation loss;       // (B, T)
    Activation dresidual;  // (B, T, C), gradient of the residual stream, updated block by block
    Activation dbranch;    // (B, T, max(C, NH HS)), gradient of a norm's or of attention's output
    Activation dwide;      // (B, T, max(fc channels, qkv channels, C)), gradient of fc, then of qkv
};

// Returns the number of elements of a rank's part of the residual stream in a pass.
size_t residual_elements(const GptOptions& options);

// Returns this rank's passes of a step.
std::vector<Pass> passes_of(const GptOptions& options, int micro_steps);

// Returns the number of micro-steps whose gradients of linear layers' outputs a stage keeps for their passes of
// weights.
int micro_steps_deferred(const GptOptions& options);

// Returns the number of micro-steps whose activations a stage keeps at the same time, for each of its parts of the
// layers.
std::vector<int> micro_steps_in_flight(const GptOptions& options);

// Allocates every activation in the arena; an arena without memory only counts the bytes. Micro-step m of a part of the
// layers has the activations m modulo micro_steps_in_flight(). At least one.
std::vector<GptActivations> place_activations(const GptOptions& options, Arena& arena);

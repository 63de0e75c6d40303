// What one rank trains: the model's shape, the batch, precision, recomputation, the optimizer and the rank's place.
#pragma once

#include <cstddef>
#include <string>

#include "kernels/numeric.h"
#include "model/shape.h"

// What backward computes again instead of forward keeping it; each level includes the ones before it.
enum class Recompute {
    none,
    gelu,   // the MLP's activation
    norm,   // the outputs of the two norms
    block,  // everything inside a block but its input
};

inline Recompute recompute_named(const std::string& name) {
    return name == "gelu"    ? Recompute::gelu
           : name == "norm"  ? Recompute::norm
           : name == "block" ? Recompute::block
                             : Recompute::none;
}

enum class OptimizerKind { adamw, sgd };

// The optimizer and its settings, which stay the same for a whole run; what changes from step to step is StepSettings.
struct OptimizerSettings {
    OptimizerKind kind = OptimizerKind::adamw;
    double beta1 = 0.9, beta2 = 0.95;  // AdamW's
    float eps = 1e-8f, weight_decay = 0.1f;
    float momentum = 0.9f;   // SGD's
    float grad_clip = 1.0f;  // largest global norm of the gradients; 0 for no clipping
};

// Everything that decides how much memory one rank needs, and what a step does with it.
struct GptOptions {
    GptShape shape;
    int batch = 0;    // B, sequences per rank and micro-step
    int seq_len = 0;  // T, at most shape.n_positions
    Dtype precision = Dtype::fp32;
    Recompute recompute = Recompute::none;
    OptimizerSettings optimizer;
    int head_rows = 0;     // rows of logits held at a time, at least 1
    bool training = true;  // false: forward only, without gradients, optimizer state and backward's buffers
    int micro_steps = 1;   // per step, on each rank
    int rank = 0, ranks = 1;
    // ZeRO (Rajbhandari et al., arXiv 1910.02054): what each rank keeps its share of only. 1: masters and optimizer
    // state; 2: gradients too, also while they accumulate; 3: parameters too.
    int zero_stage = 0;
    bool deterministic_reduce = false;  // gradients add up in the same order for any number of ranks and micro-steps
    size_t bucket_bytes = 0;            // successive blocks' gradients travel together up to this size

    bool is_sharded() const { return zero_stage > 0 && ranks > 1; }
    // Whole gradients exist until the end of the step; else each block's are handed over as soon as they are there.
    bool keeps_whole_gradients() const { return !is_sharded() || zero_stage == 1 || deterministic_reduce; }
    bool keeps_whole_parameters() const { return !is_sharded() || zero_stage < 3; }
};

// The options of one rank's training: the model's shape, the batch, precision, recomputation, the optimizer and the
// rank's place.
#pragma once

#include "model/shape.h"

// The optimizer and its settings, which stay the same for a whole run; what changes from step to step is StepSettings.
struct OptimizerSettings {
    OptimizerKind kind = OptimizerKind::adamw;
    double beta1 = 0.9, beta2 = 0.95;  // AdamW's
    float eps = 1e-8f, weight_decay = 0.1f;
    float momentum = 0.9f;   // SGD's
    float grad_clip = 1.0f;  // largest global norm of the gradients; 0 for no clipping
};

// Everything that determines how much memory one rank needs, and what a step computes.
struct GptOptions {
    GptShape shape;
    int batch = 0;    // B, sequences per rank and micro-step
    int seq_len = 0;  // T, at most shape.n_positions
    Dtype precision = Dtype::fp32;
    Recompute recompute = Recompute::none;
    OptimizerSettings optimizer;
    double dropout = 0;          // probability that training drops an element, below 1: see DropoutSite
    uint64_t dropout_seed = 0;   // of its masks
    float z_loss = 0;            // factor of the squared log-sum-exp in what is minimised
    bool document_mask = false;  // tokens see none of the documents before theirs, which begins with this token:
    int document_token = -1;
    int head_rows = 0;         // rows of logits held at a time, at least 1
    int cached_sequences = 0;  // whose keys and values Gpt::prefill() and decode() keep: at most B T, 0 in training
    bool training = true;      // false: forward only, without gradients, optimizer state and backward's buffers
    int micro_steps = 1;       // per step, on each rank
    int rank = 0, ranks = 1;
    // ZeRO (Rajbhandari et al., arXiv 1910.02054): what is sharded over ranks. 1: masters and optimizer state; 2:
    // gradients too, also while they accumulate; 3: parameters too.
    int zero_stage = 0;
    bool deterministic_reduce = false;  // gradients add up in the same order for any number of ranks and micro-steps
    size_t bucket_bytes = 0;            // successive blocks' gradients are reduced together up to this size

    bool is_sharded() const { return zero_stage > 0 && ranks > 1; }
    // Whole gradients exist until the end of the step; else each block's are reduced as soon as they are complete.
    bool keeps_whole_gradients() const { return !is_sharded() || zero_stage == 1 || deterministic_reduce; }
    bool keeps_whole_parameters() const { return !is_sharded() || zero_stage < 3; }
};

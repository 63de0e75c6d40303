// The sizes of a GPT and of what one rank feeds it. The letters are llm.c's:
// B sequences, T positions, C channels, L layers, V vocabulary, Vp vocabulary padded to 128, P learned positions.
#pragma once

#include <cstddef>

#include "kernels/choices.h"
#include "kernels/numeric.h"

struct GptShape {
    int n_layer = 0;
    int n_head = 0;
    int n_kv_head = 0;  // n_head in GPT-2 and GPT-3
    int n_embd = 0;
    int n_positions = 0;
    int vocab_size = 0;

    int one() const { return 1; }
    int channels() const { return n_embd; }
    int positions() const { return n_positions; }
    int head_size() const { return n_embd / n_head; }
    int qkv_channels() const { return (n_head + 2 * n_kv_head) * head_size(); }
    int hidden() const { return 4 * n_embd; }
    // A multiple of 128, so that every row of logits is aligned and tiles of the head's product are whole.
    int padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
};

// Everything that decides how much memory one rank needs.
struct GptOptions {
    GptShape shape;
    int batch = 0;    // B, sequences per rank and micro-step
    int seq_len = 0;  // T, at most shape.n_positions
    Dtype precision = Dtype::fp32;
    Recompute recompute = Recompute::none;
    OptimizerKind optimizer = OptimizerKind::adamw;
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

// The order of the passes of a step with pipeline parallelism.
#pragma once

#include <vector>

#include "kernels/base/choices.h"

// A pass of one micro-step over one part of a rank's layers.
struct Pass {
    // weights: the gradients of the linear layers' weights, which no other stage needs. With weights passes, backward
    // passes compute only the other gradients.
    enum Kind { forward, backward, weights } kind;
    int chunk;       // number of the part among the rank's
    int micro_step;  // from 0
    bool begins_micro_step() const { return kind == forward && chunk == 0; }
    bool operator==(const Pass&) const = default;
};

// The arithmetic of a pass per token, and what it sends, for a prediction of its time.
struct PassWork {
    double flops_per_token = 0;  // of all ranks that divide the layers or the sequence
    int collectives = 0;         // gathers and sums of all tokens' rows over the ranks of tensor parallelism
    double attention_flops = 0;  // the part of flops_per_token that overlaps with the ring
    double ring_bytes_per_token =
        0;  // keys, values and their gradients that pass around the ring of context parallelism
};

inline constexpr int kBuffers = 2;  // of a stage for results of one kind that are not sent yet

// Returns the passes of each stage in a step of `micro_steps`, in their order. With one stage and chunk: forward and
// backward of each micro-step in turn. `chunks` is 1 except with `interleaved`; micro_steps need not be a multiple of
// anything. Only zero_bubble with several stages has weights passes: each follows the backward pass of its micro-step.
//
// Stage p keeps the activations of at most min(stages - p, micro_steps) micro-steps with 1f1b, of all with gpipe; with
// interleaved, of at most (chunks - 1) stages + 2 (stages - p - 1) + 1 passes. With zero_bubble it keeps them until the
// weights pass: the activations of at most min(stages, micro_steps) micro-steps. At most min(p + 1, micro_steps) of
// them have begun their backward pass.
//
// All stages have the same order of the passes of each kind, with ascending micro-steps in each chunk, so that the
// messages between two stages need no numbers. No stages wait for each other in a circle, even if a result is sent only
// when the receiver begins the pass that needs it, and a stage begins no forward (or backward) pass while kBuffers
// results of earlier ones are not sent.
std::vector<std::vector<Pass>> schedule_passes(PipelineSchedule schedule, int stages, int chunks, int micro_steps);

// Returns the largest number of micro-steps whose forward pass of `chunk` has begun and whose last pass of it
// (backward, or weights if there are weights passes) has not ended.
int most_in_flight(const std::vector<Pass>& passes, int chunk);

// Returns the largest number of micro-steps whose backward pass has begun and whose weights pass has not ended; 0 if
// there are no weights passes.
int most_deferred(const std::vector<Pass>& passes);

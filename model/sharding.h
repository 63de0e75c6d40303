// The collectives and copies of a step's parameters and gradients, called when the passes need or finish them. The ZeRO
// stage (Rajbhandari et al., arXiv 1910.02054) determines how much each rank keeps; see GptOptions.
//
//     stage   gradients                                           parameters
//     0       all-reduced in place after a bucket's last          every rank updates all
//             backward pass, during the next block's
//     1       reduced into shards at the same point               gathered after the update, during the next forward
//     2       reduced into shards after every backward pass       as stage 1
//     3       as stage 2                                          gathered a block ahead of each pass, in two slots
//
// With one rank these are no-ops, except for the deterministic sum over micro-steps, and for arrays in host memory.
// With GptOptions::offload_weights a bucket's parameters are copied to its slot as stage 3 gathers them. With
// offload_gradients a slot has the sum of a bucket's gradients over the micro-steps so far: it is sent after each
// micro-step and fetched a block ahead of the next one. A slot that still has the bucket fetches nothing.
#pragma once

#include "model/state.h"

// Work queued on the stream after this call may read the bucket's parameters.
void wait_params(GptState& s, int bucket);

// Prefetches a bucket: if parameters are sharded, starts to gather them. Requires that all work on the slot's previous
// bucket, two away, has been queued on the stream. Does nothing if there is no such bucket.
void prefetch_params(GptState& s, int bucket);

// Prefetches the bucket's sum of earlier micro-steps, if it is in host memory. Requires that end_grads() has been
// called for the slot's previous bucket. Does nothing if there is no such bucket.
void prefetch_grads(GptState& s, int bucket, const MicroStep& micro);

// Work queued on the stream after this call may write the bucket's gradients, or add to them.
void begin_grads(GptState& s, int bucket, const MicroStep& micro);

// Call when all work on the bucket's gradients of this micro-step has been queued on the stream.
void end_grads(GptState& s, int bucket, const MicroStep& micro);

// After this call own_grad holds the sums so far for work queued on the stream and for Pieces. With whole gradients,
// does nothing.
void wait_shards(GptState& s);

// Call before and after the backward pass of a micro-step over one of the rank's parts of the layers, and its pass of
// weights. count_micro_step() follows, also after a replayed pass.
MicroStep begin_micro_step(GptState& s, Pass::Kind kind, int chunk);
void end_micro_step(GptState& s, Pass::Kind kind, int chunk);
void count_micro_step(GptState& s, Pass::Kind kind, int chunk);

// Returns a number that is the same for micro-steps whose gradients go to the same places in the same way.
int gradient_place(const GptState& s, int micro_step);

// After this call own_grad holds the sums over all ranks and micro-steps for work queued on the stream.
void finish_grads(GptState& s);

// Call after own_param has been written, so that later passes read the new values.
void gather_params(GptState& s);

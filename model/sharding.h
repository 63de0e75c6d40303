// What the ranks do about a step's parameters and gradients, at the moments at which the passes need or finish them.
// How much each rank keeps is ZeRO's stage (Rajbhandari et al., arXiv 1910.02054): see GptOptions.
//
//     stage   gradients                                           parameters
//     0       reduced and gathered in place, after a bucket's     every rank updates all
//             last backward pass, beside the next block's
//     1       reduced there into shards                           gathered after the update, beside the next forward
//     2       reduced into shards after every backward pass       the same
//     3       as 2                                                gathered a block ahead of each pass, in two slots
//
// With one rank these do nothing, but for the deterministic sum over micro-steps.
#pragma once

#include "model/state.h"

// What follows on the stream may read the bucket's parameters.
void need_params(GptState& s, int bucket);

// The bucket will be needed next: where parameters are sharded they are on their way from here on. What used the slot
// before, two buckets away, must be on the stream. No such bucket: nothing.
void expect_params(GptState& s, int bucket);

// What follows on the stream may write the bucket's gradients.
void begin_grads(GptState& s, int bucket);

// All of the bucket's gradients of this micro-step are on the stream.
void end_grads(GptState& s, int bucket, const MicroStep& micro);

// Around a micro-step's passes.
MicroStep begin_micro_step(GptState& s);
void end_micro_step(GptState& s);

// What follows on the stream finds in own_grad the sums over all ranks and micro-steps.
void finish_grads(GptState& s);

// After own_param was written: the passes read it from here on.
void share_params(GptState& s);

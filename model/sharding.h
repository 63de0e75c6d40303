// The collectives on a step's parameters and gradients, called where the passes need or finish them. How much each rank
// keeps is ZeRO's stage (Rajbhandari et al., arXiv 1910.02054): see GptOptions.
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

// After this, work queued on the stream may read the bucket's parameters.
void need_params(GptState& s, int bucket);

// Prefetches a bucket: where parameters are sharded, starts to gather them. All work on the slot's previous bucket, two
// away, must have been queued on the stream. Does nothing if there is no such bucket.
void expect_params(GptState& s, int bucket);

// After this, work queued on the stream may write the bucket's gradients.
void begin_grads(GptState& s, int bucket);

// To be called when all work on the bucket's gradients of this micro-step has been queued on the stream.
void end_grads(GptState& s, int bucket, const MicroStep& micro);

// To be called before and after a micro-step's passes.
MicroStep begin_micro_step(GptState& s);
void end_micro_step(GptState& s);

// After this, own_grad holds the sums over all ranks and micro-steps for work queued on the stream.
void finish_grads(GptState& s);

// To be called after own_param was written: later passes read the new values.
void share_params(GptState& s);

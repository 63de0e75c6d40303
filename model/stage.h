// The passes of a stage: of the layers that one rank of a pipeline has, or of the whole model.
#pragma once

#include "model/layers.h"
#include "model/state.h"

// The whole batch of a pass, of all context-parallel ranks: (B, T), and the same split into this step's sequences.
inline BatchSizes training_sizes(const GptState& s) { return {s.options.batch, s.options.seq_len}; }
inline BatchSizes step_sizes(const GptState& s) {
    return {s.options.batch * (s.options.seq_len / s.step.seq_len), s.step.seq_len};
}

// Returns the layers' context for a pass without dropout over this rank's part of a batch.
LayerContext layer_context(const GptState& s, const BatchSizes& whole);

// The arguments of a pass over one part of the layers.
struct StagePass {
    LayerContext x;
    int chunk, micro_step;
    LayerRange layers;
    bool is_first, is_last;  // whether the part begins with the embedding, and ends with the head
    const GptActivations& acts;
    const MicroStepInput& input;
    bool is_training = false;  // the forward pass has a backward pass
};
// `x` with the documents of the micro-step's input.
StagePass stage_pass(const GptState& s, const LayerContext& x, int chunk, int micro_step);

// Copies this rank's part of a batch of tokens to the device, and the start of their documents.
void load_input(GptState& s, MicroStepInput& input, const BatchSizes& whole, const int* tokens);
void load_targets(GptState& s, MicroStepInput& input, const BatchSizes& whole, const int* targets);

// Starts to receive the message that the pass needs, if it needs one and this has not been called for it. Each channel
// has one buffer for received messages; the previous pass must have taken its message.
void expect(GptState& s, const Pass& pass);

// A forward pass up to the sum of the last branch and, in the last part, up to the final norm. Takes its input from the
// previous stage and sends its output to the next one. `next`: the pass whose message is expected meanwhile; may be
// null. is_measured: writes this part's elements of GptState::residual_rms.
void forward_part(GptState& s, const StagePass& pass, const Pass* next, bool is_measured);

// A backward pass, in the last part with the head. Takes the gradient of its output from the next stage and sends that
// of its input to the previous one. Accumulates the gradients of the parameters.
void backward_part(GptState& s, const StagePass& pass, const Pass* next);

// The gradients of the linear layers' parameters that backward_part() has deferred.
void weights_part(GptState& s, const StagePass& pass, const Pass* next);

// Runs forward_part() of every part for an input that is in the first place of GptState::inputs.
void forward_model(GptState& s, const LayerContext& x);

// Sums the values over the ranks of a communicator, through GptState::sums.
void sum_over(GptState& s, const Comm& comm, std::span<double> values);

// Runs the head on the output of the last part's forward pass; writes GptState::loss_sum. With `dinp`, also computes
// the gradients of the head's weight and of the input.
void loss_forward_backward(GptState& s, const StagePass& pass, View dinp);

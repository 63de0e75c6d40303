// What lies behind Gpt: the typed state of one rank, and forward, backward and update on it. Only model/ includes this.
// Act is the storage type of activations and compute weights: float, bf16 or fp16.
#pragma once

#include <variant>

#include "kernels/comm.h"
#include "model/activations.h"
#include "model/gpt.h"

// What one micro-step is within its step.
struct MicroStep {
    int index;         // from 0
    bool last;         // of the step
    bool accumulate;   // gradients are added to what the micro-step before left
    float grad_scale;  // weight of each target's loss
};

// A place where buckets take turns. The bucket of no block has the first to itself, the others share two.
template <class T> struct Window {
    T* values = nullptr;
    int bucket = -1;  // whose values these are
    Ticket ticket;    // of the collective that brings or takes them
    // Gradients only: a sum over ranks that is to be added to the step's earlier ones arrives in `reduced`.
    float* reduced = nullptr;
    bool is_added = false;
};
inline constexpr int kWindows = 3;
inline int window_of(int bucket) { return bucket == 0 ? 0 : 1 + bucket % 2; }

// "Owned" arrays hold what this rank has to itself: with options.is_sharded() its shards, else everything.
template <class Act> struct GptState {
    GptOptions options;
    TensorLayout layout;
    Comm comm;
    Stream stream;

    float* master = nullptr;     // owned, flat FP32 parameters
    float* m = nullptr;          // owned, first moment or momentum
    float* v = nullptr;          // owned, second moment; null for SGD
    Act* own_param = nullptr;    // owned, compute copy; the master itself where Act is float
    float* own_grad = nullptr;   // owned, what the update reads
    Act* param = nullptr;        // flat, whole; null where only windows are
    float* grad = nullptr;       // flat, whole; null where only windows are
    std::vector<float*> levels;  // grad, and beside it the deterministic sum's partial sums
    Window<Act> param_window[kWindows];
    Window<float> grad_window[kWindows];
    std::vector<Ticket> param_ready;  // per bucket: its whole parameters have been gathered
    Ticket grads_ready;               // the last sum of whole gradients over ranks
    GptTensors<Act> params;           // where the forward pass reads
    GptTensors<float> grads;          // where the backward pass writes
    GptActivations<Act> acts;

    int* tokens = nullptr;   // (B, T)
    int* targets = nullptr;  // (B, T)
    std::vector<ops::Chunk> host_all_chunks, host_own_chunks;
    ops::Chunk* all_chunks = nullptr;     // the whole grid
    ops::Chunk* own_chunks = nullptr;     // this rank's part of it, in own_grad
    double* sums = nullptr;               // what ranks add up once a step: see StepSums
    ops::GradNorm* grad_norm = nullptr;   // (1)
    ops::StepScalars* scalars = nullptr;  // (1)
    void* scratch = nullptr;              // the largest that any op asks for
    void* comm_scratch = nullptr;         // the same for collectives
    int micro_steps_done = 0;             // since begin_step()
    Stopwatch update_time;
};

// The length of owned arrays.
template <class Act> size_t owned_elements(const GptState<Act>& s) {
    return s.options.is_sharded() ? s.layout.shard_elements : s.layout.elements;
}

// The order of GptState::sums: each rank fills in its own places, the others' are 0, and their sum is what all know.
struct StepSums {
    size_t chunks;       // squared sums, one per chunk of the grid
    size_t losses;       // then loss sums, one per rank and micro-step: rank * micro_steps + index
    size_t losses_each;  // micro_steps
    size_t count() const { return chunks + losses + StepResult::kVotes; }
    size_t loss(int rank, int index) const { return chunks + size_t(rank) * losses_each + size_t(index); }
    size_t vote(int number) const { return chunks + losses + size_t(number); }
};
template <class Act> StepSums step_sums(const GptState<Act>& s) {
    const size_t each = size_t(s.options.micro_steps);
    return {s.host_all_chunks.size(), each * size_t(s.options.ranks), each};
}

// Lays the state out in the arena: without memory to learn its size, with memory to use it.
template <class Act> GptState<Act> place_state(const GptOptions& options, Arena& arena);

enum class Pass { train, evaluate };

// Tokens on the device to the output of the final norm.
template <class Act> void trunk_forward(GptState<Act>& s);

// The head: logits and losses, and in a training pass the gradients of the head's weight and of the final norm's
// output, for a few rows at a time, so that logits and their gradients never exist for all of them at once.
template <class Act> void head_forward_backward(GptState<Act>& s, Pass pass, const MicroStep& micro);

// From the gradient of the final norm's output down to the embedding.
template <class Act> void trunk_backward(GptState<Act>& s, const MicroStep& micro);

// The parts of a block's forward pass that backward may run again.
template <class Act> void block_norm1_forward(GptState<Act>& s, int layer);
template <class Act> void block_norm2_forward(GptState<Act>& s, int layer);
template <class Act> void block_body_forward(GptState<Act>& s, int layer);

// Gradient norm over all ranks, clipping, optimizer.
template <class Act> void update(GptState<Act>& s, const UpdateSettings& settings);

inline constexpr float kNormEps = 1e-5f;  // GPT-2's

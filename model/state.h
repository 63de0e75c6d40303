// What lies behind Gpt: the typed state of one rank, and forward, backward and update on it. Only model/ includes this.
// Act is the storage type of activations and compute weights: float, bf16 or fp16.
#pragma once

#include <variant>

#include "model/activations.h"
#include "model/gpt.h"

template <class Act> struct GptState {
    GptOptions options;
    TensorLayout layout;
    std::vector<ops::Chunk> host_chunks;
    Stream stream;

    float* master = nullptr;  // flat FP32 parameters
    Act* param = nullptr;     // flat compute copy; the master itself where Act is float
    float* grad = nullptr;    // flat
    float* m = nullptr;       // flat, first moment or momentum
    float* v = nullptr;       // flat, second moment; null for SGD
    GptTensors<Act> params;   // views of param
    GptTensors<float> grads;  // views of grad
    GptActivations<Act> acts;

    int* tokens = nullptr;                // (B, T)
    int* targets = nullptr;               // (B, T)
    ops::Chunk* chunks = nullptr;         // the chunk grid
    double* chunk_sums = nullptr;         // one per chunk
    double* loss_sum = nullptr;           // (1)
    ops::GradNorm* grad_norm = nullptr;   // (1)
    ops::StepScalars* scalars = nullptr;  // (1)
    void* scratch = nullptr;              // the largest that any op asks for
};

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

// Gradient norm, clipping, optimizer.
template <class Act> void update(GptState<Act>& s, const UpdateSettings& settings);

inline constexpr float kNormEps = 1e-5f;  // GPT-2's

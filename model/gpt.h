// A GPT that trains: parameters, gradients, optimizer state and activations of one rank on one device.
//
//     gpt.initialize(seed);
//     for each step:
//         gpt.begin_step({.loss_scale = 1, .learning_rate = ..., ...});
//         options.micro_steps times: gpt.micro_step(tokens, targets, scale);  // forward, backward; gradients add up
//         StepResult result = gpt.end_step(update);                           // sum over ranks, norm, clip, optimizer
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "model/arena.h"
#include "model/shape.h"
#include "model/tensors.h"

// What the optimizer is told besides the step's scalars.
struct UpdateSettings {
    double beta1 = 0.9, beta2 = 0.95;
    float eps = 1e-8f, weight_decay = 0.1f;
    float momentum = 0.9f;   // SGD's
    float grad_clip = 1.0f;  // largest global norm of the gradients; 0 for no clipping
};

struct StepResult {
    static constexpr int kVotes = 3;
    double loss_sum;       // over all ranks' targets since begin_step, in nats
    float grad_norm;       // before clipping, loss scale removed
    double votes[kVotes];  // end_step()'s, added over all ranks
    double update_ms;      // what the norm, clipping and the optimizer took, without waiting for other ranks
    // The name of the first tensor whose gradient has a NaN or an infinity; empty if all is finite. When it is not
    // empty nothing was updated.
    std::string non_finite_tensor;
};

// Everything that Gpt allocates, in the order of its memory, without allocating it.
std::vector<MemoryRegion> plan_memory(const GptOptions& options);

class Gpt {
public:
    // Allocates everything that training will ever need. Fails with Exit::os where memory is short.
    Gpt(const GptOptions& options, const Comm& comm);
    Gpt(Gpt&&) noexcept;
    ~Gpt();

    const GptOptions& options() const;
    const TensorLayout& layout() const;

    // GPT-2's initialisation: a function of the seed and the tensors' names alone.
    void initialize(uint64_t seed);

    void begin_step(const ops::StepScalars& scalars);

    // tokens, targets: (B, T) in host memory, targets -1 where nothing is to be predicted; both may be reused at once.
    // grad_scale is the weight of each target's loss: 1 / targets of the whole step, all ranks, makes the loss a mean.
    void micro_step(const int* tokens, const int* targets, float grad_scale);

    // Sums gradients over ranks, measures them and updates the parameters. Waits for the device. The votes are how one
    // rank's wish (to stop, say) becomes known to all at the same step.
    StepResult end_step(const UpdateSettings& settings, const std::array<double, StepResult::kVotes>& votes = {});

    // Sum of the losses of one batch in nats, forward only. Waits for the device.
    double evaluate(const int* tokens, const int* targets);

    // Logits, in float, that follow the last of `count` tokens, 1 <= count <= T: (V) in `logits`.
    void next_token_logits(const int* tokens, int count, float* logits);

    // Adds the values up over all ranks.
    void sum_over_ranks(std::array<double, StepResult::kVotes>& values);

    // Master weights and optimizer state by name: what this rank has of them. After writing masters from outside, call
    // masters_changed() on all ranks.
    std::vector<NamedTensor> state_tensors() const;
    std::vector<NamedTensor> master_tensors() const;
    // The same, each element on one rank only: what it saves.
    std::vector<NamedTensor> saved_tensors() const;
    std::vector<NamedTensor> gradient_tensors() const;  // "grad.NAME", as end_step() found them
    void masters_changed();

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

// A GPT that trains: parameters, gradients, optimizer state and activations of one rank on one device.
//
//     gpt.initialize(seed);
//     for each step:
//         gpt.begin_step({.loss_scale = 1, .learning_rate = ..., ...});
//         for each micro-step: gpt.micro_step(tokens, targets, {...});     // forward and backward, gradients add up
//         StepResult result = gpt.end_step(update);                        // norm, clip, optimizer
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm.h"
#include "kernels/ops.h"
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

struct MicroStep {
    bool first;        // gradients are overwritten, not added to
    float grad_scale;  // weight of each target's loss: 1 / targets of the whole step makes the step's loss a mean
};

struct StepResult {
    double loss_sum;  // over this rank's targets since begin_step, in nats
    float grad_norm;  // before clipping, loss scale removed
    // The name of the first tensor whose gradient has a NaN or an infinity; empty if all is finite. When it is not
    // empty nothing was updated.
    std::string non_finite_tensor;
};

// A tensor of the model or of the optimizer's state as checkpoints see it: FP32 on the device.
struct StateTensor {
    std::string name;  // "master.h.0.qkv.weight", "m.wte"
    std::vector<size_t> shape;
    float* values;  // device memory
    size_t count;
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
    void micro_step(const int* tokens, const int* targets, const MicroStep& micro);

    // Sums gradients over ranks, measures them and updates the parameters. Waits for the device.
    StepResult end_step(const UpdateSettings& settings);

    // Sum of the losses of one batch in nats, forward only. Waits for the device.
    double evaluate(const int* tokens, const int* targets);

    // Logits, in float, that follow the last of `count` tokens, 1 <= count <= T: (V) in `logits`.
    void next_token_logits(const int* tokens, int count, float* logits);

    // Master weights and optimizer state by name. After writing masters from outside, call masters_changed().
    std::vector<StateTensor> state_tensors() const;
    std::vector<StateTensor> master_tensors() const;
    std::vector<StateTensor> gradient_tensors() const;  // "grad.NAME", as the last micro-step left them
    void masters_changed();

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

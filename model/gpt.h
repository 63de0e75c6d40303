// A GPT that trains: parameters, gradients, optimizer state and activations of one rank on one device.
//
//     gpt.initialize(seed);
//     for each step:
//         gpt.begin_step({.learning_rate = ..., .update = ...});
//         for (const Pass& pass : gpt.passes()) {
//             if (pass.begins_micro_step()) gpt.load(tokens, targets);
//             gpt.compute(pass);                 // a backward pass accumulates gradients
//         }
//         StepResult result = gpt.end_step();    // sum over ranks, norm, clipping, optimizer
//
// With pipeline parallelism a rank has some of the layers, and its passes exchange activations and gradients with those
// of the neighboring stages.
#pragma once

#include <memory>
#include <span>

#include "kernels/comm.h"  // IWYU pragma: export
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "model/arena.h"
#include "model/options.h"   // IWYU pragma: export
#include "model/schedule.h"  // IWYU pragma: export
#include "model/tensors.h"   // IWYU pragma: export

// Settings that change from step to step.
struct StepSettings {
    float loss_scale = 1.0f;
    double learning_rate = 0;
    std::vector<double> group_rates = {};  // of each OptimizerSettings::groups, before lr_scale; empty: learning_rate
    int micro_steps = 0;                   // of this step, at most options.micro_steps; 0: options.micro_steps
    // Tokens per sequence: a divisor of options.seq_len, whose sequences are split into at most options.max_parts; 0:
    // options.seq_len.
    int seq_len = 0;
    double average_weight = 1;   // of the masters after the update in their average, with options.averages
    bool measure = false;        // whether the step's result has tensor_norms and residual_rms
    bool measure_first = false;  // whether first_norm_squared() measures the step's first micro-step
    int64_t update = 1;          // number of this update from 1, without skipped steps: t in the optimizers' formulas
    // Weight of each target's loss. 1 / (number of the step's targets over all ranks) makes the loss a mean.
    float grad_scale = 1;
    // Number of the step's first sample, counted over all ranks from the beginning of the run. It determines dropout's
    // masks: row b of micro-step m on sample rank r is sample first_sample + (r micro_steps + m) batch + b, and part p
    // of its split sequence counts as sample p 2^48 + that.
    uint64_t first_sample = 0;
};

// Bytes that a rank copies between device and host for the options of offload.
struct OffloadTraffic {
    size_t to_device = 0, to_host = 0;
    OffloadTraffic operator+(const OffloadTraffic& other) const {
        return {to_device + other.to_device, to_host + other.to_host};
    }
    bool operator==(const OffloadTraffic&) const = default;
};

struct StepResult {
    double loss_sum;            // over all ranks' targets since begin_step, in nats
    float grad_norm;            // before clipping, loss scale removed
    std::vector<double> votes;  // end_step()'s votes, summed over all ranks
    OffloadTraffic offload;
    double fp8_saturated;  // numbers that were too large for their scale in 8 bits, over all ranks: 0 without an error
    double update_ms;      // time of the norm, clipping and the optimizer, without waiting for other ranks
    // The name of the first tensor whose gradient has a NaN or an infinity; empty if all are finite. If it is not
    // empty, the update was skipped.
    std::string non_finite_tensor;
    // Only if requested, and the same on all ranks: the norm of each tensor's gradient, in the order of layout().names.
    // grad_norm combines them.
    std::vector<double> tensor_norms;
    // Only if requested: the root mean square of the residual stream's elements in this rank's rows of the last
    // micro-step, at the norms' inputs: before attention and before the MLP of each layer, and at the end. (2 L + 1)
    std::vector<double> residual_rms;
};

// Returns all allocations of Gpt, in memory order, without allocating them.
std::vector<MemoryRegion> plan_memory(const GptOptions& options);
// The same for each stage of the rank's pipeline. Takes much less time than to plan the stages one by one.
std::vector<std::vector<MemoryRegion>> plan_memory_of_stages(GptOptions options);

struct GptState;

class Gpt {
public:
    // Allocates all memory that training will ever need. Fails with Exit::os if there is not enough memory.
    Gpt(const GptOptions& options, const GridComm& comm);
    Gpt(Gpt&&) noexcept;
    ~Gpt();

    const GptOptions& options() const;
    const TensorLayout& layout() const;

    // GPT-2's initialization; depends only on the seed and the tensors' names. With masters in bf16 it uses the
    // gradients' memory.
    void initialize(uint64_t seed);

    void begin_step(const StepSettings& settings);

    // Records subsequent ops and collectives in `trace` as part of this step (from 1; 0 for none); null stops
    // recording. Waits for the device, but not for collectives.
    void trace(Trace* trace, int step);

    // The passes of this rank between begin_step() and end_step(), in their order; see model/schedule.h.
    const std::vector<Pass>& passes() const;

    // Gives the next micro-step its tokens and targets: (B, T) in host memory, -1 for no target. Context-parallel ranks
    // all get whole sequences. The caller may reuse them at once.
    void load(const int* tokens, const int* targets);

    // Computes the next of passes(). A pass may wait for other stages.
    void compute(const Pass& pass);

    // The two passes of the next micro-step, on a rank with all layers: load() and compute() in one call. backward()
    // replaces StepSettings::grad_scale. Dropout acts only between begin_step() and end_step(). Passes without a
    // backward pass are in model/inference.h.
    void forward(const int* tokens);
    void backward(const int* targets, float grad_scale);

    // The squared norm of the gradient of this step's first micro-step, without the loss scale; 0 unless requested.
    // With options().keeps_whole_gradients() it is this rank's, else this rank's part of the sum over ranks. Call it
    // after the first of at least two micro-steps.
    double first_norm_squared() const;

    // Sums gradients over ranks, measures their norm and updates the parameters. Waits for the device. The votes, at
    // most options().votes, are summed over all ranks, so that, for example, all ranks see one rank's request to
    // stop at the same step.
    StepResult end_step(std::span<const double> votes = {});

    // Sums the values over the ranks with the same part of the model, which have different samples.
    void sum_over_ranks(std::span<double> values);
    // Copies the values from the last stage, which computes the losses, to the other stages.
    void take_from_last_stage(std::span<double> values);

    // This rank's part of the master weights, their average and the optimizer state, by name. The lists of state and of
    // saved tensors name the whole model's; this rank has no elements of the tensors on other stages. After writing
    // masters from outside, call masters_changed() on all ranks.
    std::vector<NamedTensor> state_tensors() const;
    std::vector<NamedTensor> master_tensors() const;
    // The same with each element on one rank only, as saved in a checkpoint. Tensors of 16 bits are last, because a
    // checkpoint aligns each tensor to its type.
    std::vector<NamedTensor> saved_tensors() const;
    // The tensors that every rank with the same part of the model holds with the same bits: master weights and
    // optimizer state, or with sharding the compute weights, or with sharded parameters none. Those without boxes are
    // the same on all ranks. Read them only when all collectives have finished (drain()).
    std::vector<NamedTensor> replicated_tensors() const;
    std::vector<NamedTensor> gradient_tensors() const;  // "grad.NAME", as summed by end_step()
    void masters_changed();
    // Collective. Until restore_masters(), evaluations use the average of the masters in their place, and the
    // gradients' memory keeps the masters. Requires options().averages.
    void use_average();
    void restore_masters();

    // Only model/ uses it.
    GptState& state() { return *state_; }

private:
    std::unique_ptr<GptState> state_;
};

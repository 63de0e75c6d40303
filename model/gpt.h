// A GPT that trains: parameters, gradients, optimizer state and activations of one rank on one device.
//
//     gpt.initialize(seed);
//     for each step:
//         gpt.begin_step({.learning_rate = ..., .update = ...});
//         options.micro_steps times:
//             gpt.forward(tokens);
//             gpt.backward(targets, scale);      // gradients add up
//         StepResult result = gpt.end_step();    // sum over ranks, norm, clipping, optimizer
#pragma once

#include <array>
#include <memory>
#include <span>

#include "kernels/comm.h"
#include "model/arena.h"
#include "model/options.h"
#include "model/tensors.h"

// What changes from step to step.
struct StepSettings {
    float loss_scale = 1.0f;
    double learning_rate = 0;
    bool measure = false;  // whether the step's result has tensor_norms and residual_rms
    int64_t update = 1;    // number of this update, counting those that were applied, from 1: AdamW's t
    // Number of the step's first sample, counted over all ranks from the beginning of the run: dropout's masks follow
    // from it. Row b of micro-step m on rank r is sample first_sample + (r micro_steps + m) batch + b.
    uint64_t first_sample = 0;
};

struct StepResult {
    static constexpr int kVotes = 9;
    double loss_sum;       // over all ranks' targets since begin_step, in nats
    float grad_norm;       // before clipping, loss scale removed
    double votes[kVotes];  // end_step()'s, added over all ranks
    double update_ms;      // time of the norm, clipping and the optimizer, without waiting for other ranks
    // The name of the first tensor whose gradient has a NaN or an infinity; empty if all is finite. When it is not
    // empty nothing was updated.
    std::string non_finite_tensor;
    // Only if asked for, and the same on all ranks: the norm of each tensor's gradient, by its place in layout() and as
    // grad_norm, which is that of all of them.
    std::vector<double> tensor_norms;
    // Only if asked for: the root mean square of the elements of the residual stream in this rank's last micro-step,
    // where the norms read it: by layer, in front of attention and in front of the MLP, and at the end. (2 L + 1)
    std::vector<double> residual_rms;
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

    void begin_step(const StepSettings& settings);

    // From now on ops and collectives are recorded in `trace`, as those of this step, from 1, or 0 for none; with null
    // they are not. Waits for the device, but not for collectives.
    void trace(Trace* trace, int step);

    // tokens: (B, T) in host memory, which may be reused at once; so may targets below. Dropout acts only between
    // begin_step() and end_step(); in what follows below it never does.
    void forward(const int* tokens);

    // The loss of what forward() computed, and its gradients. targets: (B, T), -1 where nothing is to be predicted.
    // grad_scale is the weight of each target's loss: 1 / targets of the whole step, all ranks, makes the loss a mean.
    void backward(const int* targets, float grad_scale);

    // Sums gradients over ranks, measures them and updates the parameters. Waits for the device. Votes are added over
    // all ranks, so that all ranks see a request to stop on one rank at the same step, for example.
    StepResult end_step(const std::array<double, StepResult::kVotes>& votes = {});

    // Sum of the losses of one batch in nats, forward only. Waits for the device. `losses`, if not null, receives that
    // of each target and 0 elsewhere: (B, T). With `seq_len`, which divides T, sequences are that long, and as many as
    // fit: all three arrays are (B T / seq_len, seq_len).
    double evaluate(const int* tokens, const int* targets, float* losses = nullptr, int seq_len = 0);

    // Logits, in float, that follow token `row` (0 to B T - 1) of the last forward(): (V) in `logits`.
    void logits_of_row(int row, float* logits);

    // Logits, in float, that follow the last of `count` tokens, 1 <= count <= T: (V) in `logits`.
    void next_token_logits(const int* tokens, int count, float* logits);

    // Generation without computing a text's beginning again, in a model with options.cached_sequences. prefill() reads
    // the first `count` tokens of a sequence, 1 <= count <= T, and decode() one more of each of several sequences, in
    // which there must be room (sequence_length() below T). Both put the logits that follow each sequence's last token
    // in `logits`: (V), or of decode() (tokens, V). Whatever else is computed in between, the sequences stay.
    struct NextToken {
        int sequence, token;
    };
    void prefill(int sequence, const int* tokens, int count, float* logits);
    void decode(std::span<const NextToken> tokens, float* logits);
    int sequence_length(int sequence) const;

    // Adds the values up over all ranks.
    void sum_over_ranks(std::span<double> values);

    // Master weights and optimizer state by name: what this rank has of them. After writing masters from outside, call
    // masters_changed() on all ranks.
    std::vector<NamedTensor> state_tensors() const;
    std::vector<NamedTensor> master_tensors() const;
    // The same, each element on one rank only: what it saves.
    std::vector<NamedTensor> saved_tensors() const;
    // What every rank holds whole, and with the same bits: master weights and optimizer state, or the compute weights,
    // or with parameters sharded nothing. To be read once all collectives have finished (drain()).
    std::vector<NamedTensor> replicated_tensors() const;
    std::vector<NamedTensor> gradient_tensors() const;  // "grad.NAME", as end_step() found them
    void masters_changed();

private:
    std::unique_ptr<struct GptState> state_;
};

// The implementation of Gpt: the state of one rank and its layout in memory. Only model/ includes this.
#pragma once

#include <map>

#include "kernels/base/dropout.h"
#include "kernels/base/exact_squares.h"
#include "kernels/device.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "model/activations.h"  // IWYU pragma: export
#include "model/arena.h"        // IWYU pragma: export
#include "model/factors.h"      // IWYU pragma: export
#include "model/fp8.h"
#include "model/gpt.h"  // IWYU pragma: export
#include "model/layers.h"
#include "model/matrices.h"  // IWYU pragma: export
#include "model/offload.h"
#include "model/schedule.h"
#include "model/update.h"  // IWYU pragma: export

// A micro-step's place within its step.
struct MicroStep {
    int index;        // from 0
    bool last;        // of the step
    bool accumulate;  // add gradients to those of the previous micro-steps
};

// The input of a micro-step.
struct MicroStepInput {
    int* tokens = nullptr;             // (B, T), as all arrays this rank's part
    int* targets = nullptr;            // (B, T)
    int* first_key = nullptr;          // (B, T); null without a document mask
    uint64_t* dropout_keys = nullptr;  // (B), of the samples; null without dropout
    ops::DropoutMask dropout = {};
};

// The messages of one direction between neighboring stages.
struct StageChannel {
    Comm from, to;
    View received, sent[kBuffers];  // (B, T, C); null with one stage
    Ticket receiving, sending[kBuffers];
    bool is_expected = false;  // a message is being received
    size_t next_sent = 0;
};

// Memory for one bucket at a time. The bucket outside the blocks has the first slot, the head the last; the other
// buckets alternate between two.
struct BucketSlot {
    View values;
    int bucket = -1;  // the bucket in this slot
    Ticket ticket;    // of the collective that gathers or reduces it
    // Gradients only: receives a sum over ranks that is to be added to the step's earlier ones.
    float* reduced = nullptr;
    bool is_added = false;
    std::optional<SideStream> copies;  // of buckets in host memory; else null
};
inline constexpr int kSlots = 4;
inline int slot_of(const TensorLayout& layout, int bucket) {
    if (bucket == 0) return 0;
    return bucket == layout.bucket_of_head() ? kSlots - 1 : 1 + bucket % 2;
}

// The variables of a pass. Everything else that its work depends on is in device memory or constant in a run.
struct PassKey {
    Pass::Kind kind;
    int seq_len;
    float grad_scale;
    bool drops;
    int place;  // of its gradients: see gradient_place()
    auto operator<=>(const PassKey&) const = default;
};

// "Owned" arrays hold this rank's part: its shards with options.is_sharded(), else everything.
struct GptState {
    GptOptions options;
    TensorLayout layout;
    GridComm comms = comm_single();
    TensorParallelGroup group;  // comms.tensor and its buffers
    Fp8Buffers fp8;
    AttentionRing ring;  // comms.context and its buffers
    OpStream stream;
    DeviceBuffer memory;   // the single allocation of all device arrays
    OffloadState offload;  // the single allocation of all arrays in host memory, and their windows

    View master;                 // owned, flat parameters
    View own_param;              // owned, compute copy; the masters if options.computes_with_masters()
    float* average = nullptr;    // owned, of the masters; null without options.averages
    float* own_grad = nullptr;   // owned, read by the update
    View param;                  // flat, whole; null if slots replace it
    float* grad = nullptr;       // flat, whole; null if slots replace it
    std::vector<float*> levels;  // grad, then the deterministic sum's other partial sums
    // The same for the head's part of a tied embedding's gradient, if this rank sums it apart; else empty.
    std::vector<float*> head_levels;
    BucketSlot param_slot[kSlots];
    BucketSlot grad_slot[kSlots];
    std::vector<Ticket> param_ready;     // per bucket: its whole parameters have been gathered
    Ticket grads_ready;                  // the last sum of whole gradients over ranks
    GptWeights weights;                  // the passes' views of parameters and gradients
    std::vector<int> in_flight;          // micro_steps_in_flight()
    int deferred = 0;                    // micro_steps_deferred()
    std::vector<GptActivations> acts;    // of the micro-steps in flight
    std::vector<MicroStepInput> inputs;  // of the micro-steps in flight
    std::vector<LayerRange> layers;      // of each of the rank's parts
    std::vector<Pass> passes;            // this step's
    size_t next_pass = 0;
    std::map<PassKey, Recording> recordings;  // of passes
    std::pair<int, float> recorded_sizes;     // the sequence length and gradient scale of the last begin_step()
    StageChannel activations, gradients;      // between stages

    float* rope_table = nullptr;      // (T, rotary / 2, 2); null without RoPE
    std::vector<int> host_first_key;  // (B, T), of the last input; empty without a document mask
    std::vector<int> host_part;       // one number per token of a rank's part of a batch; empty if that is the whole
    KeyValueCache cache;
    std::vector<ops::AttentionDecode::Place> cached;  // per cached sequence: its length and its document's start
    ops::AttentionDecode::Place* places = nullptr;    // (cached sequences)
    int* positions = nullptr;                         // (cached sequences), the positions of `places`
    std::vector<ops::Chunk> host_own_chunks;          // empty in a plan, which only counts the chunks
    ops::Chunk* grid = nullptr;                       // chunk_grid()
    ops::Chunk* own_chunks = nullptr;                 // the chunks whose squares this rank sums, in own_grad
    // The owned part of a tied embedding's gradient: the other stage's, or the sum of the head's over ranks.
    float* tied = nullptr;
    float* summed = nullptr;  // the gradients with Division::summed, for their sum; null with one rank in `group`
    size_t summed_elements = 0;
    UpdateLayout update;  // empty without training
    MatrixState matrix;
    TrustState trust;
    FactorState factors;
    std::vector<ops::Chunk> host_update_chunks;
    ops::Chunk* update_chunks = nullptr;  // the chunks that this rank updates
    std::vector<ops::UpdateScalars> host_update_scalars;
    ops::UpdateScalars* update_scalars = nullptr;  // (groups), this step's
    double* loss_sum = nullptr;                    // (1), of the last backward pass or evaluated batch
    double* sums = nullptr;                        // summed over ranks once a step: see StepSums
    std::vector<double> host_sums;                 // the host's copy
    std::vector<std::byte> host_logits;            // the rows of logits_of_rows()
    ops::GradNorm* grad_norm = nullptr;            // (1)
    float* loss_scale = nullptr;                   // (1), this step's
    void* scratch = nullptr;                       // as large as the largest op needs
    void* comm_scratch = nullptr;                  // the same for collectives
    StepSettings step;                             // this step's; micro_steps and seq_len are never 0
    int micro_steps_loaded = 0;                    // since begin_step()
    // Since begin_step(), by each of the rank's parts: of backward passes, and of passes of weights.
    std::vector<int> micro_steps_done, weights_done;
    double first_norm_squared = 0;  // of this step's first micro-step; 0: not requested or not measured yet
    std::vector<uint64_t> host_dropout_keys;
    bool drops = false;                  // whether passes drop: between begin_step() and end_step()
    std::vector<double> residual_rms;    // of the last micro-step, so far
    std::vector<float> host_statistics;  // mean and rstd of a norm's rows
    Stopwatch update_time;
};

// Returns the length of owned arrays.
inline size_t owned_elements(const GptState& s) {
    return s.options.is_sharded() ? s.layout.shard_elements : s.layout.elements;
}

// The layout of GptState::sums: each rank fills in its own entries and leaves the others 0, and the all-reduce sums
// them.
struct StepSums {
    size_t squares;      // sums of the gradients' squares, kSquareEntries per tensor of the model; then a number:
                         // Fp8Buffers::saturated
    size_t losses;       // then loss sums, one per rank and micro-step: rank * micro_steps + index
    size_t losses_each;  // this step's micro_steps
    size_t votes;        // then the caller's votes
    size_t count() const { return first_vote() + votes; }
    size_t saturated() const { return squares; }
    size_t loss(int rank, int index) const { return squares + 1 + size_t(rank) * losses_each + size_t(index); }
    size_t first_vote() const { return squares + 1 + losses; }
};
inline StepSums step_sums(const GptState& s) {
    const size_t each = size_t(s.step.micro_steps);
    return {s.layout.names.size() * ops::kSquareEntries, each * size_t(s.options.ranks), each, size_t(s.options.votes)};
}

// Sets numbers in device memory to 0.
inline void clear(double* values, size_t count, Stream stream) {
    ops::fill({.out = reinterpret_cast<float*>(values), .count = 2 * count, .value = 0}, stream);
}

// Returns the head's parameters: the embedding's if tied, unless their gradients are apart.
inline const LayerWeights& head_weights(const GptState& s) {
    return s.options.shape.tie_embeddings && s.head_levels.empty() ? s.weights.wte : s.weights.head;
}

// Lays out the state in the arena: without memory to compute its size, with memory to use it. `layout`:
// lay_out_rank(options).
GptState place_state(const GptOptions& options, TensorLayout layout, Arena& arena);

// Returns the part of a tensor with Division::summed whose gradients are summed over GptState::group: the owned one or,
// with deterministic_reduce, the whole tensor after each micro-step. Empty for other tensors.
TensorPart summed_part(const GptState& s, const Tensor& tensor);

// Makes the backward pass write gradients to GptState::levels[level].
void point_gradients(GptState& s, size_t level);

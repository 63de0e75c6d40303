// The options of one rank's training: the model's shape, the batch, precision, recomputation, the optimizer and the
// rank's place in the run.
#pragma once

#include "kernels/numeric.h"
#include "model/optimizers.h"  // IWYU pragma: export
#include "model/shape.h"       // IWYU pragma: export

// A rank's place among those that divide every layer: tensor parallelism (Shoeybi et al., arXiv 1909.08053). Rank r has
// part r of the heads, the hidden channels and the vocabulary, and of the rows of the residual stream (sequence
// parallelism; Korthikanti et al., arXiv 2205.05198).
struct TensorParallel {
    int rank = 0, size = 1;
};

// Layers [first, first + count) of a model.
struct LayerRange {
    int first = 0, count = 0;
    int end() const { return first + count; }
};

// A rank's place among those that have different layers: pipeline parallelism. The layers are divided into size *
// chunks parts, in their order; rank r, a stage, has the parts r, r + size, r + 2 size, ...
struct PipelineParallel {
    int rank = 0, size = 1;
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int chunks = 1;                // parts of each rank
    std::vector<int> layers = {};  // of each part, at least 1; empty: see layer_ranges()

    // Whether separate passes compute the gradients of the linear layers' parameters.
    bool defers_weights() const { return size > 1 && schedule == PipelineSchedule::zero_bubble; }
    bool is_first() const { return rank == 0; }
    bool is_last() const { return rank + 1 == size; }
};

// Everything that determines how much memory one rank needs and what a step computes.
struct GptOptions {
    GptShape shape;
    int batch = 0;      // B, sequences per rank and micro-step
    int seq_len = 0;    // T, at most shape.n_positions
    int max_parts = 1;  // of a sequence, if StepSettings::seq_len splits it
    Dtype precision = Dtype::fp32;
    Recompute recompute = Recompute::none;
    OptimizerSettings optimizer;
    bool averages = false;       // keep an average of the masters, see StepSettings::average_weight
    double dropout = 0;          // probability of dropping an element in training, below 1; see DropoutSite
    uint64_t seed = 0;           // of the dropout masks and of stochastic rounding
    float z_loss = 0;            // factor of the squared log-sum-exp in the objective
    bool document_mask = false;  // tokens do not see earlier documents; document_token starts one
    int document_token = -1;
    int head_rows = 0;         // rows of logits held at a time, at least 1
    int cached_sequences = 0;  // sequences in the KV cache, for prefill() and decode(): at most B T, 0 in training
    bool training = true;      // false: forward only, without gradients, optimizer state and backward's buffers
    int micro_steps = 1;       // per step, on each rank; the most if StepSettings sets fewer
    int votes = 0;             // numbers that Gpt::end_step() sums over ranks for its caller
    int rank = 0, ranks = 1;   // among the ranks with the same part of the model, which divide the batch
    TensorParallel tensor_parallel = {};  // among the ranks that divide the layers of the same samples
    PipelineParallel pipeline = {};       // among the ranks that have the layers of the same samples
    // ZeRO stage (Rajbhandari et al., arXiv 1910.02054): state sharded over ranks. 1: masters and optimizer state; 2:
    // gradients too, even while they accumulate; 3: parameters too.
    int zero_stage = 0;
    bool deterministic_reduce = false;  // sum gradients in the same order for any number of ranks and micro-steps
    size_t bucket_bytes = 0;            // maximum size of successive blocks' gradients that are reduced together

    // This rank's number among the ranks of its stage, which have the same layers.
    int stage_rank() const { return rank * tensor_parallel.size + tensor_parallel.rank; }
    // Whether the master weights are the compute weights: they have the same type.
    bool computes_with_masters() const { return optimizer.master_type() == precision; }
    bool is_sharded() const { return zero_stage > 0 && ranks > 1; }
    // Whether whole gradients exist until the end of the step; if not, each block's are reduced as soon as they are
    // complete.
    bool keeps_whole_gradients() const { return !is_sharded() || zero_stage == 1 || deterministic_reduce; }
    bool keeps_whole_parameters() const { return !is_sharded() || zero_stage < 3; }
};

// Returns the layers of each of the size * chunks parts of options.pipeline. Without given numbers of layers, the most
// arithmetic of a part is as small as possible; the head counts for the last part.
std::vector<LayerRange> layer_ranges(const GptOptions& options);
// Those of the parts that this rank has, in the order of its chunks.
std::vector<LayerRange> own_layers(const GptOptions& options);

// Returns why the model cannot be divided as tensor_parallel says, naming configuration keys; empty if it can.
std::string tensor_parallel_problem(const GptOptions& options);

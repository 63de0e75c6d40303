// The options of one rank's training: the model's shape, the batch, precision, recomputation, the optimizer and the
// rank's place in the run.
#pragma once

#include "kernels/base/chunks.h"
#include "kernels/numeric.h"
#include "model/optimizers.h"  // IWYU pragma: export
#include "model/shape.h"       // IWYU pragma: export

// A rank's place among those that divide every layer: tensor parallelism (Shoeybi et al., arXiv 1909.08053). Rank r has
// part r of the heads, the hidden channels and the vocabulary, and of the rows of the residual stream (sequence
// parallelism; Korthikanti et al., arXiv 2205.05198).
struct TensorParallel {
    int rank = 0, size = 1;
};

// The sequences of a pass.
struct BatchSizes {
    int batch, seq_len;
    size_t rows() const { return size_t(batch) * size_t(seq_len); }
};

// A rank's place among those that divide every sequence: context parallelism, for which attention is a ring (Liu et
// al., arXiv 2310.01889). Of the 2 n chunks of a sequence, segment i has the chunks i and 2 n - 1 - i, so that causal
// attention is about the same work for every segment. A rank has one segment, or several successive ones if sums over
// positions have a term per segment; then the ring does not affect the terms.
struct ContextParallel {
    int rank = 0, size = 1;
    int segments = 0;  // of this rank; 0: one, and sums over positions have a term per rank

    bool has_terms() const { return segments > 0; }
    int own_segments() const { return has_terms() ? segments : 1; }
    int all_segments() const { return size * own_segments(); }
    bool is_divided() const { return all_segments() > 1; }
    // Whether sequences of this length can be divided. A chunk is a multiple of 16 tokens, as the squares of a dropout
    // mask.
    bool divides(int seq_len) const { return !is_divided() || seq_len % (32 * all_segments()) == 0; }
    // This rank's part of a batch: of each segment, the first chunks of all sequences, then the second ones, as
    // sequences.
    BatchSizes part(const BatchSizes& whole) const {
        if (!is_divided()) return whole;
        return {2 * own_segments() * whole.batch, whole.seq_len / (2 * all_segments())};
    }
    // The positions of the sequences of a segment of this rank, which have seq_len tokens.
    ops::ChunkStarts starts(int seq_len, int segment = 0) const {
        const int number = rank * own_segments() + segment;
        if (!is_divided()) return {};
        return {number * seq_len, (2 * all_segments() - 1 - number) * seq_len};
    }
    // The row of a batch that is the first of sequence `b` of the part. The sequence's other rows follow it.
    int first_row(const BatchSizes& whole, int b) const {
        const BatchSizes own = part(whole);
        const int each = own.batch / own_segments();
        return b % whole.batch * whole.seq_len + starts(own.seq_len, b / each).start(b % each, each);
    }
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
    std::vector<int> layers = {};  // of each part, at least 1; empty: see part_layers()

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
    bool fp8 = false;                   // training multiplies operands of 8 bits in the blocks; precision is bf16
    Dtype fp8_gradients = Dtype::e5m2;  // of the outputs' gradients
    Recompute recompute = Recompute::none;
    OptimizerSettings optimizer;
    bool offload_optimizer = false;    // these are in host memory: masters, unless computes_with_masters(); optimizer
                                       // state of each parameter; averages
    size_t offload_window_bytes = 0;   // of device memory for each of two windows; at least what a chunk needs
    bool offload_activations = false;  // the inputs of the blocks are in host memory until backward needs them;
                                       // recompute is block
    // These are in host memory, too, except a bucket that a pass needs. Require offload_optimizer and one rank;
    // offload_gradients does not support deterministic_reduce.
    bool offload_weights = false, offload_gradients = false;
    bool averages = false;       // keep an average of the masters, see StepSettings::average_weight
    double dropout = 0;          // probability of dropping an element in training, below 1; see DropoutSite
    uint64_t seed = 0;           // of the dropout masks and of stochastic rounding
    float z_loss = 0;            // factor of the squared log-sum-exp in the objective
    bool document_mask = false;  // tokens do not see earlier documents; document_token starts one
    int document_token = -1;
    int head_rows = 0;             // rows of logits held at a time, at least 1
    int cached_sequences = 0;      // sequences in the KV cache, for prefill() and decode(): at most B T, 0 in training
    bool training = true;          // false: forward only, without gradients, optimizer state and backward's buffers
    int micro_steps = 1;           // per step, on each rank; the most if StepSettings sets fewer
    int votes = 0;                 // numbers that Gpt::end_step() sums over ranks for its caller
    int rank = 0, ranks = 1;       // among the ranks with the same part of the model, which divide the batch
    ContextParallel context = {};  // among the ones of these ranks that divide the same samples
    TensorParallel tensor_parallel = {};  // among the ranks that divide the layers of the same samples
    PipelineParallel pipeline = {};       // among the ranks that have the layers of the same samples
    // ZeRO stage (Rajbhandari et al., arXiv 1910.02054): state sharded over ranks. 1: masters and optimizer state; 2:
    // gradients too, even while they accumulate; 3: parameters too.
    int zero_stage = 0;
    bool deterministic_reduce = false;  // sum gradients in the same order for any number of ranks and micro-steps
    int max_terms = 1;  // of terms_of_sums() and segments_of_ring(); for more than 1, deterministic_reduce is required
    size_t bucket_bytes = 0;  // maximum size of successive blocks' gradients that are reduced together

    // The rows of a rank's pass.
    BatchSizes part() const { return context.part({batch, seq_len}); }
    // The ranks that have different samples, and this rank's number among them.
    int sample_ranks() const { return ranks / context.size; }
    int sample_rank() const { return rank / context.size; }
    // This rank's number among the ranks of its stage, which have the same layers.
    int stage_rank() const { return rank * tensor_parallel.size + tensor_parallel.rank; }
    // Whether the master weights are the compute weights: they have the same type.
    bool computes_with_masters() const { return optimizer.master_type() == precision; }
    bool is_sharded() const { return zero_stage > 0 && ranks > 1; }
    // Whether whole gradients exist until the end of the step; if not, each block's are reduced as soon as they are
    // complete.
    bool keeps_whole_gradients() const {
        return !offload_gradients && (!is_sharded() || zero_stage == 1 || deterministic_reduce);
    }
    bool keeps_whole_parameters() const { return !offload_weights && (!is_sharded() || zero_stage < 3); }
};

// Returns the multiplications per token of each layer in a forward pass, then of the head.
std::vector<double> layer_work(const GptOptions& options);

// Returns the number of layers of each of the size * chunks parts of options.pipeline: the given ones, or
// balanced_layers() by pipeline_work(), whose search takes long.
std::vector<int> part_layers(const GptOptions& options);
// Returns the layers of these parts.
std::vector<LayerRange> layer_ranges(const GptOptions& options);
// Those of the parts that this rank has, in the order of its chunks.
std::vector<LayerRange> own_layers(const GptOptions& options);

// Returns the number of terms of every sum that tensor parallelism divides: at least the number of ranks, and in
// training the largest power of two up to max_terms into which the model can be divided without sharing key/value
// heads. So the sums are the same for all numbers of ranks up to that one: each rank has an aligned block of the terms.
int terms_of_sums(const GptOptions& options);

// Returns ContextParallel::segments for a ring: all its ranks together have the largest power of two up to max_terms
// into which sequences of any multiple of `seq_len` tokens can be divided. 0 if the ring has not that many ranks, or
// other numbers.
int segments_of_ring(const GptOptions& options, int seq_len);

// Returns why the model cannot be divided as tensor_parallel says, naming configuration keys; empty if it can.
std::string tensor_parallel_problem(const GptOptions& options);

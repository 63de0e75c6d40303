// The layers of a GPT as forward/backward pairs: each backward function follows its forward function.
//
// A backward function takes the gradient of the layer's output, writes the gradient of its input, and overwrites or
// accumulates the gradients of its parameters. Shapes are documented in activations.h and tensors.cpp.
#pragma once

#include <vector>

#include "kernels/base/dropout.h"
#include "kernels/comm.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"  // IWYU pragma: export
#include "kernels/tensor.h"
#include "model/activations.h"
#include "model/fp8.h"
#include "model/tensors.h"

// The sites of dropout: the sum of the embeddings and, in each block, the attention probabilities and the outputs of
// attention and MLP before they are added to the residual stream. A mask's site is kDropoutsPerBlock * layer + this.
enum class DropoutSite : uint32_t { embedding, attention, attn_proj, mlp };
inline constexpr uint32_t kDropoutsPerBlock = 3;

// Keys and values of growing sequences, so that they are computed only once. The channels of a position are its keys,
// then its values.
struct KeyValueCache {
    View memory;              // (L, sequences, capacity, channels); null: no cache
    void* scratch = nullptr;  // of attention_decode()
    int sequences = 0, capacity = 0, channels = 0;

    size_t sequence_elements() const { return size_t(capacity) * size_t(channels); }
    size_t layer_elements() const { return size_t(sequences) * sequence_elements(); }
    View layer(int number) const { return memory.from(size_t(number) * layer_elements()); }
    View sequence(int of_layer, int number) const { return layer(of_layer).from(size_t(number) * sequence_elements()); }
};

// A pass over one more token of each of `rows` sequences, whose earlier keys and values are in the cache.
struct DecodePass {
    const ops::AttentionDecode::Place* places;  // (rows), in device memory
    const int* positions;                       // (rows), the positions of `places`, in device memory
};

// The ranks that divide the layers, and their buffers, which are null if they are not needed.
struct TensorParallelGroup {
    Comm comm;
    // The parts of this rank's heads, hidden channels, tokens and rows. Each has its own term in sums over the ranks;
    // see terms_of_sums().
    int parts = 1;
    int row_terms = 1;                    // of sums over this rank's rows of the residual stream
    int max_bands = 1;                    // of LayerContext::bands()
    View gathered;                        // (B, T, C)
    View terms;                           // (parts, B, T, C), of a sum
    View sum;                             // (B, T, C), FP32, of this rank's terms, with several ranks and parts
    View part_channels, part_weight;      // a part's channels of all rows, and its part of a weight
    View part_raw;                        // a part of AttentionActivations::raw, with weights of QK norm
    float* part_rstd = nullptr;           // the same of AttentionActivations::rstd
    float* vectors = nullptr;             // (2, parts or row_terms, C), terms of the gradients of vectors
    void* scratch = nullptr;              // of reduce_scatter_sum()
    ops::VocabularySums* sums = nullptr;  // (ranks, parts, head rows)
    // The ranks with the same key/value head, and the part of qkv that each computes.
    Comm kv_head;
    View computed_qkv;  // (B, T, computed qkv channels); null if the ranks have different heads
    View kv_parts;      // (ranks, B, T, computed KV channels), the keys and values of computed_qkv
};

// The buffers of sums that have a term for each segment: see ContextParallel. The arrays of all ranks are in the order
// of the segments.
struct SegmentTerms {
    // Partial sums, each as large as the largest array of terms. A sum along a binary tree needs one for each power of
    // two below its number of terms.
    std::vector<float*> levels;
    View kv;                        // (ranks, B, T, KV channels), the keys and values of all ranks
    float* dkv = nullptr;           // (ranks, B, T, KV channels), their gradients
    View rows;                      // (ranks, B, T, C), of all ranks; null with one rank
    int* tokens = nullptr;          // (ranks, B, T), the same
    float* head_vectors = nullptr;  // (2, segments, head size), gradients of the weights of QK norm
    void* scratch = nullptr;        // of reduce_scatter_sum()
};

// The ranks that divide the sequences, and the buffers of attention over chunks, which are null with one segment.
struct AttentionRing {
    Comm comm;
    ops::RunningAttention running;  // its `out` is the sum of the gradients of the queries in backward
    SegmentTerms terms;
    // Of ring attention, without terms.
    View kv[2];            // (B, T, KV channels), of this rank's keys and values and of the previous rank's
    float* dkv = nullptr;  // (B, T, KV channels), this rank's gradients
    // Terms of the gradients of another rank's keys and values, to be sent; and of this rank's, as received.
    float *sent[2] = {}, *received = nullptr;
};

// The place of some rows' gradients in sums with terms.
struct TermPlace {
    int first = 0;            // the number of the first segment's term
    bool is_complete = true;  // the rows are whole segments, or the last ones of a segment
    size_t element = 0;       // the first that the sum may use of SegmentTerms::levels
};

// The arguments of every layer other than its parameters and activations.
struct LayerContext {
    const GptShape* shape;         // this rank's part
    int batch, seq_len;            // B, T, of this rank's part of the batch
    ops::ChunkStarts starts = {};  // of its sequences; with several segments, of the first one's
    int rows;                      // B T, or fewer for the head
    int segments = 1;              // that the rows are divided into
    TermPlace terms = {};
    const TensorParallelGroup* group;
    const AttentionRing* ring;
    OpStream stream;
    void* scratch;                      // as large as the largest op needs; null without a backward pass
    bool accumulate;                    // add parameter gradients to the current values
    bool is_recomputing;                // forward runs again for backward and skips kept activations
    bool defers_weights = false;        // backward leaves the linear layers' parameters to backward_weight()
    const float* rope_table = nullptr;  // (T, rotary / 2, 2)
    const int* first_key = nullptr;     // (B, T), start of each token's document; null: no document mask
    const Fp8Buffers* fp8 = nullptr;    // of linear layers with operands of 8 bits, in training; null: none
    const KeyValueCache* cache = nullptr;
    int prefilled = -1;                  // the cached sequence that this pass fills; -1: none
    const DecodePass* decode = nullptr;  // null: a pass over whole sequences
    ops::DropoutMask dropout = {};       // of this pass, none in evaluation; its site is DropoutSite::embedding

    // Returns the context of block `layer`.
    LayerContext of_block(size_t layer) const {
        LayerContext x = *this;
        x.stream.layer = int(layer);
        x.dropout.place = uint32_t(layer) * kDropoutsPerBlock << 16;
        return x;
    }
    ops::DropoutMask dropout_at(DropoutSite site) const {
        ops::DropoutMask mask = dropout;
        mask.place += uint32_t(site) << 16;
        return mask;
    }
    // Returns the context of a segment's rows, which are the first ones of its arrays.
    LayerContext of_segment(int number) const {
        LayerContext x = *this;
        x.batch /= segments, x.rows /= segments, x.segments = 1;
        x.starts.first += number * seq_len, x.starts.second -= number * seq_len;
        return x;
    }
    // The rows of the first or of the second chunks of a segment's sequences.
    int chunk_rows() const { return rows / (2 * segments); }
    // The first of the rows of a segment.
    size_t segment_row(int number) const { return size_t(number) * size_t(rows / segments); }
    bool has(const Activation& activation) const { return is_recomputing && activation.is_kept; }
    // This rank's rows of the residual stream. All rows are divided into bands, and each band over the ranks, so that
    // the collectives of one band overlap the GEMM of another.
    int own_rows() const { return rows / group->comm.size; }
    int bands() const { return rows % (group->max_bands * group->comm.size) == 0 ? group->max_bands : 1; }
    // The first of this rank's rows in a band.
    int first_row(int band) const { return (band * group->comm.size + group->comm.rank) * own_rows() / bands(); }
};

// The residual stream and the branch to be added to it; a null branch adds nothing.
struct ResidualSum {
    ConstView residual, branch;
};

// Returns all rows of `own`, which has this rank's rows: x.group->gathered, or `own` with one rank.
ConstView gather_rows(const LayerContext& x, ConstView own);

// Adds the terms of all ranks. `terms`, (n, rows, C), are this rank's. `own` gets this rank's rows of the sum. With one
// rank and one term, `terms` must be `own`.
void sum_rows(const LayerContext& x, View own, ConstView terms, int n = 1);
// Returns the place for this rank's term if it has one: x.group->gathered, or `own` with one rank.
View rows_to_sum(const LayerContext& x, View own);

// A sum along a binary tree over 2^n terms, in `out`; does nothing if that is null. Compute each term in term_of(),
// then call add_term() for its `count` elements, in the order of the terms. `element`: see TermPlace.
float* term_of(const LayerContext& x, float* out, int number, size_t element = 0);
void add_term(const LayerContext& x, float* out, int number, size_t count, size_t element = 0);

// Copies `count` channels of some rows. `to` and `from` have to_width and from_width channels.
void copy_channels(const LayerContext& x, View to, int to_width, ConstView from, int from_width, int count, int rows);

// out = wte[token] + wpe[position]; wte[token] without learned positions
void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out);
// has_head_part: the gradient of wte already holds the part of a tied head.
void embedding_backward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                        ConstView dout, bool has_head_part);

// residual = in.residual + in.branch, out = norm(residual). Without a branch, `residual` is the input.
void residual_norm_forward(const LayerContext& x, const LayerWeights& w, ResidualSum in, const Activation& residual,
                           const NormActivations& norm);
// dresidual = the gradient of `residual`, added to the stream's gradient with accumulate_dresidual.
void residual_norm_backward(const LayerContext& x, const LayerWeights& w, ConstView residual,
                            const NormActivations& norm, ConstView dout, View dresidual, bool accumulate_dresidual);

// An activation function at the end of a linear layer, and the value that its derivative needs: the pre-activation, or
// for relu2 the output.
struct LinearActivation {
    ActivationFunction function = ActivationFunction::none;
    View kept = nullptr;
};

// out = inp weight^T + bias, then the activation if there is one
void linear_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                    const LinearActivation& activation = {});
// With an activation, `inp` is the activation's output, and dinp becomes the gradient of its input.
void linear_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                     const LinearActivation& activation = {});

// The gradients of the layer's parameters, which linear_backward() computes too unless x.defers_weights. `dout` is what
// that received.
void linear_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout);

// The four linear layers of a block divide their weight over the ranks of x.group (Shoeybi et al., "Megatron-LM", arXiv
// 1909.08053, section 3). A column-parallel layer, qkv and fc, has a part of the output channels; it gathers all rows
// of its input, and the backward pass sums the input's gradient over ranks. A row-parallel layer, attn_proj and
// fc_proj, has a part of the input channels; its output is a sum over ranks, and the backward pass gathers the output's
// gradient. inp and dinp of a column-parallel layer and out and dout of a row-parallel one are this rank's rows. With
// one rank and one part both are linear_forward() and linear_backward(). stacked: the rows of the matrices that the
// weight stacks.
void column_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                             const LinearActivation& activation = {});
void column_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                              std::initializer_list<int> stacked);
void row_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out);
void row_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                           const LinearActivation& activation = {});
void column_parallel_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout);
void row_parallel_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout);

// A column-parallel layer. Ranks with the same key/value head compute a part of its channels each, exchange them, and
// sum the gradients of each part; the backward pass leaves the gradients of the part in dqkv.
void qkv_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& qkv);
void qkv_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, View dqkv, View dinp);

// Drops elements of a layer's output in place, by the pass's mask for the site; a no-op without dropout.
void dropout_forward(const LayerContext& x, DropoutSite site, const Activation& out);
// Returns the gradient before dropout, in `buffer`, which may be `dout`. Without dropout returns `dout`, or with
// x.defers_weights a copy in `buffer`.
ConstView dropout_backward(const LayerContext& x, DropoutSite site, ConstView dout, View buffer);

// QK norm and RoPE on the packed queries and keys, in place, if the model has them.
void heads_forward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, const Activation& qkv,
                   const AttentionActivations& attn);
void heads_backward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, ConstView qkv,
                    const AttentionActivations& attn, View dqkv);

// Causal self-attention over the packed queries, keys and values.
void attention_forward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn);
void attention_backward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn, ConstView dout,
                        View dqkv);

// out = proj(f(fc(inp))), or with a gate proj(f(gate) up) where fc(inp) = (gate, up)
void mlp_forward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                 const MlpActivations& mlp);
// dfc, dact: buffers for the gradients of the outputs of fc and, with a gate, of the gate; dact may be mlp.act. dinp
// may be dout.
void mlp_backward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                  const MlpActivations& mlp, ConstView dout, View dfc, View dact, View dinp);

// The head's arguments other than the layer's input, and its outputs.
struct HeadPass {
    View logits;              // (head rows, Vp), buffer for some rows, overwritten with their gradients
    float* loss;              // (B, T)  =
    const int* targets;       // (B, T)
    const float* loss_scale;  // (1)
    float grad_scale;         // weight of each target's loss
    float z_loss;             // see ops::CrossEntropy
    View dinp;                // (B, T, C)  =, or null for the forward pass only
};

// Computes logits and losses and, with head.dinp, the gradients of the head's weight and of the input. Processes as
// many rows at a time as fit into head.logits, so that logits and their gradients never exist for all rows at once.
void head_forward_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, int head_rows,
                           const HeadPass& head);

// THE SEAM: every operation that the model is made of. The linker chooses who implements them.
//
// An op is a struct of named arguments and one function of the same name; T is the storage type (float, bf16 or fp16)
// of activations and compute weights. Outputs stand first, then inputs, then sizes. Behind a pointer: its shape,
// outermost dimension first, and for outputs `=` (overwritten) or `+=` (added to). All memory is device memory, all
// arithmetic is float or wider, a value is rounded to T once, when it is stored. Outputs never alias inputs unless it
// says so. Every op gives the same bits for the same arguments, whatever the number of threads.
//
// `scratch` is memory that the op may overwrite and nobody reads afterwards; *_scratch_bytes(op) tells how much is
// needed for given sizes (it reads no pointer), so that a plan can ask before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device.h"
#include "kernels/numeric.h"

namespace ops {

// ---------------------------------------------------------------------------------------------------------------------
// Embedding: out = wte[token] + wpe[position].

template <class T> struct EmbeddingForward {
    T* out;             // (batch, seq_len, channels)  =
    const int* tokens;  // (batch, seq_len), each in [0, rows of wte)
    const T* wte;       // (vocab, channels)
    const T* wpe;       // (n_positions, channels), the first seq_len rows are used
    int batch, seq_len, channels;
};
template <class T> void embedding_forward(const EmbeddingForward<T>& op, Stream stream);

// Deterministic although tokens repeat: each row of dwte is summed by one worker in the order of positions.
template <class T> struct EmbeddingBackward {
    float* dwte;        // (vocab, channels)  +=
    float* dwpe;        // (n_positions, channels)  = or += by `accumulate`; rows from seq_len on get 0 or stay
    void* scratch;      // embedding_backward_scratch_bytes
    const T* dout;      // (batch, seq_len, channels)
    const int* tokens;  // (batch, seq_len)
    int batch, seq_len, channels, vocab, n_positions;
    bool accumulate;
};
template <class T> void embedding_backward(const EmbeddingBackward<T>& op, Stream stream);
template <class T> size_t embedding_backward_scratch_bytes(const EmbeddingBackward<T>& op);

// ---------------------------------------------------------------------------------------------------------------------
// Layer normalisation over the last dimension: out = (inp - mean) rstd weight + bias, rstd = 1 / sqrt(variance + eps).
// (Ba, Kiros, Hinton, "Layer Normalization", arXiv 1607.06450, eq. 4; the variance is the biased one.)

template <class T> struct NormForward {
    T* out;           // (rows, cols)  =
    float* mean;      // (rows)  =
    float* rstd;      // (rows)  =
    const T* inp;     // (rows, cols)
    const T* weight;  // (cols)
    const T* bias;    // (cols)
    int rows, cols;
    float eps;
};
template <class T> void norm_forward(const NormForward<T>& op, Stream stream);

// residual = inp + branch, then out = norm(residual), in one pass. The norm reads the residual as rounded to T, so
// norm_forward on the stored residual gives the same bits.
template <class T> struct ResidualNormForward {
    T* residual;      // (rows, cols)  =
    T* out;           // (rows, cols)  =
    float* mean;      // (rows)  =
    float* rstd;      // (rows)  =
    const T* inp;     // (rows, cols)
    const T* branch;  // (rows, cols)
    const T* weight;  // (cols)
    const T* bias;    // (cols)
    int rows, cols;
    float eps;
};
template <class T> void residual_norm_forward(const ResidualNormForward<T>& op, Stream stream);

template <class T> struct NormBackward {
    T* dinp;            // (rows, cols)  = or += by `accumulate_dinp`: += adds the branch's gradient to the residual's
    float* dweight;     // (cols)  = or += by `accumulate`
    float* dbias;       // (cols)  = or += by `accumulate`
    void* scratch;      // norm_backward_scratch_bytes
    const T* dout;      // (rows, cols)
    const T* inp;       // (rows, cols), what the forward op normalised
    const T* weight;    // (cols)
    const float* mean;  // (rows)
    const float* rstd;  // (rows)
    int rows, cols;
    bool accumulate_dinp;
    bool accumulate;
};
template <class T> void norm_backward(const NormBackward<T>& op, Stream stream);
template <class T> size_t norm_backward_scratch_bytes(const NormBackward<T>& op);

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products. Weights are (out features, in features) like torch.nn.Linear's.
// GELU is the tanh form of GPT-2: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks, Gimpel, arXiv
// 1606.08415).

// out = inp weight^T + bias. With pre_gelu: pre_gelu = inp weight^T + bias, out = gelu(pre_gelu as rounded to T).
template <class T> struct MatmulForward {
    T* out;           // (rows, n)  =
    T* pre_gelu;      // (rows, n)  =, or null for no GELU
    const T* inp;     // (rows, k)
    const T* weight;  // (n, k)
    const T* bias;    // (n), or null
    int rows, n, k;
};
template <class T> void matmul_forward(const MatmulForward<T>& op, Stream stream);

// dinp = dout weight. With pre_gelu: dinp = (dout weight) gelu'(pre_gelu), the gradient before the activation.
template <class T> struct MatmulBackwardInput {
    T* dinp;            // (rows, k)  =
    const T* dout;      // (rows, n)
    const T* weight;    // (n, k)
    const T* pre_gelu;  // (rows, k), or null
    int rows, n, k;
};
template <class T> void matmul_backward_input(const MatmulBackwardInput<T>& op, Stream stream);

// dweight = dout^T inp, dbias = the column sums of dout; in FP32.
template <class T> struct MatmulBackwardWeight {
    float* dweight;  // (n, k)  = or += by `accumulate`
    float* dbias;    // (n)  = or += by `accumulate`, or null
    void* scratch;   // matmul_backward_weight_scratch_bytes
    const T* dout;   // (rows, n)
    const T* inp;    // (rows, k)
    int rows, n, k;
    bool accumulate;
};
template <class T> void matmul_backward_weight(const MatmulBackwardWeight<T>& op, Stream stream);
template <class T> size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight<T>& op);

// The activation alone, where its output was not kept and is wanted again: the bits of matmul_forward's epilogue.
template <class T> struct GeluForward {
    T* out;        // (count)  =
    const T* inp;  // (count)
    size_t count;
};
template <class T> void gelu_forward(const GeluForward<T>& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Causal self-attention, flash style: online softmax over key blocks, no (seq_len, seq_len) matrix, blocks above the
// diagonal skipped (Dao, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2). Query head h reads key-value head
// h / (n_head / n_kv_head). qkv packs, per position, all query heads, then all key heads, then all value heads.

template <class T> struct AttentionForward {
    T* out;        // (batch, seq_len, n_head * head_size)  =
    float* lse;    // (batch, n_head, seq_len)  =, log of the sum of exp of the scaled scores
    const T* qkv;  // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;  // multiplies query . key, 1 / sqrt(head_size) in GPT-2
};
template <class T> void attention_forward(const AttentionForward<T>& op, Stream stream);

template <class T> struct AttentionBackward {
    T* dqkv;           // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)  =
    void* scratch;     // attention_backward_scratch_bytes
    const T* dout;     // (batch, seq_len, n_head * head_size)
    const T* qkv;      // as in the forward op
    const T* out;      // (batch, seq_len, n_head * head_size), what the forward op gave
    const float* lse;  // (batch, n_head, seq_len)
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;
};
template <class T> void attention_backward(const AttentionBackward<T>& op, Stream stream);
template <class T> size_t attention_backward_scratch_bytes(const AttentionBackward<T>& op);

// ---------------------------------------------------------------------------------------------------------------------
// Softmax, cross-entropy and the gradient with respect to the logits in one pass; probabilities are never stored.

template <class T> struct CrossEntropy {
    T* logits;                // (rows, padded_vocab); overwritten with dlogits if `write_dlogits`: the gradient times
                              // grad_scale * *loss_scale, 0 in the padding and in rows without a target
    float* loss;              // (rows)  =, in nats; 0 in rows without a target
    const int* targets;       // (rows), in [0, vocab), or -1 for no target
    const float* loss_scale;  // (1), or null for 1
    int rows, vocab, padded_vocab;  // columns from vocab on are padding, read by nobody
    float grad_scale;
    bool write_dlogits;
};
template <class T> void cross_entropy(const CrossEntropy<T>& op, Stream stream);

// *out (+)= the sum of the losses, in a fixed order.
struct LossSum {
    double* out;        // (1)  = or += by `accumulate`
    const float* loss;  // (rows)
    int rows;
    bool accumulate;
};
void loss_sum(const LossSum& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// The update. Parameters, gradients and moments are flat FP32 arrays cut into chunks; a chunk lies inside one tensor
// and the cutting depends on nothing but the tensors, so sums over chunks have the same order on any number of ranks.
// A rank's flat arrays hold the chunks that it owns.

inline constexpr int kChunkElements = 1 << 14;

struct Chunk {
    size_t begin;  // first element in the flat arrays
    int count;     // elements, at most kChunkElements
    int tensor;    // row in the table of tensors
    int decayed;   // 1 if weight decay applies
    int index;     // its place among the chunks of all ranks
};

// What the gradients of one step amount to. Lives on the device; the update reads it there.
struct GradNorm {
    float norm;             // Euclidean, over all gradients, loss scale removed, before clipping
    float scale;            // the update multiplies gradients with this: clipping coefficient / loss scale
    int non_finite_tensor;  // the first tensor that has a NaN or infinity, or -1; if not -1 updates do nothing
    int reserved;
};

// Sum of squares of each chunk, in double so that a finite gradient never overflows: not finite iff an element is not.
struct SquaredSums {
    double* out;          // (chunks of all ranks)  =, at each chunk's index
    const float* values;  // flat
    const Chunk* chunks;  // (n_chunks), any of them, in any order
    int n_chunks;
};
void squared_sums(const SquaredSums& op, Stream stream);

// norm = sqrt(sum of sums) / loss_scale, scale = min(1, clip / (norm + 1e-6)) / loss_scale, as torch's clip_grad_norm_.
struct GradNormFinish {
    GradNorm* out;            // (1)  =
    const double* sums;       // (n_chunks), from squared_sums
    const Chunk* chunks;      // (n_chunks), all of them in the order of their index
    const float* loss_scale;  // (1)
    int n_chunks;
    float clip;  // 0 for no clipping
};
void grad_norm_finish(const GradNormFinish& op, Stream stream);

// The scalars of one step, in device memory so that a recorded sequence of launches can be replayed.
struct StepScalars {
    float loss_scale;
    float learning_rate;
    float bias_correction1;  // 1 - beta1^t, t counting applied updates from 1; computed in double
    float bias_correction2;  // 1 - beta2^t
};

// AdamW as in torch.optim.AdamW: decoupled decay, bias-corrected moments, eps outside the root
// (Loshchilov, Hutter, arXiv 1711.05101, algorithm 2). Gradients are scaled by grad_norm->scale first.
template <class T> struct AdamwUpdate {
    float* master;  // flat  +=
    T* param;       // flat  =, the master rounded to T; null where T is float and the master is the parameter
    float* m;       // flat, first moment, updated
    float* v;       // flat, second moment, updated
    const float* grad;
    const Chunk* chunks;
    const GradNorm* grad_norm;
    const StepScalars* scalars;
    int n_chunks;
    double beta1, beta2;  // as torch, 1 - beta is taken in double and then rounded to float
    float eps, weight_decay;
};
template <class T> void adamw_update(const AdamwUpdate<T>& op, Stream stream);

// SGD with momentum as in torch.optim.SGD (dampening 0, no Nesterov), decay decoupled like AdamW's:
// m = momentum m + g; master -= lr (m + weight_decay master).
template <class T> struct SgdUpdate {
    float* master;
    T* param;
    float* m;  // flat, momentum, starts at 0
    const float* grad;
    const Chunk* chunks;
    const GradNorm* grad_norm;
    const StepScalars* scalars;
    int n_chunks;
    float momentum, weight_decay;
};
template <class T> void sgd_update(const SgdUpdate<T>& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Filling and casting.

// out[i - first] = mean 0 normal number with the given deviation, a pure function of (seed, subsequence, i): Box-Muller
// on philox(seed, (RandomPurpose::init << 32) + subsequence, i / 4) in double, so the same on every device.
struct NormalFill {
    float* out;  // (count)  =
    size_t count;
    uint64_t seed;
    uint32_t subsequence;
    float deviation;
    size_t first;  // i of out[0], a multiple of 4
};
void normal_fill(const NormalFill& op, Stream stream);

struct Fill {
    float* out;  // (count)  =
    size_t count;
    float value;
};
void fill(const Fill& op, Stream stream);

struct Add {
    float* out;        // (count)  +=
    const float* inp;  // (count)
    size_t count;
};
void add(const Add& op, Stream stream);

template <class T> struct Cast {
    T* out;            // (count)  =, rounded to nearest even
    const float* inp;  // (count)
    size_t count;
};
template <class T> void cast(const Cast<T>& op, Stream stream);

}  // namespace ops

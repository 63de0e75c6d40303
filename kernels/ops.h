// The seam between model and backends: every operation that the model is made of. The linker chooses the backend.
//
// An op is a struct of named arguments and one function of the same name. A View or ConstView is an array of
// activations or compute weights whose storage type (fp32, bf16 or fp16) is a value: the launcher dispatches on it
// once, and fails with Exit::internal and the op's name for a combination of types that it does not support; today all
// views of an op have one type. Outputs come first, then inputs, then sizes. Beside a member: its shape, outermost
// dimension first, and for outputs `=` (overwritten) or `+=` (added to). All memory is device memory, all arithmetic is
// float or wider, a value is rounded to its storage type once, when it is stored. Outputs never alias inputs unless
// stated. Every op gives the same bits for the same arguments, whatever the number of threads.
//
// `scratch` is memory that the op may overwrite and whose content is of no use afterwards; *_scratch_bytes(op) returns
// how much is needed for given sizes (it reads no pointer), so that memory can be planned before it is allocated.
#pragma once

#include "kernels/base/choices.h"
#include "kernels/base/dropout.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

namespace ops {

// ---------------------------------------------------------------------------------------------------------------------
// Embedding: out = wte[token] + wpe[position], or wte[token] alone.

struct EmbeddingForward {
    View out;           // (batch, seq_len, channels)  =
    const int* tokens;  // (batch, seq_len), each in [0, rows of wte)
    ConstView wte;      // (vocab, channels)
    ConstView wpe;      // (n_positions, channels), or null
    int batch, seq_len, channels;
    const int* positions = nullptr;  // (batch, seq_len), each in [0, n_positions); null: 0 to seq_len - 1
};
void embedding_forward(const EmbeddingForward& op, Stream stream);

// Deterministic although tokens repeat: each row of dwte is summed by one worker in the order of positions.
struct EmbeddingBackward {
    float* dwte;        // (vocab, channels)  = or += by `accumulate_dwte`; with = rows of absent tokens are set to 0
    float* dwpe;        // (n_positions, channels)  = or += by `accumulate`; rows from seq_len on are set to 0 or kept;
                        // or null
    void* scratch;      // embedding_backward_scratch_bytes
    ConstView dout;     // (batch, seq_len, channels)
    const int* tokens;  // (batch, seq_len)
    int batch, seq_len, channels, vocab, n_positions;
    bool accumulate;
    bool accumulate_dwte = true;  // a tied head wrote its part first, or an earlier micro-step its own
};
void embedding_backward(const EmbeddingBackward& op, Stream stream);
size_t embedding_backward_scratch_bytes(const EmbeddingBackward& op);

// ---------------------------------------------------------------------------------------------------------------------
// Normalisation over the last dimension.
// LayerNorm: out = (inp - mean) rstd weight + bias, rstd = 1 / sqrt(variance + eps) (Ba, Kiros, Hinton, "Layer
// Normalization", arXiv 1607.06450, eq. 4; the variance is the biased one).
// RMSNorm, where `mean` is null: out = inp rstd weight + bias, rstd = 1 / sqrt(mean of inp^2 + eps) (Zhang, Sennrich,
// "Root Mean Square Layer Normalization", arXiv 1910.07467, eq. 4).
// Both do without a weight (1) or a bias (0) that is null.

// With a branch, residual = inp + branch and out = norm(residual), in one pass; without one, out = norm(inp). The norm
// reads the residual as rounded to the storage type, so the norm of the stored residual has the same bits.
struct ResidualNormForward {
    View residual;     // (rows, cols)  =, or null without a branch
    View out;          // (rows, cols)  =
    float* mean;       // (rows)  =, or null for RMSNorm
    float* rstd;       // (rows)  =
    ConstView inp;     // (rows, cols)
    ConstView branch;  // (rows, cols), or null
    ConstView weight;  // (cols), or null
    ConstView bias;    // (cols), or null
    int rows, cols;
    float eps;
};
void residual_norm_forward(const ResidualNormForward& op, Stream stream);

struct NormBackward {
    View dinp;          // (rows, cols)  = or += by `accumulate_dinp`: += adds the branch's gradient to the residual's
    float* dweight;     // (cols)  = or += by `accumulate`; null without a weight
    float* dbias;       // (cols)  = or += by `accumulate`; null without a bias
    void* scratch;      // norm_backward_scratch_bytes
    ConstView dout;     // (rows, cols)
    ConstView inp;      // (rows, cols), what the forward op normalised
    ConstView weight;   // (cols), or null
    const float* mean;  // (rows), or null for RMSNorm
    const float* rstd;  // (rows)
    int rows, cols;
    bool accumulate_dinp;
    bool accumulate;
};
void norm_backward(const NormBackward& op, Stream stream);
size_t norm_backward_scratch_bytes(const NormBackward& op);

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products. Weights are (out features, in features) like torch.nn.Linear's.
// A product may end in an activation f (ActivationFunction):
//   gelu_new  0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))    (Hendrycks, Gimpel, arXiv 1606.08415)
//   silu      x / (1 + exp(-x))                                  (ibid.; Ramachandran et al., arXiv 1710.05941)
//   relu2     max(x, 0)^2; its derivative is 2 sqrt(f), so that backward needs nothing but the output
//                                                                (So et al., "Primer", arXiv 2109.08668, section 4)

// out = inp weight^T + bias. With an activation: pre_activation = inp weight^T + bias, out = f(pre_activation as
// stored); relu2 has no pre_activation and takes the sum as it is before it would be stored.
struct MatmulForward {
    View out;             // (rows, n)  =
    View pre_activation;  // (rows, n)  =, null without an activation and for relu2
    ConstView inp;        // (rows, k)
    ConstView weight;     // (n, k)
    ConstView bias;       // (n), or null
    int rows, n, k;
    ActivationFunction activation = ActivationFunction::none;
};
void matmul_forward(const MatmulForward& op, Stream stream);

// dinp = dout weight. With an activation: dinp = (dout weight) f', the gradient before the activation.
struct MatmulBackwardInput {
    View dinp;         // (rows, k)  =
    ConstView dout;    // (rows, n)
    ConstView weight;  // (n, k)
    ConstView kept;    // (rows, k), forward's pre_activation, or for relu2 forward's out; null without an activation
    int rows, n, k;
    ActivationFunction activation = ActivationFunction::none;
};
void matmul_backward_input(const MatmulBackwardInput& op, Stream stream);

// dweight = dout^T inp, dbias = the column sums of dout; in FP32.
struct MatmulBackwardWeight {
    float* dweight;  // (n, k)  = or += by `accumulate`
    float* dbias;    // (n)  = or += by `accumulate`, or null
    void* scratch;   // matmul_backward_weight_scratch_bytes
    ConstView dout;  // (rows, n)
    ConstView inp;   // (rows, k)
    int rows, n, k;
    bool accumulate;
};
void matmul_backward_weight(const MatmulBackwardWeight& op, Stream stream);
size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight& op);

// The activation alone, to recompute an output that was not kept: the same bits as matmul_forward's epilogue. Not for
// relu2, whose output is always kept.
struct ActivationForward {
    View out;       // (count)  =
    ConstView inp;  // (count)
    size_t count;
    ActivationFunction activation = ActivationFunction::gelu_new;
};
void activation_forward(const ActivationForward& op, Stream stream);

// A gated linear unit on one product's output: out = f(gate) up (Shazeer, "GLU Variants Improve Transformer", arXiv
// 2002.05202, eq. 5 and 6: SwiGLU has f = silu, GEGLU gelu).
struct GatedActivationForward {
    View out;       // (rows, hidden)  =
    ConstView inp;  // (rows, 2 hidden): gate, then up
    int rows, hidden;
    ActivationFunction activation;
};
void gated_activation_forward(const GatedActivationForward& op, Stream stream);

// dgate = dout up f'(gate), dup = dout f(gate).
struct GatedActivationBackward {
    View dinp;       // (rows, 2 hidden)  =
    ConstView dout;  // (rows, hidden)
    ConstView inp;   // (rows, 2 hidden), as in the forward op
    int rows, hidden;
    ActivationFunction activation;
};
void gated_activation_backward(const GatedActivationBackward& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Between the product that makes queries, keys and values, and attention: QK norm, then rotary position embedding, in
// one pass over the query and key heads. Either may be absent.
//
// QK norm is RMSNorm over each head's elements (Henry et al., "Query-Key Normalization", arXiv 2010.04245, with RMSNorm
// in place of the Euclidean norm, as in Qwen3): x = head rstd weight, rstd = 1 / sqrt(mean of head^2 + eps).
// RoPE rotates the pairs (x_i, x_{i + rotary / 2}), i < rotary / 2, of a head's first `rotary` elements by the angle
// position * frequency_i (Su et al., "RoFormer", arXiv 2104.09864, eq. 34; the pairing is that of GPT-NeoX, Llama and
// Qwen): (x_i cos - x_j sin, x_j cos + x_i sin) with j = i + rotary / 2.
struct QkNormRopeForward {
    View qkv;     // (batch, seq_len, (n_head + 2 n_kv_head) head_size): queries and keys are changed in place
    View raw;     // (batch, seq_len, (n_head + n_kv_head) head_size)  =, queries and keys as they were, which backward
                  // needs where norms have weights: dividing them out again would divide by numbers near 0; or null
    float* rstd;  // (batch, seq_len, n_head + n_kv_head)  =, or null for no norm
    ConstView q_weight, k_weight;  // (head_size), or null: the norm has no weights
    const float* table;            // (positions, rotary / 2, 2): cosine and sine, possibly scaled; null without RoPE
    int batch, seq_len, n_head, n_kv_head, head_size;
    int rotary;  // even, at most head_size; 0 without RoPE
    float eps = 0;
    const int* positions = nullptr;  // (batch, seq_len), below the table's; null: 0 to seq_len - 1
};
void qk_norm_rope_forward(const QkNormRopeForward& op, Stream stream);

// Without norm weights the normalised heads are recovered from the forward op's output, by rotating back.
struct QkNormRopeBackward {
    View dqkv;                     // as qkv: the gradients of queries and keys are changed in place
    float *dq_weight, *dk_weight;  // (head_size)  = or += by `accumulate`, or null
    void* scratch;                 // qk_norm_rope_backward_scratch_bytes
    ConstView qkv;                 // the forward op's result
    ConstView raw;                 // the forward op's
    const float* rstd;             // the forward op's
    ConstView q_weight, k_weight;
    const float* table;
    int batch, seq_len, n_head, n_kv_head, head_size, rotary;
    bool accumulate;
};
void qk_norm_rope_backward(const QkNormRopeBackward& op, Stream stream);
size_t qk_norm_rope_backward_scratch_bytes(const QkNormRopeBackward& op);

// ---------------------------------------------------------------------------------------------------------------------
// Causal self-attention, flash style: online softmax over key blocks, no (seq_len, seq_len) matrix, blocks above the
// diagonal skipped (Dao, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2). Query head h reads key-value head
// h / (n_head / n_kv_head). qkv packs, per position, all query heads, then all key heads, then all value heads.
// A query sees the keys of its own and earlier positions, with a window the last `window` of them, and none before
// first_key, which keeps the documents of a sequence apart; tiles of keys that no query sees are skipped. A key tile is
// read once for all query heads of its key-value head. With a soft cap, scores are softcap tanh(scale q . k / softcap)
// (Gemma Team, "Gemma 2", arXiv 2408.00118, section 2).
// Dropout acts on the probabilities, behind the softmax: out = dropout(P) V, and lse is as without it (Dao et al.,
// "FlashAttention", arXiv 2205.14135, appendix B.3 and B.4, algorithms 2 and 4).

struct AttentionForward {
    View out;       // (batch, seq_len, n_head * head_size)  =
    float* lse;     // (batch, n_head, seq_len)  =, log of the sum of exp of the scaled scores
    ConstView qkv;  // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;                     // multiplies query . key, 1 / sqrt(head_size) in GPT-2
    int window = 0;                  // 0: all keys
    float softcap = 0;               // 0: none
    const int* first_key = nullptr;  // (batch, seq_len), the first key that each query sees, by position in its
                                     // sequence: at most its own, never falling from one query to the next; or null
    DropoutMask dropout = {};
};
void attention_forward(const AttentionForward& op, Stream stream);

struct AttentionBackward {
    View dqkv;         // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)  =
    void* scratch;     // attention_backward_scratch_bytes
    ConstView dout;    // (batch, seq_len, n_head * head_size)
    ConstView qkv;     // as in the forward op
    ConstView out;     // (batch, seq_len, n_head * head_size), the forward op's output
    const float* lse;  // (batch, n_head, seq_len)
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;
    int window = 0;
    float softcap = 0;
    const int* first_key = nullptr;
    DropoutMask dropout = {};  // the forward op's
};
void attention_backward(const AttentionBackward& op, Stream stream);
size_t attention_backward_scratch_bytes(const AttentionBackward& op);

// What the next token of each sequence needs, where the keys and values of all tokens before it have been kept: the
// queries of one position instead of all. `places` says which sequence each row belongs to and where in it; sequences
// of different lengths are rows of one op. Otherwise as attention_forward without dropout.
struct AttentionDecode {
    struct Place {
        int sequence, position;  // below `sequences` and `capacity`; no sequence twice
        int first_key;           // the first key that the query sees, at most `position`; 0: all
    };
    View out;             // (rows, n_head * head_size)  =
    View cache;           // (sequences, capacity, 2 n_kv_head * head_size), the keys, then the values of each position:
                          // those of the rows' positions  =; those before are read
    ConstView qkv;        // (rows, (n_head + 2 n_kv_head) * head_size)
    const Place* places;  // (rows)
    int rows, capacity, n_head, n_kv_head, head_size;
    float scale;
    int window = 0;
    float softcap = 0;
};
void attention_decode(const AttentionDecode& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise dropout: out = inp mask.factor where the mask keeps the element, else 0. Its own backward op.

struct Dropout {
    View out;       // (batch, count)  =; may be inp
    ConstView inp;  // (batch, count)
    DropoutMask mask;
    int batch;
    size_t count;  // elements of a sample
};
void dropout(const Dropout& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Softmax, cross-entropy and the gradient with respect to the logits in one pass; probabilities are never stored.
// With a soft cap the softmax is that of softcap tanh(logit / softcap). The z-loss adds z_loss * lse^2 to what is
// minimised, lse being the log of the sum of exp of the (capped) logits (Chowdhery et al., "PaLM", arXiv 2204.02311,
// section 5): its gradient is in dlogits, `loss` is the cross-entropy alone.

struct CrossEntropy {
    View logits;              // (rows, padded_vocab); overwritten with dlogits if `write_dlogits`: the gradient times
                              // grad_scale * *loss_scale, 0 in the padding and in rows without a target
    float* loss;              // (rows)  =, in nats; 0 in rows without a target
    const int* targets;       // (rows), in [0, vocab), or -1 for no target
    const float* loss_scale;  // (1), or null for 1
    int rows, vocab, padded_vocab;  // columns from vocab on are padding, never read
    float grad_scale;
    bool write_dlogits;
    float softcap = 0;  // 0: none
    float z_loss = 0;   // 0: none
};
void cross_entropy(const CrossEntropy& op, Stream stream);

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

// Norm, scale and finiteness of one step's gradients, in device memory, where the update reads them.
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

// What every optimizer's update works on. Gradients are scaled by grad_norm->scale first.
struct UpdateArrays {
    float* master;  // flat  +=
    View param;     // flat  =, the master rounded to the storage type; null in fp32, where the master is the parameter
    float* m;       // flat, first moment or momentum, updated; starts at 0
    const float* grad;
    const Chunk* chunks;
    const GradNorm* grad_norm;
    const StepScalars* scalars;
    int n_chunks;
};

// AdamW as in torch.optim.AdamW: decoupled decay, bias-corrected moments, eps outside the root
// (Loshchilov, Hutter, arXiv 1711.05101, algorithm 2).
struct AdamwUpdate : UpdateArrays {
    float* v;             // flat, second moment, updated
    double beta1, beta2;  // as torch, 1 - beta is taken in double and then rounded to float
    float eps, weight_decay;
};
void adamw_update(const AdamwUpdate& op, Stream stream);

// SGD with momentum as in torch.optim.SGD (dampening 0, no Nesterov), decay decoupled like AdamW's:
// m = momentum m + g; master -= lr (m + weight_decay master).
struct SgdUpdate : UpdateArrays {
    float momentum, weight_decay;
};
void sgd_update(const SgdUpdate& op, Stream stream);

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

struct Cast {
    View out;          // (count)  =, rounded to nearest even
    const float* inp;  // (count)
    size_t count;
};
void cast(const Cast& op, Stream stream);

}  // namespace ops

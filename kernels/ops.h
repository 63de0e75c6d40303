// The seam between model and backends: all operations of the model. The linker chooses the backend.
//
// An op is a struct of named arguments and a function with the same name. A View or ConstView is an array of
// activations or compute weights with a runtime storage type (fp32, bf16 or fp16). The launcher dispatches on it once,
// and fails with Exit::internal and the op's name for an unsupported combination of types; all views of an op must have
// the same type unless stated. Outputs come first, then inputs, then sizes. The comment at a member gives its shape,
// outermost dimension first, and for outputs `=` (overwritten) or `+=` (added to). All memory is device memory. All
// arithmetic is float or wider; a value is rounded to its storage type once, when stored. Outputs never alias inputs
// unless stated. Every op gives the same bits for the same arguments, regardless of the number of threads.
//
// `scratch` is memory that the op may overwrite; its content is not used afterwards. *_scratch_bytes(op) returns the
// required size. It reads no pointers, so memory can be planned before it is allocated.
#pragma once

#include "kernels/base/choices.h"  // IWYU pragma: export
#include "kernels/base/chunks.h"   // IWYU pragma: export
#include "kernels/base/dropout.h"  // IWYU pragma: export
#include "kernels/device.h"        // IWYU pragma: export
#include "kernels/tensor.h"        // IWYU pragma: export
#include "kernels/update_ops.h"    // IWYU pragma: export

namespace ops {

// ---------------------------------------------------------------------------------------------------------------------
// Embedding: out = wte[token] + wpe[position], or wte[token] alone.

// A part of an embedding: wte has the rows of tokens [first_token, first_token + tokens), and another token adds -0. If
// the parts divide the tokens and one part has wpe, their sum in FP32, rounded once, has the bits of the whole (x + -0
// is x, also if x is -0). By default the part is the whole.
struct EmbeddingPart {
    int first_token = 0, tokens = 1 << 30;
};

struct EmbeddingForward {
    View out;           // (batch, seq_len, channels)  =
    const int* tokens;  // (batch, seq_len), each in [0, vocabulary)
    ConstView wte;      // (tokens of the part, channels)
    ConstView wpe;      // (n_positions, channels), or null
    int batch, seq_len, channels;
    const int* positions = nullptr;  // (batch, seq_len), each in [0, n_positions); null: seq_len from `starts`
    ChunkStarts starts = {};
    EmbeddingPart part = {};
};
void embedding_forward(const EmbeddingForward& op, Stream stream);

// Deterministic even if tokens repeat: one worker sums each row of dwte in the order of positions.
struct EmbeddingBackward {
    float* dwte;        // (vocab, channels)  = or += by `accumulate_dwte`; = sets the rows of absent tokens to 0
    float* dwpe;        // (n_positions, channels)  = or += by `accumulate`, or null; rows without positions are set to
                        // 0 or kept
    void* scratch;      // embedding_backward_scratch_bytes
    ConstView dout;     // (batch, seq_len, channels)
    const int* tokens;  // (batch, seq_len)
    int batch, seq_len, channels, vocab, n_positions;
    bool accumulate;
    bool accumulate_dwte = true;  // dwte already holds the gradient of a tied head or an earlier micro-step
    int first_token = 0;          // of dwte's rows; tokens outside [first_token, first_token + vocab) are ignored
    ChunkStarts starts = {};      // the chunks are equal or do not overlap
};
void embedding_backward(const EmbeddingBackward& op, Stream stream);
size_t embedding_backward_scratch_bytes(const EmbeddingBackward& op);

// ---------------------------------------------------------------------------------------------------------------------
// Normalization over the last dimension.
// LayerNorm: out = (inp - mean) rstd weight + bias, rstd = 1 / sqrt(variance + eps) (Ba, Kiros, Hinton, "Layer
// Normalization", arXiv 1607.06450, eq. 4; biased variance).
// RMSNorm, if `mean` is null: out = inp rstd weight + bias, rstd = 1 / sqrt(mean of inp^2 + eps) (Zhang, Sennrich,
// "Root Mean Square Layer Normalization", arXiv 1910.07467, eq. 4).
// In both, a null weight counts as 1 and a null bias as 0.

// With a branch: residual = inp + branch and out = norm(residual), in one pass. Without: out = norm(inp). It reads the
// residual after rounding to the storage type, so recomputing it from the stored residual gives the same bits.
struct ResidualNormForward {
    View residual;     // (rows, cols)  =; null without a branch
    View out;          // (rows, cols)  =, and its amax
    float* mean;       // (rows)  =; null for RMSNorm
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
    View dinp;          // (rows, cols)  = or += by `accumulate_dinp`: += adds the branch's gradient to the residual's.
                        // Also its amax
    float* dweight;     // (cols)  = or += by `accumulate`; null without a weight
    float* dbias;       // (cols)  = or += by `accumulate`; null without a bias
    void* scratch;      // norm_backward_scratch_bytes
    ConstView dout;     // (rows, cols)
    ConstView inp;      // (rows, cols), the tensor that the forward op normalized
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
// GEMMs. Weights are (out features, in features), as in torch.nn.Linear.
// A GEMM may apply an activation f to its result (ActivationFunction):
//   gelu_new  0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))    (Hendrycks, Gimpel, arXiv 1606.08415)
//   silu      x / (1 + exp(-x))                                  (ibid.; Ramachandran et al., arXiv 1710.05941)
//   relu2     max(x, 0)^2; its derivative is 2 sqrt(f), so the backward pass needs only the output
//                                                                (So et al., "Primer", arXiv 2109.08668, section 4)

// out = inp weight^T + bias. With an activation: pre_activation = inp weight^T + bias, out = f(pre_activation), after
// rounding pre_activation to the storage type. relu2 has no pre_activation and uses the unrounded sum. If inp and
// weight are the same array and there is neither bias nor activation, the result is symmetric, and the CPU computes
// half of it.
struct MatmulForward {
    View out;             // (rows, n)  =, and its amax
    View pre_activation;  // (rows, n)  =; null without an activation and for relu2
    ConstView inp;        // (rows, k)
    ConstView weight;     // (n, k)
    ConstView bias;       // (n), or null
    int rows, n, k;
    ActivationFunction activation = ActivationFunction::none;
};
void matmul_forward(const MatmulForward& op, Stream stream);

// dinp = dout weight. With an activation: dinp = (dout weight) f', the gradient before the activation. A GPU may round
// twice with gelu_new in 16 bits.
struct MatmulBackwardInput {
    View dinp;         // (rows, k)  =
    ConstView dout;    // (rows, n)
    ConstView weight;  // (n, k)
    ConstView kept;    // (rows, k), forward's pre_activation, or its out for relu2; null without an activation
    int rows, n, k;
    ActivationFunction activation = ActivationFunction::none;
};
void matmul_backward_input(const MatmulBackwardInput& op, Stream stream);

// dweight = dout^T inp, dbias = column sums of dout; both FP32. As with matmul_forward, the CPU computes half of a
// symmetric result.
struct MatmulBackwardWeight {
    float* dweight;  // (n, k)  = or += by `accumulate`
    float* dbias;    // (n)  = or += by `accumulate`, or null
    void* scratch;   // matmul_backward_weight_scratch_bytes
    ConstView dout;  // (rows, n)
    ConstView inp;   // (rows, k)
    int rows, n, k;
    bool accumulate;
    ConstView wide_dout = {};  // (rows, n), dout before quantize(), for dbias; null unless dout has 8 bits
};
void matmul_backward_weight(const MatmulBackwardWeight& op, Stream stream);
size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight& op);

// The operands of a GEMM may have 8 bits: inp and weight, dout and weight, or dout and inp. The sums run along the last
// dimension of both, as tensor cores require: matmul_backward_input takes weight as (k, n), matmul_backward_weight
// takes dout as (n, rows) and inp as (k, rows). The result has 16 bits, or is FP32 for a weight. Products are exact,
// and sums are multiplied by both scales before they are rounded. rows, n and k are multiples of 16.

// The largest magnitude, as ops that document it store it in View::amax; NaN if there is one.
struct AbsMax {
    float* out;     // (1)  =
    ConstView inp;  // (count), 16 bits
    size_t count;
};
void abs_max(const AbsMax& op, Stream stream);

// out = inp / scale, rounded to nearest even, with the scale of fp8_scale(). Nothing exceeds the type's largest number.
// If amax is not finite, the scale is NaN, and so are all results computed with it.
struct Quantize {
    View out;           // (rows, cols)  =, 8 bits, or null
    View transposed;    // (cols, rows)  =, of the same type, or null
    float* scale;       // (1)  =, of both
    ConstView inp;      // (rows, cols), 16 bits
    const float* amax;  // (1), abs_max() of inp
    int rows, cols;     // multiples of 16
    // (1)  +=, how many of inp's numbers are larger than the largest of their scale: none if amax is right. May be
    // null.
    double* saturated = nullptr;
};
void quantize(const Quantize& op, Stream stream);

// Applies only the activation, to recompute an output that was not stored. Gives the same bits as matmul_forward's
// epilogue. Not for relu2, whose output is always stored.
struct ActivationForward {
    View out;       // (count)  =, and its amax
    ConstView inp;  // (count)
    size_t count;
    ActivationFunction activation = ActivationFunction::gelu_new;
};
void activation_forward(const ActivationForward& op, Stream stream);

// A gated linear unit on the output of one GEMM: out = f(gate) up (Shazeer, "GLU Variants Improve Transformer", arXiv
// 2002.05202, eq. 5 and 6: f is silu in SwiGLU and gelu in GEGLU).
struct GatedActivationForward {
    View out;       // (rows, hidden)  =, and its amax
    ConstView inp;  // (rows, 2 hidden): gate, then up
    int rows, hidden;
    ActivationFunction activation;
};
void gated_activation_forward(const GatedActivationForward& op, Stream stream);

// dgate = dout up f'(gate), dup = dout f(gate).
struct GatedActivationBackward {
    View dinp;       // (rows, 2 hidden)  =, and its amax
    ConstView dout;  // (rows, hidden)
    ConstView inp;   // (rows, 2 hidden), as in the forward op
    int rows, hidden;
    ActivationFunction activation;
};
void gated_activation_backward(const GatedActivationBackward& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Between the QKV projection and attention: QK norm, then rotary position embedding (RoPE), in one pass over the query
// and key heads. Either may be absent.
//
// QK norm is RMSNorm over each head's elements (Henry et al., "Query-Key Normalization", arXiv 2010.04245, with RMSNorm
// in place of the Euclidean norm, as in Qwen3): x = head rstd weight, rstd = 1 / sqrt(mean of head^2 + eps).
// RoPE rotates the pairs (x_i, x_{i + rotary / 2}), i < rotary / 2, of a head's first `rotary` elements by the angle
// position * frequency_i (Su et al., "RoFormer", arXiv 2104.09864, eq. 34; elements are paired as in GPT-NeoX, Llama
// and Qwen): (x_i cos - x_j sin, x_j cos + x_i sin) with j = i + rotary / 2.
struct QkNormRopeForward {
    View qkv;     // (batch, seq_len, (n_head + 2 n_kv_head) head_size): updates queries and keys in place
    View raw;     // (batch, seq_len, (n_head + n_kv_head) head_size)  =, the original queries and keys, or null.
                  // Required by backward if the norms have weights: recovering them would divide by weights near 0
    float* rstd;  // (batch, seq_len, n_head + n_kv_head)  =; null without norm
    ConstView q_weight, k_weight;  // (head_size); null if the norm has no weights
    const float* table;            // (positions, rotary / 2, 2): cosine and sine, optionally scaled; null without RoPE
    int batch, seq_len, n_head, n_kv_head, head_size;
    int rotary;  // even, at most head_size; 0 without RoPE
    float eps = 0;
    const int* positions = nullptr;  // (batch, seq_len), rows of `table`; null: seq_len from `starts`
    ChunkStarts starts = {};
};
void qk_norm_rope_forward(const QkNormRopeForward& op, Stream stream);

// Without norm weights, recovers the normalized heads by rotating the forward op's output back.
struct QkNormRopeBackward {
    View dqkv;  // shaped like qkv: updates the gradients of queries and keys in place. Also gives the amax of all of it
    float *dq_weight, *dk_weight;  // (head_size)  = or += by `accumulate`, or null
    void* scratch;                 // qk_norm_rope_backward_scratch_bytes
    ConstView qkv;                 // the forward op's output
    ConstView raw;                 // the forward op's
    const float* rstd;             // the forward op's
    ConstView q_weight, k_weight;
    const float* table;
    int batch, seq_len, n_head, n_kv_head, head_size, rotary;
    bool accumulate;
    ChunkStarts starts = {};
};
void qk_norm_rope_backward(const QkNormRopeBackward& op, Stream stream);
size_t qk_norm_rope_backward_scratch_bytes(const QkNormRopeBackward& op);

// ---------------------------------------------------------------------------------------------------------------------
// Causal self-attention in the style of FlashAttention: online softmax over key blocks, no (seq_len, seq_len) matrix,
// blocks above the diagonal skipped (Dao, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2). Query head h reads
// key-value head h / (n_head / n_kv_head). Per position, qkv holds all query heads, then all key heads, then all value
// heads. A query sees the keys of its own and earlier positions; with a window, only the last `window` of them. It sees
// no key before first_key, which separates the documents of a sequence. Key tiles that no query sees are skipped. A key
// tile is read once for all query heads of its key-value head. With a soft cap, scores are
// softcap tanh(scale q . k / softcap) (Gemma Team, "Gemma 2", arXiv 2408.00118, section 2).
// Dropout is applied to the probabilities after the softmax: out = dropout(P) V; it does not change lse (Dao et al.,
// "FlashAttention", arXiv 2205.14135, appendix B.3 and B.4, algorithms 2 and 4).

// Ring attention (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889): ranks have
// chunks of each sequence, and an op adds the keys of one chunk to the attention of the queries of another or the same
// one. It does not round between chunks: it continues the online softmax, and the sums of gradients, from FP32 memory.

// The keys of one chunk, for queries at the same positions or at later ones.
struct KeyChunk {
    ConstView kv;      // (batch, seq_len, 2 n_kv_head * head_size), keys, then values of each position; null: the op
                       // reads the keys of `qkv`, and is the whole attention
    int start = 0;     // the position of the first key, a multiple of 16
    int distance = 0;  // from there to the first query's position: 0, or at least seq_len and a multiple of 16
    bool is_first = true, is_last = true;  // of the chunks that the queries see

    HOST_DEVICE explicit operator bool() const { return bool(kv); }
};

// The attention of the queries to the chunks so far, in the backend's units: overwritten by the first chunk, updated by
// the others except the last, whose op reads it and writes the op's outputs instead. `kv` and `out` are aligned
// to 16 bytes, and so are `dquery` and `dkv` in the backward op.
struct RunningAttention {
    float* out = nullptr;  // (batch, seq_len, n_head * head_size), sum of exp(score - max) value, with dropout
    float* max = nullptr;  // (batch, n_head, seq_len), of the scores
    float* sum = nullptr;  // (batch, n_head, seq_len), of exp(score - max)
};

struct AttentionForward {
    View out;       // (batch, seq_len, n_head * head_size)  =, and its amax
    float* lse;     // (batch, n_head, seq_len)  =, log-sum-exp of the scaled scores
    ConstView qkv;  // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;                     // multiplies query . key, 1 / sqrt(head_size) in GPT-2
    int window = 0;                  // 0: all keys
    float softcap = 0;               // 0: none
    const int* first_key = nullptr;  // (batch, seq_len), the position of the first key that each query sees: at most
                                     // the query's, non-decreasing within a sequence; or null
    DropoutMask dropout = {};        // its place has the number of the op's head 0
    KeyChunk chunk = {};
    RunningAttention running = {};  // with a chunk that is not both the first and the last
};
void attention_forward(const AttentionForward& op, Stream stream);

struct AttentionBackward {
    View dqkv;         // (batch, seq_len, (n_head + 2 n_kv_head) * head_size)  =, and its amax
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
    // With a chunk, dqkv receives only the gradients of the queries, from the last chunk's op, and has no amax.
    KeyChunk chunk = {};
    float* dquery = nullptr;  // (batch, seq_len, n_head * head_size), their sum over the chunks so far, in the
                              // backend's units: overwritten by the first chunk, updated by the others except the last;
                              // null if there is only one
    float* dkv = nullptr;     // (batch, seq_len, 2 n_kv_head * head_size)  = or += by `accumulate_dkv`
    bool accumulate_dkv = false;
};
void attention_backward(const AttentionBackward& op, Stream stream);
size_t attention_backward_scratch_bytes(const AttentionBackward& op);

// Attention with a KV cache, for generation: the query of one position per sequence. `places` gives the sequence and
// position of each row, so one op may process sequences of different lengths. Like attention_forward without dropout.
struct AttentionDecode {
    struct Place {
        int sequence, position;  // below `sequences` and `capacity`; at most one row per sequence
        int first_key;           // the first key that the query sees, at most `position`; 0: all
    };
    View out;             // (rows, n_head * head_size)  =
    View cache;           // (sequences, capacity, 2 n_kv_head * head_size), the keys, then the values of each position.
                          // Writes the positions of the rows  =  and reads all earlier ones
    ConstView qkv;        // (rows, (n_head + 2 n_kv_head) * head_size)
    const Place* places;  // (rows)
    void* scratch;        // attention_decode_scratch_bytes
    int rows, capacity, n_head, n_kv_head, head_size;
    float scale;
    int window = 0;
    float softcap = 0;
};
void attention_decode(const AttentionDecode& op, Stream stream);
size_t attention_decode_scratch_bytes(const AttentionDecode& op);

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise dropout: out = inp mask.factor if the mask keeps the element, else 0. The backward op is the same.

struct Dropout {
    View out;       // (elements)  =, and its amax; may be inp
    ConstView inp;  // (elements), from element `first` of all samples
    DropoutMask mask;
    size_t count;      // elements of a sample
    size_t first;      // in its sample a multiple of kDropoutGroup
    size_t elements;   // at most all samples' after `first`
    size_t start = 0;  // of the samples, if they are chunks of longer ones; a multiple of kDropoutGroup
};
void dropout(const Dropout& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Softmax, cross-entropy and the gradient with respect to the logits in one pass; probabilities are never stored.
// With a soft cap, applies softmax to softcap tanh(logit / softcap). The z-loss adds z_loss * lse^2 to the objective,
// where lse is the log-sum-exp of the (capped) logits (Chowdhery et al., "PaLM", arXiv 2204.02311, section 5). dlogits
// includes its gradient; `loss` is only the cross-entropy.
//
// Ranks may divide the vocabulary (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Each computes the sums
// of its columns; with the sums of all parts, cross_entropy() computes the same loss on each rank and the gradients of
// the rank's columns: with M the largest maximum, lse = M + log(sum over the parts of sum exp(max - M)).

inline constexpr int kMaxVocabularyParts = 1024;

// One row's sums over a part of the vocabulary, of the (capped) logits.
struct VocabularySums {
    float max;     // -infinity if the part has only padding
    float sum;     // of exp(logit - max); 0 if the part has only padding
    float target;  // the target's logit, or 0 if it is not in the part
};

struct VocabularySumsOfRows {
    VocabularySums* out;  // (rows)  =
    ConstView logits;     // (rows, padded_vocab), not modified
    const int* targets;   // (rows), in the whole vocabulary, or -1
    int rows, vocab, padded_vocab;
    int first_token;    // the first column's; the columns are tokens [first_token, first_token + vocab)
    float softcap = 0;  // 0: none
};
void vocabulary_sums(const VocabularySumsOfRows& op, Stream stream);

struct CrossEntropy {
    View logits;              // (rows, padded_vocab); overwritten with dlogits if `write_dlogits`: the gradient times
                              // grad_scale * *loss_scale, 0 in the padding and in rows without a target
    float* loss;              // (rows)  =, in nats; 0 in rows without a target
    const int* targets;       // (rows), in the whole vocabulary, or -1 for no target
    const float* loss_scale;  // (1), or null for 1
    int rows, vocab, padded_vocab;  // columns from vocab on are padding and never read; vocab may be 0 in a part
    float grad_scale;
    bool write_dlogits;
    float softcap = 0;  // 0: none
    float z_loss = 0;   // 0: none
    // (parts, rows), vocabulary_sums() of each part, added in the order of the tree of reduce_scatter_sum(); null: the
    // logits are of the whole vocabulary. With sums, the loss does not depend on `logits`.
    const VocabularySums* sums = nullptr;
    int parts = 0;        // at most kMaxVocabularyParts
    int first_token = 0;  // as in vocabulary_sums()
};
void cross_entropy(const CrossEntropy& op, Stream stream);

// *out (+)= sum of the losses, each rounded to a multiple of 2^-26. Exact below 2^27, so also the sum of such sums does
// not depend on the order.
struct LossSum {
    double* out;        // (1)  = or += by `accumulate`
    const float* loss;  // (rows)
    int rows;
    bool accumulate;
};
void loss_sum(const LossSum& op, Stream stream);

// ---------------------------------------------------------------------------------------------------------------------
// Filling and casting.

// Normal numbers with mean 0 and the given deviation. Number i is a pure function of (seed, subsequence, i): Box-Muller
// on philox(seed, (RandomPurpose::init << 32) + subsequence, i / 4) in double, the same bits on every device. out[j] is
// number first + (skipped + j) / cols * stride + (skipped + j) % cols: a part of a matrix with rows of `stride`.
struct NormalFill {
    float* out;  // (count)  =
    size_t count;
    uint64_t seed;
    uint32_t subsequence;
    float deviation;
    size_t first;
    size_t skipped = 0;
    size_t cols = size_t(1) << 62, stride = 0;  // by default out[j] is number first + skipped + j
};
void normal_fill(const NormalFill& op, Stream stream);

struct Fill {
    float* out;  // (count)  =
    size_t count;
    float value;
};
void fill(const Fill& op, Stream stream);

// The sum has the bits of residual_norm_forward's residual.
struct Add {
    View out;       // (count)  +=, in FP32, rounded to nearest even
    ConstView inp;  // (count), out's type
    size_t count;
};
void add(const Add& op, Stream stream);

// The sum in the order of reduce_scatter_sum() in kernels/comm.h. out and terms may have the same type, or one of them
// is fp32.
struct SumTerms {
    View out;         // (count)  =, added in FP32, rounded once
    ConstView terms;  // (n, count)
    int n;            // at most 4096
    size_t count;
};
void sum_terms(const SumTerms& op, Stream stream);

struct Cast {
    View out;       // (count)  =, rounded to nearest even
    ConstView inp;  // (count)
    size_t count;
};
void cast(const Cast& op, Stream stream);

// Casts some columns of a matrix: row r has `cols` elements from r * step.
struct CastColumns {
    View out;       // (rows, cols)  =, rounded to nearest even
    ConstView inp;  // (rows, cols)
    size_t rows, cols;
    size_t out_step, inp_step;  // elements from one row to the next, at least cols
};
void cast_columns(const CastColumns& op, Stream stream);

}  // namespace ops

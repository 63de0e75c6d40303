// The ops of the optimizers: part of the seam (kernels/ops.h), whose conventions hold here.
#pragma once

#include "kernels/base/choices.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

namespace ops {

// ---------------------------------------------------------------------------------------------------------------------
// The update. Masters and gradients are flat arrays, split into chunks. Gradients are FP32. Each chunk is within one
// tensor, and the split depends only on the tensors, so trust_sums have the same order for any number of ranks.
// The flat arrays of a rank hold only the chunks that it owns.

inline constexpr int kChunkElements = 1 << 14;

struct Chunk {
    size_t begin;        // first element in the flat arrays of masters, parameters and gradients
    int count;           // elements, at most kChunkElements
    int tensor;          // row in the table of tensors
    int index;           // among the chunks of all ranks
    int group;           // of the update's scalars
    size_t state_begin;  // first element in the flat arrays of the optimizer's state
    int layer = 0;       // among the layers of a layerwise update
    uint32_t first = 0;  // first element in the tensor, modulo 2^32, for RoundingBits
};

// Norm, scale and finiteness of the gradients of one step. In device memory, for the update.
struct GradNorm {
    float norm;             // Euclidean norm of all gradients without the loss scale, before clipping
    float scale;            // factor on the gradients in the update: clipping coefficient / loss scale
    int non_finite_tensor;  // the first tensor with a NaN or infinity, or -1; if not -1, updates do nothing
    int reserved;
};

// Adds the squares of each tensor. The additions are exact, so their order does not matter, neither here nor over
// chunks and ranks: see kernels/base/exact_squares.h.
struct SquaredSums {
    double* out;          // (tensors, kSquareEntries)  +=
    const float* values;  // flat
    const Chunk* chunks;  // (n_chunks), any subset, in any order
    int n_chunks;
};
void squared_sums(const SquaredSums& op, Stream stream);

// norm = sqrt(sum of sums) / loss_scale, scale = min(1, clip / (norm + 1e-6)) / loss_scale, as torch's clip_grad_norm_.
struct GradNormFinish {
    GradNorm* out;            // (1)  =
    const double* sums;       // (n_tensors, kSquareEntries), from squared_sums
    const float* loss_scale;  // (1)
    int n_tensors;
    float clip;  // 0: no clipping
};
void grad_norm_finish(const GradNormFinish& op, Stream stream);

// The scalars of one step's update for a group of tensors, in device memory so that a recorded sequence of launches can
// be replayed. A rule reads only the scalars of its formula.
struct UpdateScalars {
    float learning_rate, weight_decay;
    float keep;                              // 1 - learning_rate weight_decay
    float beta1, beta2;                      // decay rates of the first and second moment
    float one_minus_beta1, one_minus_beta2;  // like torch, computed in double and then rounded
    float step_size;                         // learning_rate / (1 - beta1^t), where t counts applied updates from 1
    float root_bias_correction2;             // sqrt(1 - beta2^t)
    float eps, momentum;
    float step_momentum, step_gradient;  // factors of the momentum and of the gradient in SGD's step
    float alpha, one_minus_alpha;        // decay rate of RMSprop's average
    float bias_correction1;              // 1 - beta1^t
    float trust_coefficient;
    float clip_threshold;       // of Adafactor
    float trust_ratio = 1;      // an update replaces it by its layer's
    uint64_t rounding_key = 0;  // rounding_key() of this update
};

inline constexpr int kMaxStates = 2;  // arrays of an elementwise rule

// An update that computes each element from its gradient, multiplied by grad_norm->scale, and its own state. The rules
// are in kernels/shared/update_rules.h. State may be fp32 or bf16, the same in all arrays, and so may masters. The step
// uses the new state before it is rounded to bf16: round_stochastically() with RoundingBits of the chunk's tensor.
struct ElementwiseUpdate {
    OptimizerKind rule;
    View master;             // flat  +=
    View param;              // flat  =, the master weights rounded to the storage type; null if that is the masters'
                             // type, which has no separate copy
    View state[kMaxStates];  // flat, updated; start at 0. Null from the rule's number of states on
    const float* grad;       // flat
    const Chunk* chunks;     // (n_chunks), any subset, in any order
    const UpdateScalars* scalars;  // (groups)
    const GradNorm* grad_norm;
    int n_chunks;
    const float* trust_ratios = nullptr;  // (layers), of a layerwise rule, from trust_ratios(); else null
};
void elementwise_update(const ElementwiseUpdate& op, Stream stream);

// Squared norms for the trust ratios of a layerwise rule, LAMB or LARS: of the weights and of the direction in which
// the rule moves them. In double.
struct TrustSums {
    OptimizerKind rule;
    double* out;                   // (chunks, 2)  =, at the index of each chunk
    ConstView master;              // flat, fp32 or bf16
    ConstView state[kMaxStates];   // flat, as in ElementwiseUpdate
    const float* grad;             // flat
    const Chunk* chunks;           // (n_chunks), any subset, in any order
    const UpdateScalars* scalars;  // (groups)
    const GradNorm* grad_norm;     // if a gradient is not finite, nothing changes
    int n_chunks;
};
void trust_sums(const TrustSums& op, Stream stream);

// A layer's sums: out[first], out[first + stride] and so on.
struct Layer {
    int first, stride, n_sums;
    int group;         // of the update's scalars
    bool adapts;       // else its ratio is 1
    size_t count = 0;  // elements, for Adafactor
};

// The trust ratio of each layer: the factor of its learning rate. Adafactor's is max(0.001, RMS of the weights) /
// max(1, RMS of the direction / clip_threshold).
struct TrustRatios {
    OptimizerKind rule;
    float* out;                    // (n_layers)  =
    const double* sums;            // (chunks, 2), from trust_sums or factored_direction
    const Layer* layers;           // (n_layers)
    const UpdateScalars* scalars;  // (groups)
    const GradNorm* grad_norm;     // if a gradient is not finite, nothing changes
    int n_layers;
};
void trust_ratios(const TrustRatios& op, Stream stream);

// Ops of Adafactor (Shazeer, Stern, arXiv 1804.04235, algorithms 4 and 5, as in torch.optim.Adafactor), which keeps an
// average for each row and each column of a layer. trust_ratios and apply_direction finish the update.

// A layer of rows and columns. A vector is one row.
struct FactorLayer {
    ptrdiff_t begin;              // its first element in the flat arrays; negative if another rank has that element
    size_t first_row, first_col;  // its place in the arrays with an entry for each row or column of all layers
    int rows, cols;               // without the vocabulary's padding, rows whose gradients are 0
    int group;                    // of the update's scalars
    bool is_factored;             // else a vector: each column has its own variance
};

// Adds the squared gradients, multiplied by grad_norm->scale, of each row and column, as pairs of numbers whose sum is
// the result. The additions are exact, so their order does not matter, neither here nor over ranks: see ExactParts.
// Requires grad_norm->norm to be at least the norm of all gradients.
struct FactorSums {
    double *rows, *cols;        // (rows, 2), (cols, 2) of all layers  +=
    const float* grad;          // flat
    const Chunk* chunks;        // (n_chunks), any subset, in any order; each within one layer
    const FactorLayer* layers;  // at Chunk::layer
    const GradNorm* grad_norm;  // if a gradient is not finite, nothing changes
    int n_chunks;
};
void factor_sums(const FactorSums& op, Stream stream);

// row_v += one_minus_beta2 (sum / cols - row_v), col_v += one_minus_beta2 (sum / rows - col_v), mean = mean(row_v).
struct FactorMoments {
    float *row_v, *col_v;          // (rows), (cols) of all layers, updated; start at 0
    float* mean;                   // (n_layers)  =
    const double *rows, *cols;     // from factor_sums
    const FactorLayer* layers;     // (n_layers)
    const UpdateScalars* scalars;  // (groups); reads `one_minus_beta2`
    const GradNorm* grad_norm;     // if a gradient is not finite, nothing changes
    int n_layers;
};
void factor_moments(const FactorMoments& op, Stream stream);

// grad = grad scale / max(sqrt(variance), eps), where variance = row_v col_v / max(mean, eps), and col_v of a vector.
struct FactoredDirection {
    float* grad;                        // flat, replaced
    double* sums;                       // (chunks, 2)  =, at the index of each chunk: of master^2 and of the new grad^2
    ConstView master;                   // flat, fp32 or bf16
    const float *row_v, *col_v, *mean;  // from factor_moments
    const Chunk* chunks;                // (n_chunks), as in FactorSums
    const FactorLayer* layers;          // at Chunk::layer
    const UpdateScalars* scalars;       // (groups); reads `eps`
    const GradNorm* grad_norm;          // if a gradient is not finite, nothing changes
    int n_chunks;
};
void factored_direction(const FactoredDirection& op, Stream stream);

// Ops of optimizers that orthogonalize the momentum of a matrix (Jordan et al., "Muon: An optimizer for hidden layers
// in neural networks", 2024; torch.optim.Muon). Between the first and the second, the model replaces the direction.

// The direction of a momentum update, where g is the gradient multiplied by grad_norm->scale:
// m = m + (1 - momentum) (g - m);  direction = m or, with Nesterov's momentum, g + momentum (m - g). Without m,
// direction = g. m is fp32, or bf16 as in ElementwiseUpdate.
struct MomentumDirection {
    View direction;                // flat  =, at the chunk's state_begin
    View m;                        // flat, updated, at the chunk's state_begin; starts at 0; or null
    const float* grad;             // flat, at the chunk's begin
    const Chunk* chunks;           // (n_chunks), any subset, in any order
    const UpdateScalars* scalars;  // (groups); reads `momentum`
    const GradNorm* grad_norm;     // if a gradient is not finite, nothing changes
    int n_chunks;
    bool nesterov;
};
void momentum_direction(const MomentumDirection& op, Stream stream);

// master = keep master - learning_rate trust_ratio direction. `cautious`: weights whose sign is opposite to their
// direction's do not decay, so `keep` counts as 1 (Chen et al., "Cautious Weight Decay", arXiv 2510.12402, algorithm
// 1). The types of `param` and `direction` may differ.
struct ApplyDirection {
    View master;                   // flat  +=, fp32 or bf16, rounded as in ElementwiseUpdate
    View param;                    // flat  =, as in ElementwiseUpdate
    ConstView direction;           // flat, at the chunk's state_begin
    const Chunk* chunks;           // (n_chunks), any subset, in any order
    const UpdateScalars* scalars;  // (groups); reads `learning_rate` and `keep`
    const GradNorm* grad_norm;     // if a gradient is not finite, nothing changes
    int n_chunks;
    bool cautious;
    const float* trust_ratios = nullptr;  // (layers); null: 1
};
void apply_direction(const ApplyDirection& op, Stream stream);

// out = inp / max(norm, eps), where norm is the Frobenius norm of inp: the root of a sum of squares in double, rounded
// to float. If the norm is not finite, all of out is NaN. The types of out and inp may differ. The bits do not depend
// on addresses.
struct FrobeniusNormalize {
    View out;       // (count)  =; may be inp if the types are equal
    ConstView inp;  // (count)
    void* scratch;  // frobenius_normalize_scratch_bytes
    size_t count;
    float eps;
};
void frobenius_normalize(const FrobeniusNormalize& op, Stream stream);
size_t frobenius_normalize_scratch_bytes(const FrobeniusNormalize& op);

// NorMuon's normalization of a matrix's rows (Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv
// 2510.05491, algorithm 1): v = beta2 v + (1 - beta2) mean(row^2), in float from a mean in double;
// out = inp / (sqrt(v) + eps), times a factor that gives out the Frobenius norm `norm`. A matrix of zeros stays 0. The
// types of out and inp may differ. The bits do not depend on addresses.
struct RowNormalize {
    View out;                   // (rows, cols)  =; may be inp if the types are equal
    ConstView inp;              // (rows, cols)
    float* v;                   // (rows), updated; starts at 0
    void* scratch;              // row_normalize_scratch_bytes
    const GradNorm* grad_norm;  // if a gradient is not finite, nothing changes
    int rows, cols;
    float beta2, one_minus_beta2;
    float eps, norm;
};
void row_normalize(const RowNormalize& op, Stream stream);
size_t row_normalize_scratch_bytes(const RowNormalize& op);

// out = alpha a + beta b, as a multiply-add in float of alpha, a and the rounded product beta b. Each array may be fp32
// or of a 16-bit type, the same one in all arrays.
struct ScaledAdd {
    View out;        // (count)  =; may be an input of the same type
    ConstView a, b;  // (count)
    size_t count;
    float alpha, beta;
    const GradNorm* grad_norm = nullptr;  // if not null and a gradient is not finite, nothing changes
};
void scaled_add(const ScaledAdd& op, Stream stream);

// Adam's direction from a moment and a gradient in another basis, for SOAP: v = beta2 v + (1 - beta2) grad^2;
// out = (m / bias_correction1) / (sqrt(v) / root_bias_correction2 + eps).
struct AdamDirection {
    float* out;                 // (count)  =; may be m or grad
    float* v;                   // (count), updated; starts at 0
    const float* m;             // (count)
    const float* grad;          // (count)
    const GradNorm* grad_norm;  // if a gradient is not finite, nothing changes
    size_t count;
    UpdateScalars scalars;
};
void adam_direction(const AdamDirection& op, Stream stream);

// Gram-Schmidt orthonormalization. Row r of out is row r of inp without its components along the rows of out before it,
// divided by its norm. Components are subtracted twice (Giraud et al., "Rounding error analysis of the classical
// Gram-Schmidt orthogonalization process", Numerische Mathematik 101, 2005). If the norm before the division is at most
// `tolerance` or NaN, the row of `fallback` replaces inp's; if its rest is 0 too, the row of out is 0. Sums are in
// double. The bits do not depend on addresses.
inline constexpr int kMaxOrthonormalized = 32;
struct OrthonormalizeRows {
    float* out;             // (rows, cols)  =
    const float* inp;       // (rows, cols)
    const float* fallback;  // (rows, cols); may be inp
    int rows, cols;         // rows: at most kMaxOrthonormalized
    float tolerance;
};
void orthonormalize_rows(const OrthonormalizeRows& op, Stream stream);

}  // namespace ops

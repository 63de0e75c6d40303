// Configuration choices that the model implements: one enum per choice, with its names in the order of the
// enumerators, which count from 0 without gaps.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/numeric.h"

// Activations that the backward pass recomputes instead of reading stored ones. Each level includes the previous ones.
enum class Recompute : int {
    none,
    gelu,       // the MLP's activation function, if it can be recomputed (not relu2)
    norm,       // the outputs of the two norms
    block,      // everything inside a block except its input
    automatic,  // only in a configuration: the program chooses a level
};
constexpr auto names_of(Recompute) { return std::array{"none", "gelu", "norm", "block", "auto"}; }

// The activation function between an MLP's two matrices.
enum class ActivationFunction : int {
    none = -1,  // not a configuration choice: a GEMM without an activation
    gelu_new,   // GELU's tanh form
    silu,       // x sigmoid(x)
    relu2,      // max(x, 0)^2
};
constexpr auto names_of(ActivationFunction) { return std::array{"gelu_new", "silu", "relu2"}; }

enum class NormKind : int { layernorm, rmsnorm };
constexpr auto names_of(NormKind) { return std::array{"layernorm", "rmsnorm"}; }

// How the model encodes positions. learned: adds position embeddings to the input; rope: rotates queries and keys.
enum class PositionKind : int { learned, rope };
constexpr auto names_of(PositionKind) { return std::array{"learned", "rope"}; }

// How RoPE's frequencies are scaled for sequences longer than in the original training.
enum class RopeScaling : int { none, linear, llama3, yarn };
constexpr auto names_of(RopeScaling) { return std::array{"none", "linear", "llama3", "yarn"}; }

// The attention projections with a bias: none, the QKV projection, or the QKV and output projections.
enum class AttentionBias : int { none, qkv, all };
constexpr auto names_of(AttentionBias) { return std::array{"none", "qkv", "all"}; }

// RMSNorm of each query and key head: none, without weights, or with weights that all heads share.
enum class QkNorm : int { none, unit, weight };
constexpr auto names_of(QkNorm) { return std::array{"none", "unit", "weight"}; }

enum class OptimizerKind : int {
    adamw,
    adam,
    sgd,
    lion,
    rmsprop,
    adagrad,
    lamb,
    lars,
    adafactor,
    muon,
    normuon,
    soap,
    soap_muon
};
constexpr auto names_of(OptimizerKind) {
    return std::array{"adamw", "adam",      "sgd",  "lion",    "rmsprop", "adagrad",  "lamb",
                      "lars",  "adafactor", "muon", "normuon", "soap",    "soap_muon"};
}

// The storage type of the master weights or of the optimizers' state. bf16 is rounded stochastically.
enum class OptimizerDtype : int { fp32, bf16 };
constexpr auto names_of(OptimizerDtype) { return std::array{"fp32", "bf16"}; }

// The polynomials by which Muon orthogonalizes a matrix, and the scale of the result.
enum class MuonIteration : int { newton_schulz, polar_express };
constexpr auto names_of(MuonIteration) { return std::array{"newton_schulz", "polar_express"}; }
enum class MuonScale : int { adamw_rms, shape };
constexpr auto names_of(MuonScale) { return std::array{"adamw_rms", "shape"}; }

// The order of a rank's passes over a step's micro-steps, with pipeline parallelism.
//   gpipe        all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)
//   1f1b         a backward pass as soon as it can run (Narayanan et al., "PipeDream-Flush", arXiv 2006.09503)
//   interleaved  the same, with several parts of the layers on each rank (Narayanan et al., arXiv 2104.04473)
//   zero_bubble  1f1b, with separate passes for the gradients of weights (Qi et al., "ZB-H1", arXiv 2401.10241)
enum class PipelineSchedule : int { gpipe, one_f_one_b, interleaved, zero_bubble };
constexpr auto names_of(PipelineSchedule) { return std::array{"gpipe", "1f1b", "interleaved", "zero_bubble"}; }

// The kinds of tensors, by which optimizers choose their rule and settings.
enum class TensorRole : int { matrix, embedding, head, vector };
constexpr auto names_of(TensorRole) { return std::array{"matrix", "embedding", "head", "vector"}; }

// The types of model tensors.
constexpr auto names_of(Dtype) { return std::array{"fp32", "bf16", "fp16"}; }

// The arithmetic of training. fp8 is bf16, but the operands of the blocks' GEMMs have 8 bits.
enum class Precision : int { fp32, bf16, fp16, fp8 };
constexpr auto names_of(Precision) { return std::array{"fp32", "bf16", "fp16", "fp8"}; }
// The type of activations and compute weights.
constexpr Dtype compute_type(Precision precision) {
    return precision == Precision::fp8 ? Dtype::bf16 : Dtype(int(precision));
}

// The types of 8 bits of gradients.
enum class Fp8Gradients : int { e5m2, e4m3 };
constexpr auto names_of(Fp8Gradients) { return std::array{"e5m2", "e4m3"}; }

template <class Choice, class = decltype(names_of(Choice()))> constexpr const char* name_of(Choice choice) {
    return names_of(choice).at(size_t(choice));
}

// Returns the choice with this name, or nullopt.
template <class Choice> constexpr std::optional<Choice> choice_named(std::string_view name) {
    const auto names = names_of(Choice());
    for (size_t i = 0; i < names.size(); i++)
        if (name == names[i]) return Choice(i);
    return std::nullopt;
}

// The names of all choices: "none|gelu|norm|block".
template <class Choice> std::string choice_names() {
    std::string all;
    for (const char* name : names_of(Choice())) all += (all.empty() ? "" : "|") + std::string(name);
    return all;
}

// Configuration choices that the model implements: one enum per choice, with its names in an exhaustive switch.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kernels/numeric.h"

// Activations that the backward pass recomputes instead of reading stored ones. Each level includes the previous ones.
enum class Recompute : int {
    none,
    gelu,   // the MLP's activation function, if it can be recomputed (not relu2)
    norm,   // the outputs of the two norms
    block,  // everything inside a block except its input
};
inline constexpr const char* name_of(Recompute level) {
    switch (level) {
        case Recompute::none: return "none";
        case Recompute::gelu: return "gelu";
        case Recompute::norm: return "norm";
        case Recompute::block: return "block";
    }
    return nullptr;
}

// The activation function between an MLP's two matrices.
enum class ActivationFunction : int {
    none = -1,  // not a configuration choice: a GEMM without an activation
    gelu_new,   // GELU's tanh form
    silu,       // x sigmoid(x)
    relu2,      // max(x, 0)^2
};
inline constexpr const char* name_of(ActivationFunction function) {
    switch (function) {
        case ActivationFunction::none: break;
        case ActivationFunction::gelu_new: return "gelu_new";
        case ActivationFunction::silu: return "silu";
        case ActivationFunction::relu2: return "relu2";
    }
    return nullptr;
}

enum class NormKind : int { layernorm, rmsnorm };
inline constexpr const char* name_of(NormKind norm) {
    switch (norm) {
        case NormKind::layernorm: return "layernorm";
        case NormKind::rmsnorm: return "rmsnorm";
    }
    return nullptr;
}

// How the model encodes positions. learned: adds position embeddings to the input; rope: rotates queries and keys.
enum class PositionKind : int { learned, rope };
inline constexpr const char* name_of(PositionKind position) {
    switch (position) {
        case PositionKind::learned: return "learned";
        case PositionKind::rope: return "rope";
    }
    return nullptr;
}

// How RoPE's frequencies are scaled for sequences longer than in the original training.
enum class RopeScaling : int { none, linear, llama3, yarn };
inline constexpr const char* name_of(RopeScaling scaling) {
    switch (scaling) {
        case RopeScaling::none: return "none";
        case RopeScaling::linear: return "linear";
        case RopeScaling::llama3: return "llama3";
        case RopeScaling::yarn: return "yarn";
    }
    return nullptr;
}

// The attention projections with a bias: none, the QKV projection, or the QKV and output projections.
enum class AttentionBias : int { none, qkv, all };
inline constexpr const char* name_of(AttentionBias bias) {
    switch (bias) {
        case AttentionBias::none: return "none";
        case AttentionBias::qkv: return "qkv";
        case AttentionBias::all: return "all";
    }
    return nullptr;
}

// RMSNorm of each query and key head: none, without weights, or with weights that all heads share.
enum class QkNorm : int { none, unit, weight };
inline constexpr const char* name_of(QkNorm norm) {
    switch (norm) {
        case QkNorm::none: return "none";
        case QkNorm::unit: return "unit";
        case QkNorm::weight: return "weight";
    }
    return nullptr;
}

enum class OptimizerKind : int { adamw, sgd };
inline constexpr const char* name_of(OptimizerKind optimizer) {
    switch (optimizer) {
        case OptimizerKind::adamw: return "adamw";
        case OptimizerKind::sgd: return "sgd";
    }
    return nullptr;
}

// The name of a choice, or null for any other value. Dtype: only the types of model tensors, so not fp64.
template <class Choice> constexpr const char* choice_name(Choice choice) { return name_of(choice); }
constexpr const char* choice_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::fp32:
        case Dtype::bf16:
        case Dtype::fp16: return name_of(dtype);
        case Dtype::fp64: break;
    }
    return nullptr;
}

// Returns the choice with this name, or nullopt. Enumerators count from 0 without gaps.
template <class Choice> constexpr std::optional<Choice> choice_named(std::string_view name) {
    for (int i = 0; choice_name(Choice(i)); i++)
        if (name == choice_name(Choice(i))) return Choice(i);
    return std::nullopt;
}

// The names of all choices: "none|gelu|norm|block".
template <class Choice> std::string choice_names() {
    std::string names = choice_name(Choice(0));
    for (int i = 1; choice_name(Choice(i)); i++) names += std::string("|") + choice_name(Choice(i));
    return names;
}

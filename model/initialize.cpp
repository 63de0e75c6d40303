#include "model/initialize.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/ops.h"
#include "model/tensors.h"

namespace {

// FNV-1a: each tensor's random numbers depend on its name alone, not on the other tensors.
uint32_t subsequence_of(const std::string& name) {
    uint32_t hash = 2166136261u;
    for (unsigned char c : name) hash = (hash ^ c) * 16777619u;
    return hash;
}

// The vocabulary's padding rows always stay zero: their logits are never read and their gradients are zero.
size_t initialized_elements(const Tensor& tensor, const GptShape& shape) {
    if (tensor_table()[size_t(tensor.row)].rows != &GptShape::padded_vocab) return tensor.count;
    return size_t(shape.vocab_size) * size_t(tensor.cols);
}

// Writes a tensor's initial values to an owned array.
void initialize_tensor(GptState& s, const Tensor& tensor, uint64_t seed, float* owned) {
    const Init init = tensor_table()[size_t(tensor.row)].init;
    const TensorPart part = owned_part(s.options, s.layout, tensor);
    float* out = owned + part.shard_begin;
    const bool is_normal = init == Init::normal || init == Init::normal_residual;
    ops::fill({.out = out, .count = part.count, .value = init == Init::one ? 1.0f : 0.0f}, s.stream);
    const size_t last = std::min(part.first + part.count, initialized_elements(tensor, s.options.shape));
    if (!is_normal || last <= part.first) return;
    const float shrink = init == Init::normal_residual ? 1.0f / std::sqrt(2.0f * float(s.options.shape.n_layer)) : 1.0f;
    ops::normal_fill({.out = out,
                      .count = last - part.first,
                      .seed = seed,
                      .subsequence = subsequence_of(tensor.name),
                      .deviation = 0.02f * shrink,
                      .first = part.first},
                     s.stream);
}

}  // namespace

void initialize_tensors(GptState& s, uint64_t seed, float* owned) {
    for (const Tensor& tensor : s.layout.tensors) initialize_tensor(s, tensor, seed, owned);
}

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
size_t initialized_rows(const Tensor& tensor, const GptShape& whole) {
    return tensor.row->is_padded() ? size_t(whole.vocab_size) : SIZE_MAX;
}

// Writes a tensor's initial values to an owned array.
void initialize_tensor(GptState& s, const Tensor& tensor, uint64_t seed, float* owned) {
    const Init init = tensor.row->init;
    const TensorPart part = owned_part(s.options, s.layout, tensor);
    float* out = owned + part.shard_begin;
    const bool is_normal = init == Init::normal || init == Init::normal_residual;
    ops::fill({.out = out, .count = part.count, .value = init == Init::one ? 1.0f : 0.0f}, s.stream);
    if (!is_normal) return;
    const float shrink = init == Init::normal_residual ? 1.0f / std::sqrt(2.0f * float(s.options.shape.n_layer)) : 1.0f;
    const std::vector<size_t> shape = logical_shape(s.layout, tensor);
    std::vector<Box> boxes = boxes_of(s.layout, tensor);
    if (boxes.empty()) boxes.push_back({.row = 0, .rows = shape[0], .col = 0, .cols = shape[1]});
    size_t begin = 0;  // of the box in the tensor
    for (const Box& box : boxes) {
        const size_t rows = std::min(box.row + box.rows, std::max(box.row, initialized_rows(tensor, s.layout.whole)));
        const size_t first = std::max(part.first, begin);
        const size_t end = std::min(part.first + part.count, begin + (rows - box.row) * box.cols);
        if (first < end)
            ops::normal_fill({.out = out + (first - part.first),
                              .count = end - first,
                              .seed = seed,
                              .subsequence = subsequence_of(tensor.name),
                              .deviation = 0.02f * shrink,
                              .first = box.row * shape[1] + box.col,
                              .skipped = first - begin,
                              .cols = box.cols,
                              .stride = shape[1]},
                             s.stream);
        begin += box.count();
    }
}

}  // namespace

void initialize_tensors(GptState& s, uint64_t seed, float* owned) {
    for (const Tensor& tensor : s.layout.tensors) initialize_tensor(s, tensor, seed, owned);
}

#include "model/tensors.h"

#include <algorithm>

namespace {

void append(TensorLayout& layout, int row, int layer) {
    const auto& entry = tensor_table<float>()[size_t(row)];
    Tensor tensor;
    tensor.name = layer < 0 ? entry.name : "h." + std::to_string(layer) + "." + entry.name;
    tensor.row = row;
    tensor.layer = layer;
    tensor.rows = (layout.shape.*entry.rows)();
    tensor.cols = (layout.shape.*entry.cols)();
    tensor.begin = layout.elements;
    tensor.count = size_t(tensor.rows) * size_t(tensor.cols);
    layout.elements += (tensor.count + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    layout.parameters += tensor.count;
    layout.tensors.push_back(std::move(tensor));
}

}  // namespace

TensorLayout lay_out_tensors(const GptShape& shape) {
    TensorLayout layout;
    layout.shape = shape;
    int n_rows = int(tensor_table<float>().size());
    for (int layer = -1; layer < shape.n_layer; layer++)
        for (int row = 0; row < n_rows; row++)
            if (tensor_table<float>()[size_t(row)].per_layer() == (layer >= 0)) append(layout, row, layer);
    return layout;
}

std::vector<size_t> logical_shape(const Tensor& tensor) {
    if (tensor_table<float>()[size_t(tensor.row)].cols == &GptShape::one) return {size_t(tensor.rows)};
    return {size_t(tensor.rows), size_t(tensor.cols)};
}

std::vector<ops::Chunk> chunk_grid(const TensorLayout& layout) {
    std::vector<ops::Chunk> chunks;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        int decayed = tensor_table<float>()[size_t(tensor.row)].decayed;
        for (size_t done = 0; done < tensor.count; done += ops::kChunkElements) {
            int count = int(std::min<size_t>(ops::kChunkElements, tensor.count - done));
            chunks.push_back({tensor.begin + done, count, int(i), decayed, 0});
        }
    }
    return chunks;
}

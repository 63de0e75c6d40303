// THE table of tensors: every parameter of the model is one row. Sizes, offsets, views, initialisation, the decay mask,
// the optimizer's chunks, checkpoint names, Hugging Face names and the memory plan are derived from it.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/ops.h"
#include "model/shape.h"

// The parameters of one block, or anything shaped like them (gradients, moments). Shapes stand in the table.
template <class T> struct BlockTensors {
    T *norm1_weight, *norm1_bias;
    T *qkv_weight, *qkv_bias;
    T *attn_proj_weight, *attn_proj_bias;
    T *norm2_weight, *norm2_bias;
    T *fc_weight, *fc_bias;
    T *fc_proj_weight, *fc_proj_bias;
};

template <class T> struct GptTensors {
    T *wte, *wpe;
    T *norm_f_weight, *norm_f_bias;
    std::vector<BlockTensors<T>> block;  // (L)
};

// GPT-2's initialisation: residual projections start smaller by 1 / sqrt(2 L), so that the residual stream's variance
// does not grow with depth (Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3).
enum class Init { zero, one, normal, normal_residual };

template <class T> struct TensorRow {
    std::variant<T * GptTensors<T>::*, T * BlockTensors<T>::*> member;  // the second alternative: one per layer
    const char* name;
    int (GptShape::*rows)() const;
    int (GptShape::*cols)() const;  // GptShape::one for vectors
    Init init;
    bool decayed;
    const char* hf_name;  // under "h.LAYER." if per layer
    bool hf_transposed;   // Hugging Face's GPT-2 keeps these (in, out): its Conv1D

    bool per_layer() const { return member.index() == 1; }
};

template <class T> const std::vector<TensorRow<T>>& tensor_table() {
    using G = GptTensors<T>;
    using B = BlockTensors<T>;
    using S = GptShape;
    static const std::vector<TensorRow<T>> table = {
        {&G::wte, "wte", &S::padded_vocab, &S::channels, Init::normal, true, "wte.weight", false},
        {&G::wpe, "wpe", &S::positions, &S::channels, Init::normal, true, "wpe.weight", false},
        {&G::norm_f_weight, "norm_f.weight", &S::channels, &S::one, Init::one, false, "ln_f.weight", false},
        {&G::norm_f_bias, "norm_f.bias", &S::channels, &S::one, Init::zero, false, "ln_f.bias", false},
        {&B::norm1_weight, "norm1.weight", &S::channels, &S::one, Init::one, false, "ln_1.weight", false},
        {&B::norm1_bias, "norm1.bias", &S::channels, &S::one, Init::zero, false, "ln_1.bias", false},
        {&B::qkv_weight, "qkv.weight", &S::qkv_channels, &S::channels, Init::normal, true, "attn.c_attn.weight", true},
        {&B::qkv_bias, "qkv.bias", &S::qkv_channels, &S::one, Init::zero, false, "attn.c_attn.bias", false},
        {&B::attn_proj_weight, "attn_proj.weight", &S::channels, &S::channels, Init::normal_residual, true,
         "attn.c_proj.weight", true},
        {&B::attn_proj_bias, "attn_proj.bias", &S::channels, &S::one, Init::zero, false, "attn.c_proj.bias", false},
        {&B::norm2_weight, "norm2.weight", &S::channels, &S::one, Init::one, false, "ln_2.weight", false},
        {&B::norm2_bias, "norm2.bias", &S::channels, &S::one, Init::zero, false, "ln_2.bias", false},
        {&B::fc_weight, "fc.weight", &S::hidden, &S::channels, Init::normal, true, "mlp.c_fc.weight", true},
        {&B::fc_bias, "fc.bias", &S::hidden, &S::one, Init::zero, false, "mlp.c_fc.bias", false},
        {&B::fc_proj_weight, "fc_proj.weight", &S::channels, &S::hidden, Init::normal_residual, true,
         "mlp.c_proj.weight", true},
        {&B::fc_proj_bias, "fc_proj.bias", &S::channels, &S::one, Init::zero, false, "mlp.c_proj.bias", false},
    };
    return table;
}

// One row of the table for one layer, placed in the flat arrays.
struct Tensor {
    std::string name;  // "wte", "h.3.qkv.weight"
    int row;           // in tensor_table()
    int layer;         // -1 if not per layer
    int rows, cols;    // as stored; (rows) if cols is 1 and the row's cols are GptShape::one
    size_t begin;      // first element in the flat arrays, a multiple of kTensorAlignment
    size_t count;      // rows * cols
    int bucket;        // in TensorLayout::buckets
};

// Tensors whose gradients are reduced and whose parameters are gathered together: those of no block, or successive
// blocks'. In a flat array a bucket is one piece for each rank, all of equal length, the last ones padded; in a rank's
// flat array of shards it is that rank's piece.
struct Bucket {
    int first_layer, n_layers;  // -1, 0: the tensors of no block
    size_t begin;               // in the flat arrays
    size_t piece;               // elements of each rank
    size_t shard_begin;         // of a rank's piece in its flat arrays of shards
};

inline constexpr size_t kTensorAlignment = 64;  // elements: 128 bytes in the narrowest type

// Every tensor of a model in the order of the flat arrays: the model's own, then layer by layer, so that what backward
// finishes together lies together.
struct TensorLayout {
    GptShape shape;
    int ranks = 1;
    std::vector<Tensor> tensors;
    std::vector<Bucket> buckets;  // the tensors of no block first
    size_t elements = 0;          // length of a flat array, gaps and padding included
    size_t shard_elements = 0;    // length of a rank's flat array of shards
    size_t parameters = 0;        // without gaps; the padding of the vocabulary counts

    const Bucket& bucket_of(const Tensor& tensor) const { return buckets[size_t(tensor.bucket)]; }
    int bucket_of_layer(int layer) const { return 1 + layer / buckets[1].n_layers; }
};
// Successive blocks share a bucket of at most `bucket_elements`, one block if that is larger.
TensorLayout lay_out_tensors(const GptShape& shape, int ranks = 1, size_t bucket_elements = 0);

// What a rank owns of a tensor: `count` elements from `first` on, which begin at `shard_begin` in its shards.
struct TensorPart {
    size_t first, count, shard_begin;
};
TensorPart part_of(const TensorLayout& layout, const Tensor& tensor, int rank);

// Shape as (rows) for vectors and (rows, cols) for matrices.
std::vector<size_t> logical_shape(const Tensor& tensor);

// The grid on which norms are summed and the optimizer works, in flat arrays; see ops::Chunk. A chunk ends where its
// tensor does and at every multiple of kChunkElements from its bucket's begin, which are the places where pieces of
// ranks may end: so it is the same grid of the same tensors for any number of ranks, and a chunk has one owner.
std::vector<ops::Chunk> chunk_grid(const TensorLayout& layout);

// The chunks of the grid that a rank owns, in its flat arrays of shards; `whole`: where they lie in whole flat arrays.
std::vector<ops::Chunk> owned_chunks(const TensorLayout& layout, const std::vector<ops::Chunk>& grid, int rank,
                                     bool whole);

// Pointers to tensors, each at place(tensor); gaps between tensors belong to nobody.
template <class T>
GptTensors<T> tensor_views(const TensorLayout& layout, const std::function<T*(const Tensor&)>& place) {
    GptTensors<T> views{};
    views.block.resize(size_t(layout.shape.n_layer));
    for (const Tensor& tensor : layout.tensors) {
        const auto& member = tensor_table<T>()[size_t(tensor.row)].member;
        T* where = place(tensor);
        if (tensor.layer < 0)
            views.*std::get<0>(member) = where;
        else
            views.block[size_t(tensor.layer)].*std::get<1>(member) = where;
    }
    return views;
}

// The same in one flat array, or nowhere.
template <class T> GptTensors<T> tensor_views(const TensorLayout& layout, T* flat) {
    return tensor_views<T>(layout, [flat](const Tensor& tensor) { return flat ? flat + tensor.begin : nullptr; });
}

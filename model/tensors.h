// The table of tensors: every parameter of the model is one row. Sizes, offsets, views, initialization, the decay mask,
// the optimizer's chunks, checkpoint names and the memory plan are derived from it.
#pragma once

#include <variant>

#include "kernels/ops.h"
#include "model/shape.h"

// One tensor of the model where the passes use it: its values in the compute type and their gradient.
struct Parameter {
    View value;             // (rows, cols)
    float* grad = nullptr;  // (rows, cols), FP32
    int rows = 0, cols = 0;
    const char* name = "";  // in the table: "qkv.weight"
};

// The parameters of a layer. An embedding has a weight only.
struct LayerWeights {
    Parameter weight, bias;
};

// What the model does not have is null.
struct BlockWeights {
    LayerWeights norm1, qkv, q_norm, k_norm, attn_proj;
    LayerWeights norm2, fc, fc_proj;  // fc: gate, then up
};

struct GptWeights {
    LayerWeights wte, wpe, norm_e, norm_f;
    LayerWeights head;                // null where wte is the head too
    std::vector<BlockWeights> block;  // (L)
};

// GPT-2's initialisation: residual projections start smaller by 1 / sqrt(2 L), so that the residual stream's variance
// does not grow with depth (Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3).
enum class Init { zero, one, normal, normal_residual };

struct TensorRow {
    std::variant<LayerWeights GptWeights::*, LayerWeights BlockWeights::*> layer;  // the second: one per block
    Parameter LayerWeights::*member;
    const char* name;
    int (GptShape::*rows)() const;
    int (GptShape::*cols)() const;  // GptShape::one for vectors
    Init init;
    bool decayed;
    bool (GptShape::*is_present)() const = &GptShape::always;

    bool per_layer() const { return layer.index() == 1; }
};

const std::vector<TensorRow>& tensor_table();

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

// Tensors whose gradients are reduced and whose parameters are gathered together: those of no block, successive
// blocks', or the head's where it is not the embedding: its gradients are complete before any block's. In a flat array
// a bucket is one piece for each rank, all of equal length, the last ones padded; in a rank's flat array of shards it
// is that rank's piece.
struct Bucket {
    int first_layer, n_layers;  // -1, 0: the tensors of no block, or the head
    size_t begin;               // in the flat arrays
    size_t piece;               // elements of each rank
    size_t shard_begin;         // of a rank's piece in its flat arrays of shards
};

inline constexpr size_t kTensorAlignment = 64;  // elements: 128 bytes in the narrowest type

// Every tensor of a model in the order of the flat arrays: the model's own, layer by layer, then the head if it has a
// matrix of its own, so that what backward finishes together lies together.
struct TensorLayout {
    GptShape shape;
    int ranks = 1;
    std::vector<Tensor> tensors;
    std::vector<Bucket> buckets;  // the tensors of no block first, the head last
    size_t elements = 0;          // length of a flat array, gaps and padding included
    size_t shard_elements = 0;    // length of a rank's flat array of shards
    size_t parameters = 0;        // without gaps; the padding of the vocabulary counts

    const Bucket& bucket_of(const Tensor& tensor) const { return buckets[size_t(tensor.bucket)]; }
    int bucket_of_layer(int layer) const { return 1 + layer / buckets[1].n_layers; }
    // The tied head's is that of the embedding.
    int bucket_of_head() const { return shape.tie_embeddings ? 0 : int(buckets.size()) - 1; }
};
// Successive blocks share a bucket of at most `bucket_elements`, one block if that is larger.
TensorLayout lay_out_tensors(const GptShape& shape, int ranks = 1, size_t bucket_elements = 0);

// A rank's part of a tensor: `count` elements from `first` on, which begin at `shard_begin` in its shards.
struct TensorPart {
    size_t first, count, shard_begin;
};
TensorPart part_of(const TensorLayout& layout, const Tensor& tensor, int rank);

// A tensor of padded_vocab() rows, or a rank's part of it, without the padding: what other programs' files have.
NamedTensor without_padding(NamedTensor tensor, const GptShape& shape);

// The parameters that are the model's: without the vocabulary's padding.
size_t without_vocabulary_padding(const TensorLayout& layout);

// Shape as (rows) for vectors and (rows, cols) for matrices.
std::vector<size_t> logical_shape(const Tensor& tensor);

// The grid on which norms are summed and the optimizer works, in flat arrays; see ops::Chunk. A chunk ends where its
// tensor does and at every multiple of kChunkElements from its bucket's begin, which are the places where pieces of
// ranks may end: so it is the same grid of the same tensors for any number of ranks, and a chunk has one owner.
std::vector<ops::Chunk> chunk_grid(const TensorLayout& layout);

// How many chunks the grid has, or how many of them a rank owns, without making them.
size_t chunk_count(const TensorLayout& layout);
size_t owned_chunk_count(const TensorLayout& layout, int rank);

// The chunks of the grid that a rank owns, in its flat arrays of shards; `whole`: where they lie in whole flat arrays.
std::vector<ops::Chunk> owned_chunks(const TensorLayout& layout, const std::vector<ops::Chunk>& grid, int rank,
                                     bool whole);

// The tensor's place among the weights that the passes use, with its shape set.
Parameter& parameter_of(GptWeights& weights, const Tensor& tensor);

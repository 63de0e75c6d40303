// The table of tensors: every parameter of the model is one row. Sizes, offsets, views, initialization, the optimizer's
// groups and chunks, checkpoint names and the memory plan are derived from it.
#pragma once

#include <variant>

#include "kernels/ops.h"
#include "model/options.h"
#include "model/shape.h"  // IWYU pragma: export

// One tensor as the passes use it: its values in the compute type and their gradient.
struct Parameter {
    View value;             // (rows, cols)
    float* grad = nullptr;  // (rows, cols), FP32
    int rows = 0, cols = 0;
    const char* name = "";  // in the table: "qkv.weight"
};

// The parameters of a layer. An embedding has only a weight.
struct LayerWeights {
    Parameter weight, bias;
};

// Parameters that the model does not have are null.
struct BlockWeights {
    LayerWeights norm1, qkv, q_norm, k_norm, attn_proj;
    LayerWeights norm2, fc, fc_proj;  // fc: gate, then up
};

struct GptWeights {
    LayerWeights wte, wpe, norm_e, norm_f;
    LayerWeights head;                // null if the head is tied to wte
    std::vector<BlockWeights> block;  // (L)
};

// GPT-2's initialization: residual projections are scaled by 1 / sqrt(2 L), so that the residual stream's variance does
// not grow with depth (Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3).
enum class Init { zero, one, normal, normal_residual };

// How the ranks of a TensorParallel divide a tensor. With `whole` each rank has the tensor and its whole gradient, with
// `summed` the tensor and a term of its gradient.
enum class Division { whole, summed, rows, columns };

struct TensorRow {
    std::variant<LayerWeights GptWeights::*, LayerWeights BlockWeights::*> layer;  // second: one per block
    Parameter LayerWeights::*member;
    const char* name;
    int (GptShape::*rows)() const;
    int (GptShape::*cols)() const;  // GptShape::one for vectors
    Init init;
    TensorRole role;
    Division division;
    bool (GptShape::*is_present)() const = &GptShape::always;
    // The rows of the matrices that the tensor stacks. Each is divided. Null: the tensor is one matrix or vector.
    std::vector<int> (GptShape::*stacked_rows)() const = nullptr;

    bool per_layer() const { return layer.index() == 1; }
    // Whether a pass of weights computes its gradient.
    bool is_linear() const;
    // Whether it has the padding of the vocabulary.
    bool is_padded() const { return rows == &GptShape::padded_vocab; }
    bool is_divided() const { return division == Division::rows || division == Division::columns; }
};

const std::vector<TensorRow>& tensor_table();

// One row of the table for one layer, with its place in the flat arrays.
struct Tensor {
    std::string name;  // "wte", "h.3.qkv.weight"
    const TensorRow* row;
    int layer;       // -1 if not per layer
    int rows, cols;  // on this rank; (rows) if cols is 1 and the row's cols are GptShape::one
    size_t begin;    // first element in the flat arrays, a multiple of kTensorAlignment
    size_t count;    // rows * cols
    int bucket;      // in TensorLayout::buckets
    int number;      // in TensorLayout::names
    bool is_copy;    // of a tied embedding, which the first stage of a pipeline counts and saves
};

// Tensors whose gradients are reduced together and whose parameters are gathered together. A bucket holds the tensors
// outside the blocks, those of successive blocks, or an untied head, whose gradients are complete before any block's.
// In a flat array a bucket has one piece for each rank, all of equal length with padding at the end. In a rank's flat
// array of shards it has only that rank's piece.
struct Bucket {
    int first_layer, n_layers;  // -1, 0: the tensors outside the blocks, or the head
    size_t begin;               // in the flat arrays
    size_t piece;               // elements of each rank
    size_t shard_begin;         // of a rank's piece in its flat arrays of shards
};

// Elements [begin, end) of a flat array or of a tensor.
struct FlatRange {
    size_t begin, end;
};

inline constexpr size_t kTensorAlignment = 128;  // elements: 256 bytes in the narrowest type
inline size_t round_up(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

// The tensors of a rank in the order of the flat arrays: first the tensors outside the blocks, then layer by layer,
// then an untied head. Tensors whose gradients are complete at the same time are adjacent. With pipeline parallelism
// the last stage has the final norm and the head after its layers. A tied embedding is on the first and on the last
// stage, alone in its bucket, so that ranks divide both in the same way. With
// deterministic_reduce each layer and each group of other tensors begins a chunk of chunk_grid(), so that the grid is
// the same for any number of stages, and so are the sums of a layerwise update.
struct TensorLayout {
    GptShape shape;  // this rank's part of `whole`
    GptShape whole;
    TensorParallel tensor_parallel;
    int ranks = 1;                   // that divide the flat arrays
    std::vector<std::string> names;  // of all tensors of the model
    std::vector<Tensor> tensors;
    std::vector<Bucket> buckets;
    std::vector<int> input_buckets;    // of the embeddings and their norm, if they are here
    std::vector<int> output_buckets;   // of the final norm and the head, if they are here
    std::vector<int> layer_buckets;    // of each layer of the model; -1: on another stage
    std::vector<FlatRange> chunks;     // the tensors of each of the rank's parts of the layers
    std::vector<size_t> first_chunks;  // of each of `names` in the grid of all stages; then the size of that grid
    size_t elements = 0;               // length of a flat array, gaps and padding included
    size_t shard_elements = 0;         // length of a rank's flat array of shards
    size_t parameters = 0;             // of this rank, without gaps, including the vocabulary's padding

    const Bucket& bucket_of(const Tensor& tensor) const { return buckets[size_t(tensor.bucket)]; }
    // The length of a bucket in a flat array, of all ranks' pieces.
    size_t bucket_elements(int bucket) const { return buckets[size_t(bucket)].piece * size_t(ranks); }
    int bucket_of_layer(int layer) const { return layer_buckets[size_t(layer)]; }
    // A tied head is in the embedding's bucket. -1: on another stage.
    int bucket_of_head() const { return output_buckets.empty() ? -1 : output_buckets.back(); }
    // The bucket of a tied embedding whose gradient is the sum of two arrays: of the embedding and of the head, which
    // another stage has or, with deterministic_reduce, this rank; -1: none.
    int tied_bucket = -1;
    bool has_input() const { return !input_buckets.empty(); }
    bool has_output() const { return !output_buckets.empty(); }
};
// Successive blocks share a bucket of at most `bucket_elements`; a larger block has its own bucket. shape: the whole
// model's.
TensorLayout lay_out_tensors(const GptShape& shape, int ranks = 1, size_t bucket_elements = 0,
                             const TensorParallel& tensor_parallel = {});
// The layouts of the stages that have parts of the rank's model.
std::vector<TensorLayout> lay_out_stages(const GptOptions& options);
// The layout of the rank that the options describe.
TensorLayout lay_out_rank(const GptOptions& options);

// Returns the names and the shapes of whole tensors without values.
std::vector<NamedTensor> whole_tensors(const TensorLayout& layout);

// Returns the parts of the whole tensor that this rank stores, in the order of its elements; empty if it is whole.
std::vector<Box> boxes_of(const TensorLayout& layout, const Tensor& tensor);

// A rank's part of a tensor: `count` elements from `first`, stored from `shard_begin` in its shards.
struct TensorPart {
    size_t first, count, shard_begin;
};
TensorPart part_of(const TensorLayout& layout, const Tensor& tensor, int rank);

// Returns a tensor of padded_vocab() rows, or a rank's part of one, without the padding, as other programs' files store
// it.
NamedTensor without_padding(NamedTensor tensor, const GptShape& shape);

// Returns the number of parameters without the vocabulary's padding.
size_t without_vocabulary_padding(const TensorLayout& layout);

// Returns the shape of the whole tensor: (rows) for vectors, (rows, cols) for matrices.
std::vector<size_t> logical_shape(const TensorLayout& layout, const Tensor& tensor);

// Returns the grid of chunks in flat arrays for norms and the optimizer, without groups; see ops::Chunk. A chunk ends
// with its tensor and at every multiple of kChunkElements from the start of its bucket, where pieces of ranks may end.
// So the grid is the same for any number of ranks, and each chunk has one owner. With tensor parallelism each rank has
// the same grid for its parts, and a chunk's index is its number * ranks + rank. Chunks of all stages are numbered in
// the order of TensorLayout::names.
std::vector<ops::Chunk> chunk_grid(const TensorLayout& layout);

// Removes the chunks that another rank counts: rank 0 of a TensorParallel counts tensors that are not divided.
std::vector<ops::Chunk> counted_once(const TensorLayout& layout, std::vector<ops::Chunk> chunks);

// Returns the number of chunks in the grid, or of those that a rank owns, without creating them.
size_t chunk_count(const TensorLayout& layout);
size_t owned_chunk_count(const TensorLayout& layout, int rank);

// Returns the chunks of the grid that a rank owns, with positions in its flat arrays of shards or, with `whole`, in
// whole flat arrays.
std::vector<ops::Chunk> owned_chunks(const TensorLayout& layout, const std::vector<ops::Chunk>& grid, int rank,
                                     bool whole);

// Returns the tensor's entry in the weights that the passes use, and sets its shape.
Parameter& parameter_of(GptWeights& weights, const Tensor& tensor);

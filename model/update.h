// How the optimizers divide the tensors of a rank, and the update of a step.
#pragma once

#include "kernels/comm.h"
#include "kernels/ops.h"
#include "model/options.h"
#include "model/pieces.h"
#include "model/tensors.h"

// Tensors whose updates have the same scalars.
struct UpdateGroup {
    OptimizerKind rule;
    double weight_decay;
    double lr_scale = 1;
    double beta1 = -1, beta2 = -1;  // negative: the optimizer's
    int schedule = -1;              // in OptimizerSettings::groups; -1: the schedule of tensors without a group
    bool operator==(const UpdateGroup&) const = default;
};

// The state that one optimizer keeps on a rank. Each of its arrays has the same layout: its tensors' owned parts one
// after the other.
struct RuleState {
    OptimizerKind rule;
    size_t elements = 0;  // length of each array
    std::vector<View> slots = {};
    int first_chunk = 0, n_chunks = 0;  // of GptState::update_chunks

    // Null if the rule has fewer.
    View slot(size_t number) const { return number < slots.size() ? slots[number] : View(); }
};

// The trust ratios of a layerwise optimizer. A layer is a tensor, or one of the matrices that it stacks.
struct TrustState {
    std::vector<ops::Layer> host_layers;  // kMaxStacked for each tensor of TensorLayout
    ops::Layer* layers = nullptr;
    double* sums = nullptr;  // (chunks of the grid * kMaxStacked, 2): a chunk has elements of at most that many layers
    float* ratios = nullptr;
    size_t n_sums = 0;
};
inline constexpr int kMaxStacked = 3;  // queries, keys and values

// The optimizer of each tensor.
struct UpdateLayout {
    struct Place {
        int group, rule;     // in the lists below
        size_t state_begin;  // of the owned part in the rule's arrays
    };
    std::vector<Place> tensors;  // in the order of TensorLayout
    std::vector<UpdateGroup> groups;
    std::vector<RuleState> rules;

    bool has_layers() const;
    const OptimizerRow& row_of(size_t tensor) const { return optimizer_row(rules[size_t(tensors[tensor].rule)].rule); }
};
UpdateLayout lay_out_update(const GptOptions& options, const TensorLayout& layout);

// Returns the tensors of a group of OptimizerSettings::groups that has none in this model, or an empty text.
std::string unused_group(const GptOptions& options);

// Returns the number of tensors of each optimizer: "adamw of 148 tensors".
std::string rules_text(const GptOptions& options);

// Returns a table for the terminal: the optimizer, learning rate and weight decay of each tensor.
std::string update_table(const GptOptions& options, double learning_rate);

// Returns the place of a tensor, or of this rank's part of it, in the owned arrays.
TensorPart owned_part(const GptOptions& options, const TensorLayout& layout, const Tensor& tensor);

// Returns the chunks that this rank updates, with their groups and the places of their state, sorted by rule; sets the
// number of each rule's chunks. With a layerwise rule, a chunk ends with its layer, and its index is its place in
// TrustState::sums. With UpdateScope::factors, state_begin is `begin`: directions have the place of the gradients.
std::vector<ops::Chunk> update_chunks(const GptOptions& options, const TensorLayout& layout, UpdateLayout& update,
                                      const std::vector<ops::Chunk>& chunks);

// Returns the scalars of a group in the step of update `t`, from 1. learning_rate: before the group's lr_scale.
ops::UpdateScalars update_scalars(const OptimizerSettings& settings, const UpdateGroup& group, double learning_rate,
                                  int64_t t);

// Returns the limit of their number, given the number without layers.
size_t max_update_chunks(const TensorLayout& layout, const UpdateLayout& update, size_t n_chunks);

// Returns the layers of all tensors, given this rank's grid. With tensor parallelism a layer has the sums of all ranks'
// parts. Each rank counts a tensor that is not divided, which cancels in a ratio of norms.
std::vector<ops::Layer> update_layers(const TensorLayout& layout, const UpdateLayout& update,
                                      const std::vector<ops::Chunk>& grid);

struct GptState;

// Gradient norm over all ranks, clipping, and the update of the masters. Requires that own_grad holds the sums over all
// ranks.
void update(GptState& s);

// Waits for a collective. The time of the update does not count the wait.
void wait_outside_update(GptState& s, const Comm& comm, Ticket ticket);
// Replaces values by their sums over the ranks of `comm`, and waits in the same way.
void add_over(GptState& s, const Comm& comm, double* sums, size_t count);

// The chunks of a rule, or some chunks of GptState::update_chunks.
ChunkList chunks_of(const GptState& s, const RuleState& rule);
ChunkList update_chunks(const GptState& s, int first_chunk, int n_chunks);

// GptState::own_grad as an array of an op on chunks.
ChunkArray own_gradients(const GptState& s, ChunkArray::Access access);

// Adds the squares of the gradients that this rank counts to GptState::sums.
void add_squares(GptState& s);

// Moves masters along `direction`, which is at the chunks' state_begin. cautious, trust_ratios: as in
// ops::ApplyDirection.
void apply_directions(GptState& s, const ChunkList& chunks, View direction, bool cautious,
                      const float* trust_ratios = nullptr);

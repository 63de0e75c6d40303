// Adafactor's state: averages of the squared gradients' rows and columns, which all ranks have.
//
// Each rank adds the squares of the elements that it owns. The sums over ranks are exact, so the averages have the same
// bits at any number of ranks and any ZeRO stage. With tensor parallelism, too, each rank has the averages of whole
// tensors.
#pragma once

#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "kernels/update_ops.h"
#include "model/arena.h"
#include "model/options.h"
#include "model/tensors.h"
#include "model/update.h"

// Each rank computes the same averages. A layer of a vector has no average of its row.
struct FactorState {
    // The whole layers, and the part of each that this rank has. As TrustState::host_layers; without columns if the
    // tensor has another rule.
    std::vector<ops::FactorLayer> host_layers, host_parts;
    std::vector<std::string> names;  // of the layers: a matrix's or a tensor's
    ops::FactorLayer *layers = nullptr, *parts = nullptr;
    float *row_v = nullptr, *col_v = nullptr, *means = nullptr;  // of all layers: rows, columns, layers
    double* sums = nullptr;                                      // of the rows of all layers, then of the columns
    size_t rows = 0, cols = 0;                                   // of all layers
    size_t divided_rows = 0, divided_cols = 0;                   // the first: of tensors that ranks divide
};

struct GptState;

// Lays out GptState::factors in the arena. Requires GptState::update.
void place_factors(GptState& s, Arena& arena);

// Copies the layers to the device, and writes their sizes to TrustState::host_layers.
void load_factors(GptState& s);

// Names the averages. `once`: only those that this rank saves. Among the ranks with the same part of the model the
// first saves; of several parts each saves the variances of its part of a vector, and the first all other averages.
std::vector<NamedTensor> name_factors(const GptState& s, bool once);

// Returns the number of averages that the rank saves.
size_t factor_elements(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update);

// Replaces this rank's gradients by Adafactor's directions, and writes the squared sums of its weights and directions
// to TrustState::sums.
void direct_factored(GptState& s, const RuleState& rule);

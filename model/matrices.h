// Optimizers of whole matrices: the matrices of the tensors, the rank that owns each, and the exchange of their pieces.
//
// Each rank computes the momentum of its elements, sends the pieces of a matrix to the matrix's owner, and gets back
// its pieces of the result. Gradients, masters and momentum stay sharded as with every optimizer. A matrix is
// orthogonalized once, on its owner, so its bits are the same at any number of ranks and any ZeRO stage. In SOAP the
// pieces of gradients travel, and the owner keeps all state. With tensor parallelism a rank's elements are a part of
// the matrix, and the owner puts the parts together.
#pragma once

#include <algorithm>

#include "kernels/comm.h"
#include "kernels/tensor.h"
#include "model/arena.h"
#include "model/optimizers.h"
#include "model/tensors.h"

// A tensor, or one of the matrices that it stacks: queries, keys and values, or gates and ups.
struct Matrix {
    std::string name;  // the tensor's, with ".0", ".1" or ".2" if the tensor has several
    int tensor;        // in TensorLayout::tensors
    size_t first;      // its first element in this rank's tensor: see part_elements()
    int rows, cols;    // of the whole matrix
    int owner = 0;     // among all ranks of the run

    size_t count() const { return size_t(rows) * size_t(cols); }
    int smaller() const { return std::min(rows, cols); }
};

// Returns the matrices of the tensors with TensorRole::matrix, with their owners: a pure function of the layout that
// balances the GEMMs over ranks.
std::vector<Matrix> lay_out_matrices(const TensorLayout& layout);

// Returns the number of a matrix's elements in the tensor on each rank of the TensorParallel.
size_t part_elements(const TensorLayout& layout, const Matrix& matrix);

// The working arrays for the direction of a matrix: see MatrixState.
struct MatrixMemory {
    Dtype type = Dtype::fp32;  // of x, gram and product
    size_t x = 0, gram = 0;    // elements; product has as many as x
    size_t gram_sums = 0;      // elements
    size_t scratch_bytes = 0;
};

// Returns memory that suffices for both, with a's type.
MatrixMemory larger(const MatrixMemory& a, const MatrixMemory& b);

// The matrices of a bucket, whose pieces travel together.
struct MatrixGroup {
    int bucket;
    size_t first = 0, end = 0;          // in MatrixState::matrices
    int first_chunk = 0, n_chunks = 0;  // as in RuleState
    Exchange directions, results;       // to the owners; from them
    Ticket ticket;                      // of the last exchange
};

struct MatrixState {
    int rule = -1;  // in GptState::update; -1: no optimizer of matrices
    std::vector<Matrix> matrices;
    std::vector<MatrixGroup> groups;
    std::vector<size_t> whole_begin;         // of each own matrix in `whole`
    std::vector<std::vector<float*>> slots;  // per OptimizerRow::matrix_slots: the state of each own matrix
    // With GptOptions::offload_optimizer `slots` are in host memory. While the state of an own matrix is in one window,
    // the state of the next one arrives in the other. Null without such state.
    float* windows[2] = {};
    std::vector<size_t> own;  // this rank's matrices
    // In the exchange's type. `direction`: laid out like the rule's state; the momentum's direction, or the gradient in
    // SOAP, then the result. `whole`: this rank's own matrices, each as one part per rank of the TensorParallel; null
    // if `direction` has whole matrices.
    View direction, whole;
    View joined;                 // an own matrix whose parts are columns, in the order of rows
    View x, gram, product;       // as large as an own matrix needs: see MatrixMemory
    float* gram_sums = nullptr;  // the Gram matrix of a matrix with more rows than columns; SOAP: see model/soap.h
    void* scratch = nullptr;
};

// Returns the number of elements of a slot's state of a matrix.
size_t slot_elements(const MatrixSlot& slot, const Matrix& matrix);

struct GptState;

// Returns a slot of an own matrix in device memory. Requires that finish_matrices() computes this matrix.
float* state_of(const GptState& s, size_t slot, size_t number);

// Names the state of all matrices. A rank has values only for the matrices that it owns.
std::vector<NamedTensor> name_matrix_state(const GptState& s);

// Lays out GptState::matrix in the arena. Requires GptState::update.
void place_matrices(GptState& s, Arena& arena);

// Finds the chunks of the groups of matrices in GptState::host_update_chunks.
void load_matrices(GptState& s);

// Starts the update of the matrices: momentum, and the exchange of all groups with the owners. Does nothing without a
// rule.
void begin_matrices(GptState& s);
// Finishes it: the directions of own matrices, the exchange back, and the step on the masters. While a rank computes
// the directions of a group, later groups arrive and the results of earlier ones travel. Masters change after all
// directions, because results are there only when the slowest owner of a group has sent them.
void finish_matrices(GptState& s);

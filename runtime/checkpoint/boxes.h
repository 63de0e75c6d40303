// Pieces of tensors: which elements of a tensor a range of a file or of memory has.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/tensor.h"

// Elements [first, first + count) of a box, row after row; at file_offset of the shard file that lists this piece. A
// box without rows is the whole tensor.
struct Piece {
    std::string tensor = {};
    size_t file_offset = 0;  // bytes
    size_t first = 0;        // elements
    size_t count = 0;        // elements
    Box box = {};
};

// Returns the whole tensor: shape[0] rows, all other dimensions as columns.
Box whole_box(const std::vector<size_t>& shape);

// Returns the local part of a tensor as pieces, in its order.
std::vector<Piece> pieces_of(const NamedTensor& tensor);

// Whether the piece lies within its box and the box within the tensor.
bool is_within(const Piece& piece, const std::vector<size_t>& shape);

// Calls visit(a_offset, b_offset, count) for each run of elements that both pieces of a tensor have in sequence. The
// offsets count elements from the beginning of each piece. Ascending in both.
void for_each_common_run(const Piece& a, const Piece& b, const std::vector<size_t>& shape,
                         const std::function<void(size_t, size_t, size_t)>& visit);

// An element of a tensor as a matrix.
struct Element {
    size_t row, col;
};

// Returns an element that two of the pieces have, or nothing. Requires is_within().
std::optional<Element> find_overlap(const std::vector<Piece>& pieces, const std::vector<size_t>& shape);

#include "runtime/checkpoint/boxes.h"

#include <algorithm>
#include <map>

namespace {

Box box_of(const Piece& piece, const std::vector<size_t>& shape) {
    return piece.box.rows == 0 ? whole_box(shape) : piece.box;
}

// Returns the piece as boxes: the rest of its first row, its whole rows, and the begin of its last row.
std::vector<Box> boxes_of(const Piece& piece, const std::vector<size_t>& shape) {
    const Box box = box_of(piece, shape);
    std::vector<Box> boxes;
    for (size_t at = piece.first, end = piece.first + piece.count; at < end;) {
        const size_t row = at / box.cols, col = at % box.cols;
        const size_t rows = col == 0 ? std::max<size_t>(1, (end - at) / box.cols) : 1;
        const size_t cols = std::min(box.cols - col, end - at);
        boxes.push_back({box.row + row, rows, box.col + col, cols});
        at += rows * cols;
    }
    return boxes;
}

}  // namespace

Box whole_box(const std::vector<size_t>& shape) {
    Box box{.rows = shape.empty() ? 1 : shape[0], .cols = 1};
    for (size_t i = 1; i < shape.size(); i++) box.cols *= shape[i];
    return box;
}

std::vector<Piece> pieces_of(const NamedTensor& tensor) {
    std::vector<Piece> pieces;
    if (tensor.boxes.empty()) {
        if (tensor.count > 0) pieces.push_back({.tensor = tensor.name, .first = tensor.first, .count = tensor.count});
        return pieces;
    }
    size_t begin = 0;  // of the box, among the elements of all boxes
    for (const Box& box : tensor.boxes) {
        const size_t first = std::max(tensor.first, begin);
        const size_t end = std::min(tensor.first + tensor.count, begin + box.count());
        if (first < end)
            pieces.push_back({.tensor = tensor.name, .first = first - begin, .count = end - first, .box = box});
        begin += box.count();
    }
    return pieces;
}

bool is_within(const Piece& piece, const std::vector<size_t>& shape) {
    const Box whole = whole_box(shape), box = box_of(piece, shape);
    return box.row <= whole.rows && box.rows <= whole.rows - box.row && box.col <= whole.cols &&
           box.cols <= whole.cols - box.col && piece.first <= box.count() && piece.count <= box.count() - piece.first;
}

void for_each_common_run(const Piece& a, const Piece& b, const std::vector<size_t>& shape,
                         const std::function<void(size_t, size_t, size_t)>& visit) {
    const Box in_a = box_of(a, shape), in_b = box_of(b, shape);
    for (const Box& part : boxes_of(a, shape)) {
        const size_t row = std::max(part.row, in_b.row), row_end = std::min(part.row + part.rows, in_b.row + in_b.rows);
        const size_t col = std::max(part.col, in_b.col), col_end = std::min(part.col + part.cols, in_b.col + in_b.cols);
        if (row >= row_end || col >= col_end) continue;
        // Rows that are whole in both boxes follow each other in both.
        const bool is_whole = col_end - col == in_a.cols && col_end - col == in_b.cols;
        const size_t rows = is_whole ? row_end - row : 1, count = rows * (col_end - col);
        for (size_t r = row; r < row_end; r += rows) {
            const size_t at_a = (r - in_a.row) * in_a.cols + (col - in_a.col);
            const size_t at_b = (r - in_b.row) * in_b.cols + (col - in_b.col);
            const size_t begin = std::max(at_b, b.first), end = std::min(at_b + count, b.first + b.count);
            if (begin < end) visit(at_a + (begin - at_b) - a.first, begin - b.first, end - begin);
        }
    }
}

std::optional<Element> find_overlap(const std::vector<Piece>& pieces, const std::vector<size_t>& shape) {
    std::vector<Box> boxes;
    for (const Piece& piece : pieces) std::ranges::copy(boxes_of(piece, shape), std::back_inserter(boxes));
    std::ranges::sort(boxes, {}, &Box::row);
    std::map<size_t, const Box*> open;   // the boxes that contain the current row, by column
    std::multimap<size_t, size_t> ends;  // the columns of the same, by the row after the last
    for (const Box& box : boxes) {
        for (; !ends.empty() && ends.begin()->first <= box.row; ends.erase(ends.begin()))
            open.erase(ends.begin()->second);
        const auto next = open.lower_bound(box.col);
        if (next != open.end() && next->first < box.col + box.cols) return Element{box.row, next->first};
        if (next != open.begin() && std::prev(next)->first + std::prev(next)->second->cols > box.col)
            return Element{box.row, box.col};
        open.emplace(box.col, &box);
        ends.emplace(box.row + box.rows, box.col);
    }
    return std::nullopt;
}

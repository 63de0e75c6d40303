// Pieces of tensors, and checkpoints of tensors that ranks divide by rows and columns.
#include <map>
#include <numeric>
#include <random>

#include "runtime/checkpoint/boxes.h"
#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

using Shape = std::vector<size_t>;

size_t columns_of(const Shape& shape) {
    size_t columns = 1;
    for (size_t i = 1; i < shape.size(); i++) columns *= shape[i];
    return columns;
}

// The elements of a range of boxes, as indices in the flattened tensor: a textbook.
std::vector<size_t> elements_of_boxes(const std::vector<Box>& boxes, const Shape& shape, size_t first, size_t count) {
    std::vector<size_t> elements;
    for (const Box& box : boxes)
        for (size_t row = box.row; row < box.row + box.rows; row++)
            for (size_t col = box.col; col < box.col + box.cols; col++)
                elements.push_back(row * columns_of(shape) + col);
    return {elements.begin() + ptrdiff_t(first), elements.begin() + ptrdiff_t(first + count)};
}

std::vector<size_t> elements_of_piece(const Piece& piece, const Shape& shape) {
    return elements_of_boxes({piece.box.rows ? piece.box : whole_box(shape)}, shape, piece.first, piece.count);
}

class RandomPieces {
public:
    explicit RandomPieces(unsigned seed) : random_(seed) {}

    size_t below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random_); }
    Shape shape() {
        switch (below(4)) {
            case 0: return {};
            case 1: return {1 + below(9)};
            case 2: return {1 + below(5), 1 + below(3), 1 + below(3)};
            default: return {1 + below(8), 1 + below(8)};
        }
    }
    Piece piece(const Shape& shape) {
        const Box whole = whole_box(shape);
        Box box{.row = below(whole.rows), .col = below(whole.cols)};
        box.rows = 1 + below(whole.rows - box.row), box.cols = 1 + below(whole.cols - box.col);
        if (below(3) == 0) box = {};
        const size_t count = box.rows ? box.count() : whole.count(), first = below(count);
        return {.first = first, .count = 1 + below(count - first), .box = box};
    }

private:
    std::mt19937 random_;
};

// ---- a grid of ranks ------------------------------------------------------------------------------------------------

// How ranks divide a matrix: `stacks` times, each rank gets rows or columns of each stack, and its part is divided
// again by ranges among `zero` ranks.
struct Division {
    const char* name;
    size_t rows, cols, stacks, zero;
    size_t ranks() const { return rows * cols * zero; }
};

size_t share(size_t total, size_t parts, size_t i) { return total * i / parts; }

std::vector<Box> boxes_of_rank(const Division& grid, const Shape& shape, size_t rank) {
    const Box whole = whole_box(shape);
    const size_t place = rank / grid.zero, row = place / grid.cols, col = place % grid.cols;
    const size_t stacks = whole.rows % grid.stacks ? 1 : grid.stacks, height = whole.rows / stacks;
    std::vector<Box> boxes;
    for (size_t stack = 0; stack < stacks; stack++) {
        Box box{.row = stack * height + share(height, grid.rows, row), .col = share(whole.cols, grid.cols, col)};
        box.rows = share(height, grid.rows, row + 1) - share(height, grid.rows, row);
        box.cols = share(whole.cols, grid.cols, col + 1) - share(whole.cols, grid.cols, col);
        if (box.count() > 0) boxes.push_back(box);
    }
    return boxes;
}

// The parts of a rank in separate memory.
class RankPart {
public:
    RankPart(const Division& grid, const std::vector<Shape>& shapes, size_t rank) {
        for (size_t t = 0; t < shapes.size(); t++) {
            const std::vector<Box> boxes = boxes_of_rank(grid, shapes[t], rank);
            size_t total = 0;
            for (const Box& box : boxes) total += box.count();
            const size_t zero = rank % grid.zero, first = share(total, grid.zero, zero);
            const size_t count = share(total, grid.zero, zero + 1) - first;
            elements_.push_back(elements_of_boxes(boxes, shapes[t], first, count));
            values_.emplace_back(count, NAN);
            NamedTensor tensor{"tensor/" + std::to_string(t), shapes[t], values_[t].data(), first, count};
            tensor.boxes = boxes;
            tensors_.push_back(tensor);
        }
    }

    const std::vector<NamedTensor>& tensors() const { return tensors_; }
    void take(ToyModel& model) {
        for (size_t t = 0; t < values_.size(); t++)
            for (size_t i = 0; i < values_[t].size(); i++) values_[t][i] = model.values()[t][elements_[t][i]];
    }
    bool has(ToyModel& model) const {
        for (size_t t = 0; t < values_.size(); t++)
            for (size_t i = 0; i < values_[t].size(); i++)
                if (!(values_[t][i] == model.values()[t][elements_[t][i]])) return false;
        return true;
    }

private:
    std::vector<std::vector<size_t>> elements_;
    std::vector<std::vector<float>> values_;
    std::vector<NamedTensor> tensors_;
};

std::string save_with_grid(const std::string& run_dir, const Division& grid, const std::vector<Shape>& shapes,
                           ToyModel& model) {
    std::vector<RankPart> ranks;
    std::vector<std::vector<NamedTensor>> parts;
    for (size_t rank = 0; rank < grid.ranks(); rank++) {
        ranks.emplace_back(grid, shapes, rank);
        ranks.back().take(model);
        parts.push_back(ranks.back().tensors());
    }
    return save_parts(run_dir, 10, model.tensors(), parts);
}

const Division kDivisions[] = {{"whole", 1, 1, 1, 1},   {"rows", 3, 1, 1, 1},         {"columns", 1, 4, 1, 1},
                               {"stacked", 2, 1, 3, 1}, {"stacked ZeRO", 2, 1, 3, 3}, {"columns ZeRO", 1, 3, 1, 2},
                               {"both", 2, 2, 1, 2},    {"ZeRO", 1, 1, 1, 5}};

}  // namespace

TEST_CASE("the runs that two pieces have in common equal a textbook", "[checkpoint]") {
    RandomPieces random(1);
    size_t total = 0;
    for (int i = 0; i < 5000; i++) {
        const Shape shape = random.shape();
        const Piece a = random.piece(shape), b = random.piece(shape);
        REQUIRE(is_within(a, shape));
        const std::vector<size_t> in_a = elements_of_piece(a, shape), in_b = elements_of_piece(b, shape);
        std::map<size_t, size_t> place_in_b;
        for (size_t k = 0; k < in_b.size(); k++) place_in_b[in_b[k]] = k;
        std::vector<std::pair<size_t, size_t>> expected, found;
        for (size_t k = 0; k < in_a.size(); k++)
            if (place_in_b.contains(in_a[k])) expected.emplace_back(k, place_in_b[in_a[k]]);
        for_each_common_run(a, b, shape, [&](size_t at_a, size_t at_b, size_t count) {
            for (size_t k = 0; k < count; k++) found.emplace_back(at_a + k, at_b + k);
        });
        REQUIRE(found == expected);
        total += found.size();
    }
    CHECK(total > 2000);
}

TEST_CASE("two rows that are whole in both pieces are one run", "[checkpoint]") {
    int runs = 0;
    const Shape shape{6, 8};
    const auto count_runs = [&](size_t, size_t, size_t) { runs++; };
    for_each_common_run({.first = 0, .count = 48}, {.first = 8, .count = 32}, shape, count_runs);
    CHECK(runs == 1);
    const Box left{0, 6, 0, 4};
    for_each_common_run({.first = 0, .count = 24, .box = left}, {.first = 4, .count = 16, .box = left}, shape,
                        count_runs);
    CHECK(runs == 2);
}

TEST_CASE("pieces that overlap are found", "[checkpoint]") {
    RandomPieces random(2);
    int with = 0, without = 0;
    for (int i = 0; i < 5000; i++) {
        const Shape shape = random.shape();
        std::vector<Piece> pieces;
        for (size_t n = 1 + random.below(4); n > 0; n--) pieces.push_back(random.piece(shape));
        std::map<size_t, int> owners;
        for (const Piece& piece : pieces)
            for (size_t element : elements_of_piece(piece, shape)) owners[element]++;
        const auto found = find_overlap(pieces, shape);
        const bool expected = std::ranges::any_of(owners, [](const auto& entry) { return entry.second > 1; });
        REQUIRE(bool(found) == expected);
        if (found) CHECK(owners[found->row * columns_of(shape) + found->col] > 1);
        (found ? with : without)++;
    }
    CHECK(with > 500);
    CHECK(without > 500);
}

TEST_CASE("any division of the tensors loads the checkpoint of any other", "[checkpoint]") {
    // The first is larger than a block of the file; the others have fewer rows or columns than some grids have ranks.
    const std::vector<Shape> shapes = {{600, 701}, {}, {2, 3}, {9}, {6, 5, 7}};
    ToyModel saved(1, shapes);
    for (const Division& from : kDivisions) {
        TemporaryDirectory run;
        const Checkpoint checkpoint(save_with_grid(run.path(), from, shapes, saved));
        for (const Division& to : kDivisions) {
            INFO(from.name << " to " << to.name);
            for (size_t rank = 0; rank < to.ranks(); rank++) {
                RankPart part(to, shapes, rank);
                checkpoint.load(part.tensors());
                REQUIRE(part.has(saved));
            }
        }
        ToyModel flat(2, shapes);
        checkpoint.load(flat.tensors());
        CHECK(flat == saved);
    }
}

TEST_CASE("a checkpoint of version 1 is read", "[checkpoint]") {
    const std::vector<Shape> shapes = {{7, 5}, {3}};
    ToyModel saved(1, shapes), loaded(2, shapes);
    TemporaryDirectory run;
    save_toy(run.path(), 20, saved);
    const std::string newer = step_directory(run.path(), 20);
    const std::string text = read_file(newer + "/MANIFEST.json");
    CHECK(text.find("box") == text.npos);  // pieces of the whole tensor are as in version 1
    commit_text(newer, replaced(text, "\"version\": 2", "\"version\": 1"));
    Checkpoint(newer).load(loaded.tensors());
    CHECK(loaded == saved);
    commit_text(newer, replaced(text, "\"version\": 2", "\"version\": 0"));
    expect_error(Exit::data, {"version 0", "versions 1 to 2"}, [&] { Checkpoint checkpoint(newer); });
}

TEST_CASE("boxes that do not cover a tensor exactly once are refused", "[checkpoint]") {
    const std::vector<Shape> shapes = {{6, 8}};
    ToyModel model(1, shapes);
    TemporaryDirectory run;
    const std::string directory = save_with_grid(run.path(), {"columns", 1, 2, 1, 1}, shapes, model);
    const std::string text = read_file(directory + "/MANIFEST.json");
    struct Case {
        const char *from, *to, *words;
    };
    for (const Case& c : {Case{"\"col\": 4", "\"col\": 3", "tensor/0: two pieces have row 0, column 3"},
                          {"\"col\": 4", "\"col\": 5", "rows [0, 0 + 6), columns [5, 5 + 4) of tensor tensor/0"},
                          {"\"rows\": 6", "\"rows\": 7", "rows [0, 0 + 7)"},
                          {"\"rows\": 6", "\"rows\": 5", "elements [0, 0 + 24) of rows [0, 0 + 5)"},
                          {"\"rows\": 6", "\"rows\": 0", "rows must be an integer from 1"},
                          {"\"row\": 0", "\"row\": 9223372036854775807", "rows [9223372036854775807"},
                          {"\"cols\": 4", "\"cols\": 9223372036854775807", "+ 9223372036854775807) of tensor"},
                          {"\"col\": 4", "\"column\": 4", "col is missing"},
                          {"8\n", "9\n", "its pieces have 48 of 54 elements"}}) {
        INFO(c.from << " -> " << c.to);
        commit_text(directory, replaced(text, c.from, c.to));
        expect_error(Exit::data, {"MANIFEST.json", c.words}, [&] { Checkpoint checkpoint(directory); });
    }
}

// factor_sums, factor_moments, factored_direction, and the ratios of Adafactor, against ref::.
#include <cstddef>

#include "test/reference/update_rules.h"
#include "test/support/bounded.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"
#include "test/support/update_chunks.h"

namespace {

struct Shape {
    int rows, cols;
    bool is_factored = true;
    int padding = 0;       // rows
    double width = 1;      // of the gradients
    bool follows = false;  // in the same tensor: shares a chunk of the grid with the layer before
};
// Rows that cross the borders of chunks; three layers of one tensor; one row, one column, a vector; rows longer than
// chunks; padding; gradients whose squares are far below the last place of the sum of all squares; columns of many
// chunks, whose sums in double depend on the order unless they are exact.
constexpr Shape kShapes[] = {{37, 1003},
                             {5, 40, true, 0, 0.01},
                             {3, 40, true, 0, 100, true},
                             {3, 40, true, 0, 1, true},
                             {1, 700, true, 0, 1e-8},
                             {700, 1},
                             {1, 500, false},
                             {2, 20000},
                             {10, 9, true, 3},
                             {5000, 21}};
constexpr size_t kLayers = std::size(kShapes);
constexpr size_t kFirst = 100;         // the first layer's place, so that chunks end within rows
constexpr float kScale = 1.0f / 1024;  // exact, so that ref:: and the ops have the same gradients

// Adjacent layers, and the grid's chunks, cut at the ends of layers.
struct Layers {
    std::vector<ops::FactorLayer> layers;
    std::vector<ops::Chunk> chunks;
    size_t rows = 0, cols = 0, count = kFirst;

    Layers() {
        for (size_t i = 0; i < kLayers; i++) {
            const Shape& shape = kShapes[i];
            if (!shape.follows) count += 13;
            layers.push_back({.begin = ptrdiff_t(count),
                              .first_row = rows,
                              .first_col = cols,
                              .rows = shape.rows,
                              .cols = shape.cols,
                              .group = int(i % 2),
                              .is_factored = shape.is_factored});
            const size_t end = count + size_t(shape.rows + shape.padding) * size_t(shape.cols);
            for (size_t next; count < end; count = next) {
                next = std::min(end, (count / ops::kChunkElements + 1) * ops::kChunkElements);
                chunks.push_back({.begin = count,
                                  .count = int(next - count),
                                  .tensor = int(i),
                                  .index = int(chunks.size()),
                                  .group = int(i % 2),
                                  .state_begin = count,
                                  .layer = int(i)});
            }
            rows += size_t(shape.rows + shape.padding), cols += size_t(shape.cols);
        }
    }
    // Gradients, 0 in the padding.
    std::vector<double> gradients() const {
        std::vector<double> values = random_values(count, 4, 1024);
        for (size_t i = 0; i < kLayers; i++) {
            const size_t begin = size_t(layers[i].begin), elements = size_t(kShapes[i].rows) * size_t(kShapes[i].cols);
            for (size_t e = 0; e < elements; e++) values[begin + e] *= kShapes[i].width;
            for (size_t e = 0; e < size_t(kShapes[i].padding) * size_t(kShapes[i].cols); e++)
                values[begin + elements + e] = 0;
        }
        return values;
    }
};

ops::UpdateScalars scalars_of(float one_minus_beta2, float eps, float clip_threshold) {
    ops::UpdateScalars scalars{};
    scalars.learning_rate = 0.01f, scalars.keep = 0.9f;
    scalars.one_minus_beta2 = one_minus_beta2, scalars.eps = eps, scalars.clip_threshold = clip_threshold;
    return scalars;
}

// The arrays of the three ops. The state of each layer has the size of its gradients' squares.
struct Factored {
    Layers at;
    Array<float> grad;
    Array<float> master{"master", Role::input, random_values(at.count, 5)};
    Array<ops::Chunk> chunks{"chunks", Role::input, at.chunks};
    Array<ops::FactorLayer> layers{"layers", Role::input, at.layers};
    Array<ops::UpdateScalars> scalars{
        "scalars", Role::input,
        std::vector<ops::UpdateScalars>{scalars_of(0.3f, 0.1f, 1), scalars_of(0.125f, 1e-7f, 0.5f)}};
    Array<ops::GradNorm> grad_norm;
    Array<double> rows{"rows", Role::output, std::vector<double>(2 * at.rows)};
    Array<double> cols{"cols", Role::output, std::vector<double>(2 * at.cols)};
    Array<float> row_v{"row_v", Role::output, state(true)}, col_v{"col_v", Role::output, state(false)};
    Array<float> mean{"mean", Role::output, std::vector<float>(kLayers, 0.02f)};
    Array<double> sums{"sums", Role::output, std::vector<double>(2 * at.chunks.size(), -1.0)};

    explicit Factored(int non_finite_tensor = -1, const std::vector<double>& gradients = Layers().gradients())
        : grad("grad", Role::output, gradients),
          grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = norm(), .scale = kScale, .non_finite_tensor = non_finite_tensor, .reserved = 0}}) {}

    float norm() const {
        double sum = 0;
        for (const ops::Chunk& chunk : at.chunks)
            for (size_t e = chunk.begin; e < chunk.begin + size_t(chunk.count); e++)
                sum += double(grad.host[e]) * double(grad.host[e]) * double(kScale) * double(kScale);
        return float(std::sqrt(sum));
    }
    std::vector<double> state(bool of_rows) const {
        std::vector<double> values = random_values(of_rows ? at.rows : at.cols, of_rows ? 6 : 7, 0.5, 0.5);
        for (size_t i = 0; i < kLayers; i++) {
            const size_t first = of_rows ? at.layers[i].first_row : at.layers[i].first_col;
            const size_t count = size_t(of_rows ? kShapes[i].rows + kShapes[i].padding : kShapes[i].cols);
            for (size_t k = first; k < first + count; k++) values[k] *= kShapes[i].width * kShapes[i].width;
        }
        return values;
    }

    template <class Side> ops::FactorSums sums_on(Side side) {
        return {rows.on(side),   cols.on(side),      grad.on(side),        chunks.on(side),
                layers.on(side), grad_norm.on(side), int(at.chunks.size())};
    }
    template <class Side> ops::FactorMoments moments_on(Side side) {
        return {row_v.on(side),  col_v.on(side),   mean.on(side),      rows.on(side), cols.on(side),
                layers.on(side), scalars.on(side), grad_norm.on(side), int(kLayers)};
    }
    template <class Side> ops::FactoredDirection direction_on(Side side) {
        return {grad.on(side),    sums.on(side),      master.on(side),      row_v.on(side),
                col_v.on(side),   mean.on(side),      chunks.on(side),      layers.on(side),
                scalars.on(side), grad_norm.on(side), int(at.chunks.size())};
    }
};

// Checks sums of exact squares: an error of double's roundoff, and half a unit in the last place of the low parts of
// each square. counts: of squares.
void check_pairs(const Array<double>& array, double norm, const std::vector<int>& counts) {
    const std::vector<double> pairs = array.fetch();
    for (size_t i = 0; i < counts.size(); i++) {
        const double sum = pairs[2 * i] + pairs[2 * i + 1], expected = array.host[2 * i];
        const double bound = counts[i] * (0x1p-53 * expected + 0x1p-79 * norm * norm);
        const bool is_close = std::abs(sum - expected) <= bound;
        INFO(array.name() << " " << i << " is " << sum << ", should be " << expected << " within " << bound);
        CHECK(is_close);
        if (!is_close) return;
    }
}

void check_sums(const Factored& arrays) {
    std::vector<int> of_rows, of_cols;
    for (const Shape& shape : kShapes) {
        of_rows.insert(of_rows.end(), size_t(shape.rows + shape.padding), shape.cols);
        of_cols.insert(of_cols.end(), size_t(shape.cols), shape.rows + shape.padding);
    }
    check_pairs(arrays.rows, double(arrays.norm()), of_rows);
    check_pairs(arrays.cols, double(arrays.norm()), of_cols);
}

}  // namespace

TEST_CASE("factor_sums", "[ops]") {
    Factored arrays;
    ops::factor_sums(arrays.sums_on(OnDevice<float>()), Stream());
    ref::factor_sums(arrays.sums_on(OnHost()));
    check_sums(arrays);
}

TEST_CASE("factor_sums: the same bits in any order of chunks, in one call or several", "[ops]") {
    Factored expected;
    ops::factor_sums(expected.sums_on(OnDevice<float>()), Stream());
    Factored arrays;
    std::vector<ops::Chunk> reversed = arrays.at.chunks;
    std::ranges::reverse(reversed);
    Array<ops::Chunk> chunks("reversed chunks", Role::input, reversed);
    ops::FactorSums op = arrays.sums_on(OnDevice<float>());
    op.chunks = chunks.on(OnDevice<float>());
    op.n_chunks = 3;
    ops::factor_sums(op, Stream());
    op.chunks += 3, op.n_chunks = int(reversed.size()) - 3;
    ops::factor_sums(op, Stream());
    check_same_bits(arrays.rows, expected.rows.fetch());
    check_same_bits(arrays.cols, expected.cols.fetch());
}

TEST_CASE("factor_moments", "[ops]") {
    Factored arrays;
    ops::factor_sums(arrays.sums_on(OnDevice<float>()), Stream());
    arrays.rows.host = arrays.rows.fetch(), arrays.cols.host = arrays.cols.fetch();
    std::vector<double> row_error(arrays.at.rows), col_error(arrays.at.cols), mean_error(kLayers);
    for (size_t i = 0; i < kLayers; i++) {
        const ops::FactorLayer& layer = arrays.at.layers[i];
        const auto error_of = [&](const Array<double>& sums, const Array<float>& v, size_t k, int count) {
            const Bounded mean = Bounded::rounded((sums.host[2 * k] + sums.host[2 * k + 1]) / count, 0);
            const Bounded moved =
                ref::factored_average(arrays.scalars.host[size_t(layer.group)], mean, Bounded(double(v.host[k])));
            return moved.error + stored_error_fp32(moved.value);
        };
        for (size_t k = layer.first_row; k < layer.first_row + size_t(layer.rows); k++) {
            row_error[k] = error_of(arrays.rows, arrays.row_v, k, layer.cols);
            mean_error[i] += row_error[k] / layer.rows;
        }
        for (size_t k = layer.first_col; k < layer.first_col + size_t(layer.cols); k++)
            col_error[k] = error_of(arrays.cols, arrays.col_v, k, layer.rows);
    }
    ops::factor_moments(arrays.moments_on(OnDevice<float>()), Stream());
    ref::factor_moments(arrays.moments_on(OnHost()));
    check_close(arrays.row_v, [&](size_t k) { return row_error[k]; });
    check_close(arrays.col_v, [&](size_t k) { return col_error[k]; });
    check_close(arrays.mean, [&](size_t i) { return mean_error[i] + stored_error_fp32(arrays.mean.host[i]); });
}

TEST_CASE("factored_direction", "[ops]") {
    Factored arrays;
    const ops::FactoredDirection op = arrays.direction_on(OnHost());
    std::vector<double> error(arrays.at.count), sum_error(arrays.sums.host.size());
    for (const ops::Chunk& chunk : arrays.at.chunks) {
        const ops::FactorLayer& layer = arrays.at.layers[size_t(chunk.layer)];
        double sums[] = {0, 0};
        for (size_t e = chunk.begin; e < chunk.begin + size_t(chunk.count); e++) {
            const size_t place = e - size_t(layer.begin), cols = size_t(layer.cols);
            const Bounded g = Bounded(double(op.grad[e])) * Bounded(double(kScale));
            const Bounded direction = ref::factored_element(op.scalars[chunk.group], layer.is_factored, g,
                                                            Bounded(double(op.row_v[layer.first_row + place / cols])),
                                                            Bounded(double(op.col_v[layer.first_col + place % cols])),
                                                            Bounded(double(op.mean[chunk.layer])));
            error[e] = direction.error + stored_error_fp32(direction.value);
            sums[0] += element(op.master, e) * element(op.master, e), sums[1] += direction.value * direction.value;
            sum_error[size_t(2 * chunk.index) + 1] += (2 * std::abs(direction.value) + error[e]) * error[e];
        }
        for (size_t k = 0; k < 2; k++) sum_error[size_t(2 * chunk.index) + k] += 2 * chunk.count * 0x1p-53 * sums[k];
    }
    ops::factored_direction(arrays.direction_on(OnDevice<float>()), Stream());
    ref::factored_direction(op);
    check_close(arrays.grad, [&](size_t e) { return error[e]; });
    check_close(arrays.sums, [&](size_t i) { return sum_error[i]; });
}

TEST_CASE("factored_direction reads masters in bf16", "[ops]") {
    Factored in_fp32, in_bf16;
    const OnDevice<float> device;
    std::vector<float> values = in_fp32.master.host;
    for (float& value : values) value = to_float(from_float<bf16>(value));
    Array<float> wide("master", Role::input, values);
    Array<bf16> narrow("master", Role::input, values);
    ops::FactoredDirection from_fp32 = in_fp32.direction_on(device), from_bf16 = in_bf16.direction_on(device);
    from_fp32.master = wide.on(device), from_bf16.master = narrow.on(device);
    ops::factored_direction(from_fp32, Stream());
    ops::factored_direction(from_bf16, Stream());
    check_same_bits(in_bf16.grad, in_fp32.grad.fetch());
    in_bf16.sums.host = in_fp32.sums.fetch();  // the CPU adds in an order that depends on the type
    check_close(in_bf16.sums, [&](size_t i) { return ops::kChunkElements * 0x1p-52 * in_bf16.sums.host[i]; });
}

TEST_CASE("factor_sums, factor_moments and factored_direction do nothing when a gradient is not finite", "[ops]") {
    Factored arrays(2), expected;
    const OnDevice<float> device;
    ops::factor_sums(arrays.sums_on(device), Stream());
    ops::factor_moments(arrays.moments_on(device), Stream());
    ops::factored_direction(arrays.direction_on(device), Stream());
    check_same_bits(arrays.rows, expected.rows.fetch());
    check_same_bits(arrays.cols, expected.cols.fetch());
    check_same_bits(arrays.row_v, expected.row_v.fetch());
    check_same_bits(arrays.col_v, expected.col_v.fetch());
    check_same_bits(arrays.mean, expected.mean.fetch());
    check_same_bits(arrays.grad, expected.grad.fetch());
    check_same_bits(arrays.sums, expected.sums.fetch());
}

// Gradients of 0, and with squares beyond float.
TEST_CASE("factor_sums of extreme gradients", "[ops]") {
    for (const double value : {0.0, 0x1p-100, 0x1p100}) {
        Factored arrays(-1, std::vector<double>(Layers().count, value));
        ops::factor_sums(arrays.sums_on(OnDevice<float>()), Stream());
        ref::factor_sums(arrays.sums_on(OnHost()));
        check_sums(arrays);
    }
}

// Small and large weights, directions below and above the threshold, layers of several chunks.
TEST_CASE("trust_ratios of Adafactor", "[ops]") {
    const std::vector<ops::Layer> layers = {
        {0, 1, 1, 0, true, 100}, {1, 3, 700, 1, true, 5000}, {2, 3, 700, 0, true, 90}, {2101, 1, 2, 0, true, 1u << 31}};
    Factored arrays;
    Array<double> sums("sums", Role::input, random_values(2 * 2105, 1, 1, 1));  // positive
    Array<ops::Layer> table("layers", Role::input, layers);
    Array<float> ratios("ratios", Role::output, std::vector<float>(layers.size(), NAN));
    const auto on = [&](auto side) {
        return ops::TrustRatios{OptimizerKind::adafactor, ratios.on(side),           sums.on(side),     table.on(side),
                                arrays.scalars.on(side),  arrays.grad_norm.on(side), int(layers.size())};
    };
    ref::trust_ratios(on(OnHost()));
    ops::trust_ratios(on(OnDevice<float>()), Stream());
    check_close(ratios, [&](size_t i) { return stored_error_fp32(ratios.host[i]); });
    CHECK(ratios.host[3] == 1e-3f);
}

TEST_CASE("apply_direction multiplies the learning rate by the layer's ratio", "[ops]") {
    const float ratios[] = {0.5f, 3, 0.25f, 2, 1.75f, 1};
    std::vector<ops::Chunk> chunks = chunks_of_all_tensors();
    Array<ops::Chunk> of_layers("chunks", Role::input, chunks);
    for (ops::Chunk& chunk : chunks) chunk.group = chunk.tensor;
    Array<ops::Chunk> of_groups("chunks of groups", Role::input, chunks);
    std::vector<ops::UpdateScalars> scalars(kTensors, scalars_of(0, 0, 1));
    Array<ops::UpdateScalars> same("scalars", Role::input, scalars);
    for (size_t i = 0; i < scalars.size(); i++) scalars[i].learning_rate *= ratios[i];
    Array<ops::UpdateScalars> own("own scalars", Role::input, scalars);
    Array<float> factors("ratios", Role::input, std::vector<float>(std::begin(ratios), std::end(ratios)));
    const size_t count = chunks.back().state_begin + size_t(chunks.back().count);
    Array<float> direction("direction", Role::input, random_values(count, 1));
    Array<float> master("master", Role::output, random_values(count, 2)),
        expected("expected", Role::output, master.host);
    Factored arrays;
    const OnDevice<float> device;
    ops::ApplyDirection op{.master = master.on(device),
                           .param = View(),
                           .direction = direction.on(device),
                           .chunks = of_layers.on(device),
                           .scalars = same.on(device),
                           .grad_norm = arrays.grad_norm.on(device),
                           .n_chunks = int(chunks.size()),
                           .cautious = false,
                           .trust_ratios = factors.on(device)};
    ops::apply_direction(op, Stream());
    op.master = expected.on(device), op.chunks = of_groups.on(device), op.scalars = own.on(device);
    op.trust_ratios = nullptr;
    ops::apply_direction(op, Stream());
    check_same_bits(master, expected.fetch());
}

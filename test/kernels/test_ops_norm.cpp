// residual_norm_forward, with and without a branch, and norm_backward against ref::.
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int rows, cols;
    int shift = 0;  // of the arrays, in elements
};
constexpr float kEps = 1e-5f;

std::vector<Shape> small_shapes() {
    std::vector<Shape> shapes;
    for (int rows : {1, 37, 130})
        for (int cols : {1, 7, 64, 132, 768}) shapes.push_back({rows, cols});
    return shapes;
}

// Borders between a GPU's kernels: rows of one, two, four or eight warps, rows that do not fit in registers, rows that
// end in part of a pack or begin at odd addresses; more groups of rows than one warp adds, and groups larger than the
// smallest.
std::vector<Shape> large_shapes() {
    return {{3, 1024}, {9, 1600}, {2, 2048},   {3, 2051},   {3, 2568},   {2, 4104},
            {2, 5136}, {600, 8},  {17, 64, 1}, {3, 777, 1}, {2, 2568, 1}};
}
std::vector<Shape> all_shapes() {
    std::vector<Shape> shapes = small_shapes();
    for (const Shape& s : large_shapes()) shapes.push_back(s);
    return shapes;
}

// The parts of a norm: LayerNorm has a mean, RMSNorm none.
struct Parts {
    bool mean = true, weight = true, bias = true;
};
constexpr Parts kOtherParts[] = {{true, true, false},  {true, false, true},  {true, false, false}, {false, true, true},
                                 {false, true, false}, {false, false, true}, {false, false, false}};
// Shapes for which a GPU has separate kernels.
constexpr Shape kShapesOfParts[] = {{1, 1},    {37, 7},   {9, 132},  {3, 768},    {3, 1024},
                                    {2, 2048}, {3, 2051}, {2, 2568}, {17, 64, 1}, {2, 2568, 1}};

std::string describe(const Parts& parts) {
    return format("%s, weight %d, bias %d", parts.mean ? "LayerNorm" : "RMSNorm", parts.weight, parts.bias);
}
std::string describe(const Shape& s) { return format("rows %d, cols %d, shift %d", s.rows, s.cols, s.shift); }

// Rows whose mean is at least three times their deviation: computing the variance as E[x^2] - E[x]^2 would show.
std::vector<double> random_rows(int rows, int cols, uint64_t seed) {
    return random_values(size_t(rows) * cols, seed, 1, 2);
}

// The forward op's arrays except the residual stream.
template <class T> struct NormArrays {
    int rows, cols, shift;
    size_t count = size_t(rows) * cols;
    Stored<T> out{"out", Role::output, nans(count), shift};
    Array<float> mean{"mean", Role::output, nans(rows), shift};
    Array<float> rstd{"rstd", Role::output, nans(rows), shift};
    Stored<T> weight{"weight", Role::input, random_values(cols, 1, 0.5, 1), shift};
    Stored<T> bias{"bias", Role::input, random_values(cols, 2), shift};
    Parts parts;

    explicit NormArrays(const Shape& s, const Parts& with = {})
        : rows(s.rows), cols(s.cols), shift(s.shift), parts(with) {}

    double mean_of(size_t row) const { return parts.mean ? mean.host[row] : 0; }
    double weight_of(size_t col) const { return parts.weight ? weight.host[col] : 1; }
    double bias_of(size_t col) const { return parts.bias ? bias.host[col] : 0; }

    template <class Side> auto norm_op(Side side, Stored<T>& inp) {
        return ops::ResidualNormForward{.residual = nullptr,
                                        .out = out.on(side),
                                        .mean = parts.mean ? mean.on(side) : nullptr,
                                        .rstd = rstd.on(side),
                                        .inp = inp.on(side),
                                        .branch = nullptr,
                                        .weight = parts.weight ? weight.on(side) : nullptr,
                                        .bias = parts.bias ? bias.on(side) : nullptr,
                                        .rows = rows,
                                        .cols = cols,
                                        .eps = kEps};
    }

    // A float mean is off by mean_error, so x - mean by mean_error and one rounding. In the sum of squares around the
    // computed mean that error is of second order, so the variance has the relative error of a sum of squares. The
    // square root halves it, and rstd adds the errors of a root and a division.
    void check_against(const Stored<T>& inp) {
        double rstd_error = summation_error(cols) + kFunctionError;
        std::vector<double> mean_error(rows);
        for (int row = 0; parts.mean && row < rows; row++) {
            double sum = 0;
            for (int c = 0; c < cols; c++) sum += std::abs(inp.host[size_t(row) * cols + c]);
            mean_error[row] = (summation_error(cols) + 2 * kRoundoff) * sum / cols;
        }
        if (parts.mean)
            check_close(mean, [&](size_t row) { return mean_error[row] + stored_error_fp32(mean.host[row]); });
        check_close(rstd, [&](size_t row) { return rstd_error * rstd.host[row] + stored_error_fp32(rstd.host[row]); });
        check_close(out, [&](size_t i) {
            size_t row = i / cols, c = i % cols;
            double slope = std::abs(weight_of(c)) * rstd.host[row];
            double scaled = std::abs(inp.host[i] - mean_of(row)) * slope;
            double arithmetic = slope * mean_error[row] + scaled * (rstd_error + 4 * kRoundoff) +
                                kRoundoff * (std::abs(bias_of(c)) + std::abs(out.host[i]));
            return arithmetic + stored_error<T>(out.host[i]);
        });
    }
};

}  // namespace

TEMPLATE_TEST_CASE("residual_norm_forward without a branch", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : all_shapes()) {
        INFO(describe(s));
        NormArrays<T> arrays(s);
        Stored<T> inp("inp", Role::input, random_rows(s.rows, s.cols, 3), s.shift);
        ops::residual_norm_forward(arrays.norm_op(OnDevice<T>(), inp), Stream());
        ref::residual_norm_forward(arrays.norm_op(OnHost(), inp));
        arrays.check_against(inp);
    }
}

template <class T> static void test_residual_norm_forward(const Shape& s, const Parts& parts) {
    INFO(describe(s) << ", " << describe(parts));
    NormArrays<T> arrays(s, parts);
    Stored<T> residual("residual", Role::output, nans(arrays.count), s.shift);
    Stored<T> inp("inp", Role::input, random_rows(s.rows, s.cols, 3), s.shift);
    Stored<T> branch("branch", Role::input, random_values(arrays.count, 4), s.shift);
    auto op = [&]<class Side>(Side side) {
        auto with_branch = arrays.norm_op(side, inp);
        with_branch.residual = residual.on(side), with_branch.branch = branch.on(side);
        return with_branch;
    };
    ops::residual_norm_forward(op(OnDevice<T>()), Stream());
    ref::residual_norm_forward(op(OnHost()));
    check_close(residual,
                [&](size_t i) { return stored_error<T>(residual.host[i]) + kRoundoff * std::abs(residual.host[i]); });

    // The norm reads the residual as stored, so it must equal the norm of the stored residual: in value as ref::, in
    // bits as the op without a branch.
    std::vector<T> out_bits = arrays.out.fetch();
    std::vector<float> mean_bits = arrays.mean.fetch(), rstd_bits = arrays.rstd.fetch();
    Stored<T> stored("stored residual", Role::input, residual.fetch());
    ref::residual_norm_forward(arrays.norm_op(OnHost(), stored));
    arrays.check_against(stored);
    ops::residual_norm_forward(arrays.norm_op(OnDevice<T>(), stored), Stream());
    check_same_bits(arrays.out, out_bits);
    check_same_bits(arrays.mean, mean_bits);
    check_same_bits(arrays.rstd, rstd_bits);
}

TEMPLATE_TEST_CASE("residual_norm_forward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : all_shapes()) test_residual_norm_forward<TestType>(s, {});
    for (const Parts& parts : kOtherParts)
        for (const Shape& s : kShapesOfParts) test_residual_norm_forward<TestType>(s, parts);
}

namespace {

struct NormBackwardBounds {
    std::vector<double> dinp, dweight, dbias;  // without the rounding of stored values
};

// `op` is the host's. The averages over a row are sums of `cols` products of two or three factors; everything else is a
// few roundings per term. Sums over rows start from the values already stored.
NormBackwardBounds norm_backward_bounds(const ops::NormBackward& op) {
    NormBackwardBounds bounds{std::vector<double>(size_t(op.rows) * op.cols), std::vector<double>(op.cols),
                              std::vector<double>(op.cols)};
    double sum_error = summation_error(op.rows + 1) + 4 * kRoundoff;
    double average_error = summation_error(op.cols) + 4 * kRoundoff;
    for (int row = 0; row < op.rows; row++) {
        double average = 0, average_with_normed = 0;
        auto normed = [&](int c) {
            const double mean = op.mean ? op.mean[row] : 0;
            return std::abs(op.inp.as<double>()[size_t(row) * op.cols + c] - mean) * op.rstd[row];
        };
        auto dout = [&](int c) { return std::abs(op.dout.as<double>()[size_t(row) * op.cols + c]); };
        auto dnormed = [&](int c) { return dout(c) * (op.weight ? std::abs(op.weight.as<double>()[c]) : 1); };
        for (int c = 0; c < op.cols; c++) {
            if (op.mean) average += dnormed(c) / op.cols;
            average_with_normed += dnormed(c) * normed(c) / op.cols;
            bounds.dweight[c] += sum_error * dout(c) * normed(c);
            bounds.dbias[c] += sum_error * dout(c);
        }
        for (int c = 0; c < op.cols; c++) {
            double averages = average + normed(c) * average_with_normed;
            bounds.dinp[size_t(row) * op.cols + c] =
                op.rstd[row] * (averages * average_error + (dnormed(c) + averages) * 6 * kRoundoff);
        }
    }
    for (int c = 0; c < op.cols && op.accumulate; c++) {
        if (op.dweight) bounds.dweight[c] += sum_error * std::abs(op.dweight[c]);
        if (op.dbias) bounds.dbias[c] += sum_error * std::abs(op.dbias[c]);
    }
    return bounds;
}

template <class T>
void test_norm_backward(const Shape& s, bool accumulate_dinp, bool accumulate, const Parts& parts = {}) {
    INFO(describe(s) << ", " << describe(parts) << ", accumulate_dinp " << accumulate_dinp << ", accumulate "
                     << accumulate);
    const int rows = s.rows, cols = s.cols;
    size_t count = size_t(rows) * cols;
    NormArrays<T> forward(s, parts);
    Stored<T> inp("inp", Role::input, random_rows(rows, cols, 3), s.shift);
    ref::residual_norm_forward(forward.norm_op(OnHost(), inp));
    Array<float> mean("mean", Role::input, forward.mean.host), rstd("rstd", Role::input, forward.rstd.host);
    Stored<T> dinp("dinp", Role::output, accumulate_dinp ? random_values(count, 5) : nans(count), s.shift);
    Array<float> dweight("dweight", Role::output, accumulate ? random_values(cols, 6) : nans(cols));
    Array<float> dbias("dbias", Role::output, accumulate ? random_values(cols, 7) : nans(cols));
    Stored<T> dout("dout", Role::input, random_values(count, 8), s.shift);
    auto op = [&]<class Side>(Side side) {
        return ops::NormBackward{.dinp = dinp.on(side),
                                 .dweight = parts.weight ? dweight.on(side) : nullptr,
                                 .dbias = parts.bias ? dbias.on(side) : nullptr,
                                 .scratch = nullptr,
                                 .dout = dout.on(side),
                                 .inp = inp.on(side),
                                 .weight = parts.weight ? forward.weight.on(side) : nullptr,
                                 .mean = parts.mean ? mean.on(side) : nullptr,
                                 .rstd = rstd.on(side),
                                 .rows = rows,
                                 .cols = cols,
                                 .accumulate_dinp = accumulate_dinp,
                                 .accumulate = accumulate};
    };
    NormBackwardBounds bounds = norm_backward_bounds(op(OnHost()));
    auto device_op = op(OnDevice<T>());
    auto scratch = scratch_of(ops::norm_backward_scratch_bytes(device_op));
    device_op.scratch = scratch.on(OnDevice<T>());
    ops::norm_backward(device_op, Stream());
    ref::norm_backward(op(OnHost()));
    check_close(dinp, [&](size_t i) {
        return bounds.dinp[i] + kRoundoff * std::abs(dinp.host[i]) + stored_error<T>(dinp.host[i]);
    });
    if (parts.weight)
        check_close(dweight, [&](size_t c) { return bounds.dweight[c] + stored_error_fp32(dweight.host[c]); });
    if (parts.bias) check_close(dbias, [&](size_t c) { return bounds.dbias[c] + stored_error_fp32(dbias.host[c]); });
    scratch.fetch();
}

}  // namespace

TEMPLATE_TEST_CASE("norm_backward", "[ops]", float, bf16, fp16) {
    auto test = [](const Shape& s, bool accumulate_dinp, bool accumulate, const Parts& parts = {}) {
        test_norm_backward<TestType>(s, accumulate_dinp, accumulate, parts);
    };
    const int wide = sizeof(TestType) == 4 ? 3080 : 6152;  // one pack more than a block's registers hold
    // A GPU adds 32 sums of groups with a block of 1024 threads: wide rows have few combinations of options.
    for (const Shape& s : small_shapes())
        for (bool accumulates : {false, true})
            if (s.cols < 768 || accumulates == (s.rows > 1)) test(s, accumulates, accumulates);
    test({37, 132}, false, true);
    for (const Shape& s : large_shapes())
        if (s.cols < wide) test(s, true, false);
    for (const Parts& parts : kOtherParts) {
        const bool few_sums = !parts.bias && parts.mean + parts.weight < 2;
        for (const Shape& s : kShapesOfParts)
            if (s.cols < 1024 || few_sums) test(s, s.rows % 2 == 0, s.rows > 2, parts);
        if (sizeof(TestType) == 4 || few_sums) test({2, wide, parts.mean}, false, true, parts);
    }
    test({2, wide}, true, true);
    test({8200, 8}, true, true);
}

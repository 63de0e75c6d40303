// adam_direction and orthonormalize_rows against ref::, and scaled_add's condition.
#include <numeric>

#include "test/reference/update_rules.h"
#include "test/support/bounded.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

const OnDevice<float> kDevice;

struct Adam {
    size_t count;
    Array<float> out, v, m, grad;
    Array<ops::GradNorm> grad_norm;

    explicit Adam(size_t elements, int shift = 0, int non_finite_tensor = -1)
        : count(elements),
          out("out", Role::output, random_values(count, 1), shift),
          v("v", Role::output, squares(random_values(count, 2)), shift),
          m("m", Role::input, random_values(count, 3)),
          grad("grad", Role::input, some_zeros(random_values(count, 4, 10))),
          grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = 1, .scale = 1, .non_finite_tensor = non_finite_tensor, .reserved = 0}}) {}
    static std::vector<double> squares(std::vector<double> values) {
        for (double& value : values) value *= 1e-2 * value;
        return values;
    }
    static std::vector<double> some_zeros(std::vector<double> values) {
        for (size_t i = 0; i < values.size(); i += 7) values[i] = 0;
        return values;
    }
    template <class Side> ops::AdamDirection on(Side side) {
        ops::UpdateScalars scalars{};
        scalars.beta2 = 0.9f, scalars.one_minus_beta2 = 0.1f, scalars.eps = 1e-3f;
        scalars.bias_correction1 = 0.75f, scalars.root_bias_correction2 = 0.625f;
        return {.out = out.on(side),
                .v = v.on(side),
                .m = m.on(side),
                .grad = grad.on(side),
                .grad_norm = grad_norm.on(side),
                .count = count,
                .scalars = scalars};
    }
};

}  // namespace

TEST_CASE("adam_direction", "[ops]") {
    for (const size_t count : {1, 37, 1000, 40'003}) {
        INFO("count " << count);
        Adam arrays(count, count == 37);
        const ops::AdamDirection op = arrays.on(OnHost());
        std::vector<double> v_error(count), error(count);
        for (size_t i = 0; i < count; i++) {
            Bounded v(op.v[i]);
            const Bounded out = ref::adam_element(op.scalars, Bounded(op.m[i]), Bounded(op.grad[i]), v);
            v_error[i] = v.error + stored_error_fp32(v.value), error[i] = out.error + stored_error_fp32(out.value);
        }
        ops::adam_direction(arrays.on(kDevice), Stream());
        ref::adam_direction(op);
        check_close(arrays.v, [&](size_t i) { return v_error[i]; });
        check_close(arrays.out, [&](size_t i) { return error[i]; });
    }
}

TEST_CASE("adam_direction in place, and with a gradient that is not finite", "[ops]") {
    Adam expected(3001), in_place(3001), untouched(3001, 0, 2);
    ops::adam_direction(expected.on(kDevice), Stream());
    Array<float> values("in place", Role::output, in_place.grad.host);
    ops::AdamDirection op = in_place.on(kDevice);
    op.out = values.on(kDevice), op.grad = values.on(kDevice);
    ops::adam_direction(op, Stream());
    check_same_bits(values, expected.out.fetch());
    const std::vector<float> out = untouched.out.fetch(), v = untouched.v.fetch();
    ops::adam_direction(untouched.on(kDevice), Stream());
    check_same_bits(untouched.out, out);
    check_same_bits(untouched.v, v);
}

namespace {

using Row = std::vector<double>;

double dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// x without its components along rows that are orthonormal up to rounding.
Row rest_of(Row x, const std::vector<Row>& rows) {
    for (int pass = 0; pass < 2; pass++)
        for (const Row& row : rows) {
            const double component = dot(x, row);
            for (size_t c = 0; c < x.size(); c++) x[c] -= component * row[c];
        }
    return x;
}

struct Panel {
    int rows, cols;
    float tolerance = 1e-3f;
    Array<float> inp, fallback, out;

    Panel(int row_count, int col_count, const std::vector<double>& values, int shift = 0)
        : rows(row_count),
          cols(col_count),
          inp("inp", Role::input, values, shift),
          fallback("fallback", Role::input, random_values(values.size(), 2), shift),
          out("out", Role::output, nans(values.size()), shift) {
        ops::orthonormalize_rows(on(kDevice), Stream());
    }
    template <class Side> ops::OrthonormalizeRows on(Side side) {
        return {.out = out.on(side),
                .inp = inp.on(side),
                .fallback = fallback.on(side),
                .rows = rows,
                .cols = cols,
                .tolerance = tolerance};
    }
    std::vector<Row> rows_of(const std::vector<float>& values) const {
        std::vector<Row> all;
        for (int r = 0; r < rows; r++) all.emplace_back(values.begin() + r * cols, values.begin() + (r + 1) * cols);
        return all;
    }

    // A row of inp or, if `replaced`, of fallback is the sum of its components along the rows of out up to its own, the
    // last one positive. The rest is rounded to float three times: by two subtractions and the division. Before the
    // second subtraction, its norm is at most |row|; later it is at most |rest|.
    void check(const std::vector<bool>& replaced) const {
        const std::vector<Row> q = rows_of(out.fetch()), x = rows_of(inp.host), other = rows_of(fallback.host);
        std::vector<Row> before;
        double orthogonality = 0, difference = 0, smallest = 1;
        for (size_t r = 0; r < q.size(); r++) {
            const Row& source = replaced[r] ? other[r] : x[r];
            const double norm = std::sqrt(dot(source, source)), along = dot(source, q[r]);
            for (size_t s = 0; s <= r; s++)
                orthogonality = std::max(orthogonality, std::abs(dot(q[r], q[s]) - double(r == s)));
            before.push_back(q[r]);
            const Row rest = rest_of(source, before);
            difference = std::max(difference, std::sqrt(dot(rest, rest)) / norm);
            smallest = std::min(smallest, along / norm);
        }
        for (const Row& row : q) CHECK(std::isfinite(dot(row, row)));  // std::max ignores NaN
        CHECK(orthogonality < 3 * kRoundoff);
        CHECK(difference < 3 * kRoundoff);
        CHECK(smallest > 0);
    }
};

}  // namespace

TEST_CASE("orthonormalize_rows", "[ops]") {
    for (const auto& [rows, cols] : {std::pair(1, 1), {3, 8}, {32, 32}, {32, 39}, {17, 41}, {32, 2051}}) {
        INFO(rows << " rows of " << cols);
        Panel panel(rows, cols, random_values(size_t(rows * cols), 1), cols == 41);
        panel.check(std::vector<bool>(size_t(rows)));
    }
}

// With few rows the errors of earlier rows cannot grow. A row's error is at most |row| / |rest| times the sum of three
// roundings and twice the earlier errors, because a component and a row differ.
TEST_CASE("orthonormalize_rows: three rows", "[ops]") {
    Panel panel(3, 57, random_values(3 * 57, 1));
    const std::vector<Row> x = panel.rows_of(panel.inp.host);
    ref::orthonormalize_rows(panel.on(OnHost()));
    const std::vector<Row> q = panel.rows_of(panel.out.host);
    double errors[3] = {}, sum = 0;
    for (size_t r = 0; r < 3; r++) {
        const double amplification = std::sqrt(dot(x[r], x[r])) / dot(x[r], q[r]);
        errors[r] = (3 * kRoundoff + 2 * sum) * amplification;
        sum += errors[r];
    }
    check_close(panel.out, [&](size_t i) { return errors[i / 57] + stored_error_fp32(panel.out.host[i]); });
}

TEST_CASE("orthonormalize_rows: other rows replace dependent ones", "[ops]") {
    const int rows = 12, cols = 70;
    std::vector<double> values = random_values(size_t(rows * cols), 1);
    std::vector<bool> replaced(size_t(rows), false);
    for (size_t c = 0; c < cols; c++) {
        values[c] = values[3 * cols + c] = 0;
        values[5 * cols + c] = 2 * values[2 * cols + c];                            // dependent
        values[6 * cols + c] = values[2 * cols + c] + 1e-5 * values[6 * cols + c];  // rest below the tolerance
        values[7 * cols + c] = values[2 * cols + c] + 1e-2 * values[7 * cols + c];  // rest above it
        values[9 * cols + c] = NAN;
    }
    for (const size_t row : {0, 3, 5, 6, 9}) replaced[row] = true;
    Panel(rows, cols, values).check(replaced);
}

TEST_CASE("orthonormalize_rows: a row of zeros without a replacement stays 0", "[ops]") {
    Panel panel(4, 16, random_values(4 * 16, 1));
    std::vector<float> zeros = panel.inp.fetch();
    std::fill(zeros.begin() + 16, zeros.begin() + 32, 0.0f);
    Array<float> inp("inp", Role::input, zeros);
    ops::OrthonormalizeRows op = panel.on(kDevice);
    op.inp = op.fallback = inp.on(kDevice);
    ops::orthonormalize_rows(op, Stream());
    const std::vector<Row> q = panel.rows_of(panel.out.fetch());
    for (size_t r = 0; r < 4; r++)
        for (size_t s = 0; s <= r; s++) CHECK(std::abs(dot(q[r], q[s]) - double(r == s && r != 1)) < 3 * kRoundoff);
}

TEST_CASE("orthonormalize_rows: the same bits at every address", "[ops]") {
    const std::vector<double> values = random_values(9 * 77, 1);
    const Panel expected(9, 77, values), shifted(9, 77, values, 1);
    check_same_bits(shifted.out, expected.out.fetch());
}

TEST_CASE("scaled_add does nothing when a gradient is not finite", "[ops]") {
    for (const int tensor : {-1, 0, 3}) {
        Array<ops::GradNorm> grad_norm(
            "grad_norm", Role::input,
            std::vector<ops::GradNorm>{{.norm = 1, .scale = 1, .non_finite_tensor = tensor, .reserved = 0}});
        Array<float> out("out", Role::output, random_values(3001, 1)), a("a", Role::input, random_values(3001, 2));
        const ops::ScaledAdd op{out.on(kDevice), a.on(kDevice), a.on(kDevice), 3001, 2, 1, grad_norm.on(kDevice)};
        const std::vector<float> before = out.fetch();
        ops::scaled_add(op, Stream());
        CHECK((out.fetch() == before) == (tensor >= 0));
    }
}

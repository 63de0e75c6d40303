// normal_fill, fill, add, cast and cast_columns against ref::.
#include "test/reference/tree_sum.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

// Computed in double, so only the rounding to float can differ.
TEST_CASE("normal_fill", "[ops]") {
    for (size_t count : {1, 3, 4, 1001, 5003})
        for (uint32_t subsequence : {0u, 7u, 0xffffffffu}) {
            const size_t first = subsequence == 7 ? 4 * count : 0;
            INFO("count " << count << ", subsequence " << subsequence << ", first " << first);
            Array<float> out("out", Role::output, nans(count));
            auto op = [&](auto side) {
                return ops::NormalFill{.out = out.on(side),
                                       .count = count,
                                       .seed = 0x123456789abcdefull,
                                       .subsequence = subsequence,
                                       .deviation = 0.02f,
                                       .first = first};
            };
            ops::normal_fill(op(OnDevice<float>()), Stream());
            ref::normal_fill(op(OnHost()));
            check_close(out, [&](size_t i) { return stored_error_fp32(out.host[i]); });
        }
}

// Rows and columns of a matrix, starting in the middle of a row and of a call of philox(), have the bits of the whole.
TEST_CASE("normal_fill of parts of a matrix", "[ops]") {
    const size_t rows = 57, cols = 1003, offset = 12;  // the matrix starts at number 12
    auto filled = [](size_t count, size_t first, size_t skipped, size_t part_cols, size_t stride) {
        Array<float> out("out", Role::output, nans(count));
        const ops::NormalFill op{.out = out.on(OnDevice<float>()),
                                 .count = count,
                                 .seed = 5,
                                 .subsequence = 2,
                                 .deviation = 0.02f,
                                 .first = first,
                                 .skipped = skipped,
                                 .cols = part_cols,
                                 .stride = stride};
        ops::normal_fill(op, Stream());
        ops::NormalFill on_host = op;
        on_host.out = out.on(OnHost());
        ref::normal_fill(on_host);
        check_close(out, [&](size_t i) { return stored_error_fp32(out.host[i]); });
        return out.fetch();
    };
    const std::vector<float> whole = filled(rows * cols, offset, 0, size_t(1) << 62, 0);
    struct Part {
        size_t first_row, rows, first_col, cols, skipped;
    };
    for (const Part& p : {Part{0, 57, 0, 1003, 0}, Part{7, 20, 0, 1003, 0}, Part{7, 20, 0, 1003, 501},
                          Part{0, 57, 0, 4, 0}, Part{0, 57, 1, 1, 0}, Part{3, 50, 501, 502, 0},
                          Part{3, 50, 250, 251, 130}, Part{0, 5, 999, 4, 2}, Part{2, 9, 3, 7, 40}}) {
        INFO("rows " << p.first_row << " + " << p.rows << ", columns " << p.first_col << " + " << p.cols << ", skipped "
                     << p.skipped);
        const size_t count = p.rows * p.cols - p.skipped;
        const std::vector<float> part =
            filled(count, offset + p.first_row * cols + p.first_col, p.skipped, p.cols, cols);
        size_t different = 0;
        for (size_t j = 0; j < count; j++) {
            const size_t row = p.first_row + (p.skipped + j) / p.cols, col = p.first_col + (p.skipped + j) % p.cols;
            different += std::bit_cast<uint32_t>(part[j]) != std::bit_cast<uint32_t>(whole[row * cols + col]);
        }
        CHECK(different == 0);
    }
    // A range of numbers, as of a chunk of a tensor.
    const std::vector<float> range = filled(1000, offset + 3, 0, size_t(1) << 62, 0);
    CHECK(range == std::vector<float>(whole.begin() + 3, whole.begin() + 1003));
    const std::vector<float> skipped = filled(1000, offset, 77, size_t(1) << 62, 0);
    CHECK(skipped == std::vector<float>(whole.begin() + 77, whole.begin() + 1077));
}

// A run's initial weights are bit for bit the same on every device: a hash of 100,000 numbers computed on one CPU.
TEST_CASE("normal_fill: the same bits everywhere", "[ops]") {
    const size_t count = 100000;
    Array<float> out("out", Role::output, nans(count));
    ops::normal_fill({.out = out.on(OnDevice<float>()),
                      .count = count,
                      .seed = 42,
                      .subsequence = 3,
                      .deviation = 0.02f,
                      .first = 0},
                     Stream());
    uint64_t sum = 0;
    for (float value : out.fetch()) sum = sum * 6364136223846793005u + std::bit_cast<uint32_t>(value);
    CHECK(sum == 0x2cbe64f4e387397d);
}

// The exact sum is rounded once. A sum in FP32 has the same bits: FP32 has more than twice the digits of the 16-bit
// types, so that two roundings equal one (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30, 1995).
// Aligned and unaligned, midpoints between neighbors, sums that overflow, and infinities.
TEMPLATE_TEST_CASE("add", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (size_t count : {1, 37, 1000, 5003}) {
        INFO("count " << count);
        std::vector<double> left = random_values(count, 1, 10), right = random_values(count, 2, 10);
        if (count > 7) {
            left[1] = right[1] = std::is_same_v<T, fp16> ? 6e4 : 3e38, left[2] = INFINITY, right[3] = -INFINITY;
            left[4] = 1, right[4] = unit_roundoff<T>;
            left[5] = 1 + 2 * unit_roundoff<T>, right[5] = unit_roundoff<T>;
            left[6] = right[6] = 3 * 0x1p-24;  // of fp16 subnormal
        }
        const int shift = count % 2 ? 1 : 0;
        Stored<T> out("out", Role::output, left, shift), inp("inp", Role::input, right, shift);
        std::vector<T> expected = out.fetch();
        const std::vector<T> term = inp.fetch();
        ref::add({.out = expected.data(), .inp = term.data(), .count = count});

        Stored<T> residual("residual", Role::output, nans(count), shift), norm("norm", Role::output, nans(count));
        Array<float> rstd("rstd", Role::output, nans(1));
        OnDevice<T> device;
        ops::residual_norm_forward({.residual = residual.on(device),
                                    .out = norm.on(device),
                                    .mean = nullptr,
                                    .rstd = rstd.on(device),
                                    .inp = out.on(device),
                                    .branch = inp.on(device),
                                    .weight = nullptr,
                                    .bias = nullptr,
                                    .rows = 1,
                                    .cols = int(count),
                                    .eps = 1e-5f},
                                   Stream());
        check_same_bits(residual, expected);
        ops::add({.out = out.on(device), .inp = inp.on(device), .count = count}, Stream());
        check_same_bits(out, expected);
    }
}

namespace {

template <class Out, class In> void check_sum_of_terms(int n, size_t count) {
    INFO(name_of(dtype_of<In>) << " in " << name_of(dtype_of<Out>) << ", " << n << " terms of " << count);
    const int shift = count % 2 ? 1 : 0;
    std::vector<double> values;
    for (int term = 0; term < n; term++)
        for (size_t i = 0; i < count; i++) values.push_back(ref::tree_term(term, i, dtype_of<In>));
    Stored<In> terms("terms", Role::input, values, shift);
    Stored<Out> out("out", Role::output, nans(count), shift);
    const std::vector<In> stored = terms.fetch();
    std::vector<Out> expected(count);
    ref::sum_terms({.out = expected.data(), .terms = stored.data(), .n = n, .count = count});
    ops::sum_terms({.out = out.on(OnDevice<Out>()), .terms = terms.on(OnDevice<In>()), .n = n, .count = count},
                   Stream());
    check_same_bits(out, expected);
}

}  // namespace

TEMPLATE_TEST_CASE("sum_terms adds in the order of a tree and rounds once", "[ops]", float, bf16, fp16) {
    for (const int n : {1, 2, 3, 4, 8})
        for (const size_t count : {1, 37, 1000, 5003}) {
            check_sum_of_terms<TestType, TestType>(n, count);
            check_sum_of_terms<TestType, float>(n, count);
            check_sum_of_terms<float, TestType>(n, count);
        }
}

TEST_CASE("fill", "[ops]") {
    for (size_t count : {1, 37, 1000, 5003})
        for (float value : {0.0f, -1.5f, INFINITY}) {
            INFO("count " << count << ", value " << value);
            Array<float> out("out", Role::output, nans(count), count % 2 ? 1 : 0);
            auto op = [&](auto side) { return ops::Fill{.out = out.on(side), .count = count, .value = value}; };
            ops::fill(op(OnDevice<float>()), Stream());
            ref::fill(op(OnHost()));
            check_same_bits(out, out.host);
        }
}

namespace {

// Midpoints between neighbors of bf16 and fp16, edges of their ranges, subnormals, and ordinary numbers.
std::vector<float> numbers_to_cast(size_t count) {
    std::vector<float> numbers = {0.0f,         -0.0f,     1.0f,         1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1p-11f,
                                  1 + 0x3p-11f, 65504.0f,  65519.996f,   65520.0f,    -65520.0f,   3.4e38f,
                                  INFINITY,     -INFINITY, 0x1p-14f,     0x1.8p-24f,  0x1p-25f,    0x1.000002p-25f,
                                  0x1p-26f,     0x1p-126f, -0x1.ffp-15f, 1e-30f};
    std::vector<double> random = random_values(count, 1, 10);
    numbers.insert(numbers.end(), random.begin(), random.end());
    numbers.resize(count);
    return numbers;
}

}  // namespace

// The CPU's or GPU's built-in rounding must give the same bits as numeric.h.
TEMPLATE_TEST_CASE("cast", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (auto [count, shift] : {std::pair<size_t, int>{1, 0}, {37, 1}, {1000, 0}, {5003, 0}}) {
        INFO("count " << count << ", shift " << shift);
        Array<float> inp("inp", Role::input, numbers_to_cast(count));
        Stored<T> out("out", Role::output, nans(count), shift);
        std::vector<T> expected(count);
        OnDevice<T> device;
        ops::cast(ops::Cast{.out = out.on(device), .inp = inp.on(device), .count = count}, Stream());
        ref::cast(ops::Cast{.out = expected.data(), .inp = inp.host.data(), .count = count});
        check_same_bits(out, expected);
    }
}

// Packs keys and values as they are, and casts FP32 gradients. The other columns must stay. Aligned and unaligned rows,
// rows shorter than a pack, and more rows than a block has.
TEMPLATE_TEST_CASE("cast_columns", "[ops]", float, bf16, fp16) {
    using T = TestType;
    struct Case {
        size_t rows, cols, out_step, inp_step, out_first, inp_first;
    };
    auto check = []<class In>(const Case& c, const std::vector<In>& values) {
        INFO("rows " << c.rows << ", cols " << c.cols << ", steps " << c.out_step << " and " << c.inp_step);
        Array<In> inp("inp", Role::input, values);
        Stored<T> out("out", Role::output, std::vector<double>(c.rows * c.out_step, -7));
        std::vector<T> expected = out.fetch();
        auto op = [&](View to, ConstView from) {
            return ops::CastColumns{.out = to.from(c.out_first),
                                    .inp = from.from(c.inp_first),
                                    .rows = c.rows,
                                    .cols = c.cols,
                                    .out_step = c.out_step,
                                    .inp_step = c.inp_step};
        };
        ops::cast_columns(op(out.on(OnDevice<T>()), inp.on(OnDevice<In>())), Stream());
        ref::cast_columns(op(expected.data(), inp.host.data()));
        check_same_bits(out, expected);
    };
    for (const Case& c : {Case{1, 1, 1, 1, 0, 0}, Case{3, 37, 40, 64, 0, 8}, Case{29, 36, 48, 52, 8, 12},
                          Case{700, 5, 7, 9, 2, 3}, Case{6, 64, 64, 192, 0, 128}}) {
        const std::vector<float> values = numbers_to_cast(c.rows * c.inp_step);
        check(c, values);
        std::vector<T> rounded;
        for (float value : values) rounded.push_back(from_float<T>(value));
        check(c, rounded);
    }
}

TEMPLATE_TEST_CASE("cast: NaN stays NaN", "[ops]", float, bf16, fp16) {
    using T = TestType;
    // Cutting off the low bits loses the smallest payload: a careless cast would turn this NaN into infinity.
    Array<float> inp("inp", Role::input, std::vector<float>{NAN, -NAN, std::bit_cast<float>(0x7f800001u)});
    Stored<T> out("out", Role::output, std::vector<double>(3));
    OnDevice<T> device;
    ops::cast(ops::Cast{.out = out.on(device), .inp = inp.on(device), .count = 3}, Stream());
    for (T value : out.fetch()) CHECK(std::isnan(to_float(value)));
}

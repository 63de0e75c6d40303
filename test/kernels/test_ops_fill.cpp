// normal_fill, fill, add and cast against ref::.
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

// One rounding, so the same bits. Aligned and unaligned, sums that overflow, and NaN.
TEST_CASE("add", "[ops]") {
    for (size_t count : {1, 37, 1000, 5003}) {
        INFO("count " << count);
        const std::vector<double> random = random_values(2 * count, 1, 10);
        std::vector<float> left(random.begin(), random.begin() + long(count)),
            right(random.begin() + long(count), random.end());
        if (count > 4) left[1] = right[1] = 3e38f, left[2] = INFINITY, right[3] = -INFINITY;
        Array<float> out("out", Role::output, left, count % 2 ? 1 : 0);
        Array<float> inp("inp", Role::input, right, count % 2 ? 1 : 0);
        auto op = [&](auto side) { return ops::Add{.out = out.on(side), .inp = inp.on(side), .count = count}; };
        ops::add(op(OnDevice<float>()), Stream());
        ref::add(op(OnHost()));
        check_same_bits(out, out.host);
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

TEMPLATE_TEST_CASE("cast: NaN stays NaN", "[ops]", float, bf16, fp16) {
    using T = TestType;
    // Cutting off the low bits loses the smallest payload: a careless cast would turn this NaN into infinity.
    Array<float> inp("inp", Role::input, std::vector<float>{NAN, -NAN, std::bit_cast<float>(0x7f800001u)});
    Stored<T> out("out", Role::output, std::vector<double>(3));
    OnDevice<T> device;
    ops::cast(ops::Cast{.out = out.on(device), .inp = inp.on(device), .count = 3}, Stream());
    for (T value : out.fetch()) CHECK(std::isnan(to_float(value)));
}

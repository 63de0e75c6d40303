// Numbers of 8 bits, quantize(), and GEMMs of its results.
#include <cfloat>

#include "kernels/shared/fp8_scale.h"
#include "test/support/device_array.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

template <class T> double nearest(double x) {
    const ref::Fp8Format format = ref::fp8_format(dtype_of<T>);
    return std::copysign(ref::fp8_magnitude(format, ref::nearest_fp8(format, x) % 128), x);
}

template <class T> bool is_nan(T x) { return std::isnan(to_float(x)); }

}  // namespace

TEMPLATE_TEST_CASE("every number of 8 bits", "[numeric]", e4m3, e5m2) {
    using T = TestType;
    const ref::Fp8Format f = ref::fp8_format(dtype_of<T>);
    for (int bits = 0; bits < 256; bits++) {
        INFO(bits);
        const float x = to_float(T{uint8_t(bits)});
        const double magnitude = ref::fp8_magnitude(f, bits % 128);
        if (magnitude > f.largest) {
            CHECK((std::is_same_v<T, e5m2> && bits % 128 == 0x7c ? std::isinf(x) : std::isnan(x)));
            continue;
        }
        CHECK(std::abs(x) == magnitude);
        CHECK(std::signbit(x) == (bits >= 128));
        CHECK(from_float<T>(x).bits == bits);
    }
}

TEMPLATE_TEST_CASE("rounding to 8 bits", "[numeric]", e4m3, e5m2) {
    using T = TestType;
    const ref::Fp8Format f = ref::fp8_format(dtype_of<T>);
    const auto check = [&](float x) {
        INFO(x);
        CHECK(double(to_float(from_float<T>(x))) == nearest<T>(x));
    };
    for (int bits = 0; ref::fp8_magnitude(f, bits + 1) <= f.largest && bits < 127; bits++) {
        const auto a = float(ref::fp8_magnitude(f, bits)), b = float(ref::fp8_magnitude(f, bits + 1)),
                   half = a + (b - a) / 2;
        for (const float sign : {-1.0f, 1.0f})
            for (const float x : {half, std::nextafter(half, 0.0f), std::nextafter(half, INFINITY)}) check(sign * x);
    }
    for (const double x : random_values(1000, 1, 2 * f.largest)) check(float(x));
    for (const float x : {0x1p-149f, 1e-30f, float(f.largest) * 1.1f, FLT_MAX, INFINITY}) check(x), check(-x);
    CHECK(is_nan(from_float<T>(NAN)));
    CHECK(is_nan(from_float<T>(-NAN)));
}

TEMPLATE_TEST_CASE("the scale of an array of 8 bits", "[numeric]", e4m3, e5m2) {
    using T = TestType;
    const auto largest = float(ref::fp8_format(dtype_of<T>).largest);
    const auto check = [&](float amax) {
        INFO(amax << " of " << largest);
        const float scale = fp8_scale<T>(amax);
        int exponent = 0;
        CHECK(std::frexp(scale, &exponent) == 0.5f);
        CHECK(amax / scale <= largest);
        CHECK((scale == 0x1p-126f || amax / (scale / 2) > largest));
        CHECK(inverse_of_scale(scale) == 1 / scale);
    };
    for (const float amax :
         {largest, largest / 2, largest * 1.125f, 1.0f, 1.75f, 1.7500001f, FLT_MAX, FLT_MIN, 0x1p-149f, 1e-40f})
        check(amax);
    for (const double amax : random_values(100, 1, 1, 1.001)) check(float(amax));
    CHECK(fp8_scale<T>(0) == 1);
    CHECK(std::isnan(fp8_scale<T>(INFINITY)));
    CHECK(std::isnan(fp8_scale<T>(NAN)));
    CHECK(std::isnan(inverse_of_scale(fp8_scale<T>(NAN))));
}

namespace {

// A matrix in 16 bits and in 8.
template <class T, class Out> struct Quantized {
    int rows, cols;
    Stored<T> wide;
    Array<Out> by_rows, by_columns;
    Array<float> amax, scale;
    Array<double> saturated;

    Quantized(int n_rows, int n_cols, const std::vector<double>& values, float given_amax = NAN)
        : rows(n_rows),
          cols(n_cols),
          wide("wide", Role::input, values),
          by_rows("rows", Role::output, std::vector<Out>(values.size(), Out{0x55})),
          by_columns("columns", Role::output, std::vector<Out>(values.size(), Out{0x55})),
          amax("amax", Role::output, std::vector<float>{given_amax}),
          scale("scale", Role::output, std::vector<float>{NAN}),
          saturated("saturated", Role::output, std::vector<double>{3}) {}

    void quantize(bool with_rows = true, bool with_columns = true) {
        const OnDevice<T> device;
        ops::abs_max({.out = amax.on(device), .inp = wide.on(device), .count = wide.host.size()}, Stream());
        convert(with_rows, with_columns);
    }
    void convert(bool with_rows = true, bool with_columns = true) {
        const OnDevice<T> device;
        ops::quantize({.out = with_rows ? View(by_rows.on(device)) : nullptr,
                       .transposed = with_columns ? View(by_columns.on(device)) : nullptr,
                       .scale = scale.on(device),
                       .inp = wide.on(device),
                       .amax = amax.on(device),
                       .rows = rows,
                       .cols = cols,
                       .saturated = saturated.on(device)},
                      Stream());
    }
    void convert_on_host() {
        const OnHost host;
        ref::quantize({.out = by_rows.on(host),
                       .transposed = by_columns.on(host),
                       .scale = scale.on(host),
                       .inp = wide.on(host),
                       .amax = amax.on(host),
                       .rows = rows,
                       .cols = cols,
                       .saturated = saturated.on(host)});
    }
    ConstView view(Array<Out>& form) {
        const OnDevice<T> device;
        return {form.on(device), dtype_of<Out>, scale.on(device)};
    }
    // The numbers that the copy by rows stands for.
    std::vector<double> numbers() const {
        std::vector<double> values;
        const double factor = scale.fetch()[0];
        for (const Out x : by_rows.fetch()) values.push_back(to_float(x) * factor);
        return values;
    }
};

template <class T, class Out> void test_quantize(int rows, int cols, double width) {
    INFO(rows << " x " << cols << ", numbers below " << width);
    Quantized<T, Out> q(rows, cols, random_values(size_t(rows) * size_t(cols), 1, width));
    q.quantize();
    const OnHost host;
    ref::abs_max({.out = q.amax.on(host), .inp = q.wide.on(host), .count = q.wide.host.size()});
    q.convert_on_host();
    CHECK(q.saturated.fetch()[0] == 3);
    CHECK(q.amax.fetch() == q.amax.host);
    CHECK(q.scale.fetch() == q.scale.host);
    const auto same = [](const std::vector<Out>& a, const std::vector<Out>& b) {
        return std::ranges::equal(a, b, {}, &Out::bits, &Out::bits);
    };
    const std::vector<Out> by_rows = q.by_rows.fetch(), by_columns = q.by_columns.fetch();
    CHECK(same(by_rows, q.by_rows.host));
    CHECK(same(by_columns, q.by_columns.host));
    Quantized<T, Out> only_rows(rows, cols, q.wide.host), only_columns(rows, cols, q.wide.host);
    only_rows.quantize(true, false);
    only_columns.quantize(false, true);
    CHECK(same(only_rows.by_rows.fetch(), by_rows));
    CHECK(same(only_columns.by_columns.fetch(), by_columns));
    CHECK(only_rows.by_columns.fetch()[0].bits == 0x55);
    CHECK(only_columns.by_rows.fetch()[0].bits == 0x55);
}

}  // namespace

// Parts of a tile, whole tiles, several of them.
TEMPLATE_TEST_CASE("quantize", "[ops]", bf16, fp16) {
    for (const auto& [rows, cols] : {std::pair(16, 16), {48, 112}, {64, 128}, {80, 144}, {192, 16}, {16, 400}})
        for (const double width : {1.0, 300.0, 1e-3}) {
            test_quantize<TestType, e4m3>(rows, cols, width);
            test_quantize<TestType, e5m2>(rows, cols, width);
        }
    test_quantize<TestType, e4m3>(16, 16, 0);
}

TEST_CASE("quantize with numbers that are not finite", "[ops]") {
    for (const double special : {double(INFINITY), double(-INFINITY), double(NAN)}) {
        std::vector<double> values = random_values(1024, 1);
        values[777] = special;
        Quantized<bf16, e4m3> q(32, 32, values);
        q.quantize();
        CHECK(std::isnan(q.scale.fetch()[0]));
        CHECK((std::isnan(special) ? std::isnan(q.amax.fetch()[0]) : std::isinf(q.amax.fetch()[0])));
    }
}

// As after a kernel that gives too small an amax.
TEMPLATE_TEST_CASE("quantize counts numbers that saturate", "[ops]", e4m3, e5m2) {
    for (const auto& [rows, cols] : {std::pair(16, 16), {80, 144}}) {
        std::vector<double> values = random_values(size_t(rows) * size_t(cols), 1, 8);
        values[0] = 3.5, values[1] = -3.5;
        Quantized<bf16, TestType> q(rows, cols, values, 3.5f);
        q.convert();
        q.convert_on_host();
        CHECK(q.saturated.fetch() == q.saturated.host);
        CHECK(q.saturated.host[0] > 3 + rows * cols / 4);
        CHECK(q.saturated.host[0] < 3 + rows * cols);
        CHECK(std::ranges::equal(q.by_rows.fetch(), q.by_rows.host, {}, &TestType::bits, &TestType::bits));
    }
}

namespace {

struct GemmShape {
    int rows, n, k;
};
constexpr GemmShape kGemms[] = {{16, 16, 16}, {32, 48, 80}, {80, 144, 64}, {144, 16, 272}};

}  // namespace

TEST_CASE("matmul_forward with operands of 8 bits", "[ops]") {
    const OnDevice<bf16> device;
    for (const auto& [rows, n, k] : kGemms)
        for (const ActivationFunction activation :
             {ActivationFunction::none, ActivationFunction::gelu_new, ActivationFunction::relu2}) {
            INFO("rows " << rows << ", n " << n << ", k " << k << ", activation " << int(activation));
            const bool keeps = activation == ActivationFunction::gelu_new;
            const size_t count = size_t(rows) * size_t(n);
            Quantized<bf16, e4m3> inp(rows, k, random_values(size_t(rows) * size_t(k), 1, 3)),
                weight(n, k, random_values(size_t(n) * size_t(k), 2, 0.1));
            inp.quantize(), weight.quantize();
            Stored<bf16> out("out", Role::output, nans(count)), sum("sum", Role::output, nans(count)),
                bias("bias", Role::input, random_values(size_t(n), 3));
            ops::matmul_forward({.out = out.on(device),
                                 .pre_activation = keeps ? sum.on(device) : nullptr,
                                 .inp = inp.view(inp.by_rows),
                                 .weight = weight.view(weight.by_rows),
                                 .bias = bias.on(device),
                                 .rows = rows,
                                 .n = n,
                                 .k = k,
                                 .activation = activation},
                                Stream());
            std::vector<double> numbers = inp.numbers(), weights = weight.numbers(), size(count);
            ops::MatmulForward op{.out = out.host.data(),
                                  .pre_activation = keeps ? sum.host.data() : nullptr,
                                  .inp = numbers.data(),
                                  .weight = weights.data(),
                                  .bias = bias.host.data(),
                                  .rows = rows,
                                  .n = n,
                                  .k = k,
                                  .activation = activation};
            ref::matmul_forward(op);
            numbers = absolute(numbers), weights = absolute(weights);
            op.inp = numbers.data(), op.weight = weights.data();
            std::vector<double> bias_size = absolute(bias.host);
            op.out = size.data(), op.pre_activation = nullptr, op.bias = bias_size.data();
            op.activation = ActivationFunction::none;
            ref::matmul_forward(op);
            const auto error = [&](size_t i) { return summation_error(k + 1) * size[i]; };
            if (keeps) {
                check_close(sum, [&](size_t i) { return stored_error<bf16>(sum.host[i]) + error(i); });
                continue;  // test_ops_matmul.cpp compares the activation with activation_forward()
            }
            const double slope = activation == ActivationFunction::none ? 1 : 2;
            check_close(out, [&](size_t i) {
                return stored_error<bf16>(out.host[i]) + slope * (1 + std::sqrt(std::abs(out.host[i]))) * error(i);
            });
        }
}

TEMPLATE_TEST_CASE("matmul_backward_input with operands of 8 bits", "[ops]", e4m3, e5m2) {
    const OnDevice<bf16> device;
    for (const auto& [rows, n, k] : kGemms)
        for (const bool has_gelu : {false, true}) {
            INFO("rows " << rows << ", n " << n << ", k " << k << ", gelu " << has_gelu);
            const size_t count = size_t(rows) * size_t(k);
            Quantized<bf16, TestType> dout(rows, n, random_values(size_t(rows) * size_t(n), 1, 1e-4));
            Quantized<bf16, e4m3> weight(n, k, random_values(size_t(n) * size_t(k), 2, 0.1));
            dout.quantize(), weight.quantize();
            Stored<bf16> dinp("dinp", Role::output, nans(count)), kept("kept", Role::input, random_values(count, 3, 4));
            ops::matmul_backward_input(
                {.dinp = dinp.on(device),
                 .dout = dout.view(dout.by_rows),
                 .weight = weight.view(weight.by_columns),
                 .kept = has_gelu ? kept.on(device) : nullptr,
                 .rows = rows,
                 .n = n,
                 .k = k,
                 .activation = has_gelu ? ActivationFunction::gelu_new : ActivationFunction::none},
                Stream());
            std::vector<double> gradients = dout.numbers(), weights = weight.numbers(), size(count);
            ops::MatmulBackwardInput op{
                .dinp = dinp.host.data(),
                .dout = gradients.data(),
                .weight = weights.data(),
                .kept = has_gelu ? kept.host.data() : nullptr,
                .rows = rows,
                .n = n,
                .k = k,
                .activation = has_gelu ? ActivationFunction::gelu_new : ActivationFunction::none};
            ref::matmul_backward_input(op);
            gradients = absolute(gradients), weights = absolute(weights);
            op.dout = gradients.data(), op.weight = weights.data();
            op.dinp = size.data(), op.kept = nullptr, op.activation = ActivationFunction::none;
            ref::matmul_backward_input(op);
            check_close(dinp, [&](size_t i) {
                return stored_error<bf16>(dinp.host[i]) + 1.13 * (summation_error(n) + 40 * kFunctionError) * size[i];
            });
        }
}

TEMPLATE_TEST_CASE("matmul_backward_weight with operands of 8 bits", "[ops]", e4m3, e5m2) {
    const OnDevice<bf16> device;
    for (const auto& [rows, n, k] : kGemms)
        for (const bool accumulate : {false, true}) {
            INFO("rows " << rows << ", n " << n << ", k " << k << ", accumulate " << accumulate);
            const size_t count = size_t(n) * size_t(k);
            Quantized<bf16, TestType> dout(rows, n, random_values(size_t(rows) * size_t(n), 1, 1e-4));
            Quantized<bf16, e4m3> inp(rows, k, random_values(size_t(rows) * size_t(k), 2, 3));
            dout.quantize(), inp.quantize();
            Array<float> dweight("dweight", Role::output, random_values(count, 3, 1e-4)),
                dbias("dbias", Role::output, random_values(size_t(n), 4, 1e-4));
            ops::MatmulBackwardWeight on_device{.dweight = dweight.on(device),
                                                .dbias = dbias.on(device),
                                                .scratch = nullptr,
                                                .dout = dout.view(dout.by_columns),
                                                .inp = inp.view(inp.by_columns),
                                                .rows = rows,
                                                .n = n,
                                                .k = k,
                                                .accumulate = accumulate,
                                                .wide_dout = dout.wide.on(device)};
            auto scratch = scratch_of(ops::matmul_backward_weight_scratch_bytes(on_device));
            on_device.scratch = scratch.on(device);
            ops::matmul_backward_weight(on_device, Stream());
            std::vector<double> gradients = dout.numbers(), inputs = inp.numbers();
            std::vector<float> size = absolute(dweight.host), bias_size = absolute(dbias.host), unused(size_t(n), 0.0f);
            ops::MatmulBackwardWeight op{.dweight = dweight.host.data(),
                                         .dbias = nullptr,
                                         .scratch = nullptr,
                                         .dout = gradients.data(),
                                         .inp = inputs.data(),
                                         .rows = rows,
                                         .n = n,
                                         .k = k,
                                         .accumulate = accumulate};
            ref::matmul_backward_weight(op);
            // The bias gradient sums the gradients before they were quantized.
            for (int col = 0; col < n; col++) {
                double sum = accumulate ? dbias.host[size_t(col)] : 0, absolutes = std::abs(sum);
                for (int row = 0; row < rows; row++) {
                    const double x = dout.wide.host[size_t(row) * size_t(n) + size_t(col)];
                    sum += x, absolutes += std::abs(x);
                }
                dbias.host[size_t(col)] = float(sum), bias_size[size_t(col)] = float(absolutes);
            }
            gradients = absolute(gradients), inputs = absolute(inputs);
            op.dout = gradients.data(), op.inp = inputs.data();
            op.dweight = size.data();
            ref::matmul_backward_weight(op);
            const double error = summation_error(rows + 1);
            check_close(dweight, [&](size_t i) { return stored_error_fp32(dweight.host[i]) + error * size[i]; });
            check_close(dbias, [&](size_t i) { return stored_error_fp32(dbias.host[i]) + error * bias_size[i]; });
            scratch.fetch();
        }
}

TEST_CASE("GEMMs check operands of 8 bits", "[ops]") {
    const OnDevice<bf16> device;
    Quantized<bf16, e4m3> inp(32, 32, random_values(1024, 1)), weight(32, 32, random_values(1024, 2));
    Quantized<bf16, e5m2> gradient(32, 32, random_values(1024, 3));
    Stored<bf16> out("out", Role::output, nans(1024));
    Array<float> wide("wide", Role::output, nans(1024));
    const auto fails = [&](View to, ConstView a, ConstView b, int rows, const std::string& why) {
        expect_error(Exit::internal, {"matmul_forward", why}, [&] {
            ops::matmul_forward({.out = to,
                                 .pre_activation = nullptr,
                                 .inp = a,
                                 .weight = b,
                                 .bias = nullptr,
                                 .rows = rows,
                                 .n = 32,
                                 .k = 32},
                                Stream());
        });
    };
    const ConstView a = inp.view(inp.by_rows), b = weight.view(weight.by_rows), g = gradient.view(gradient.by_rows);
    fails(out.on(device), a, b, 24, "multiples of 16");
    fails(out.on(device), g, g, 32, "operands of type e5m2 and e5m2");
    fails(out.on(device), a, inp.wide.on(device), 32, "operands of type e4m3 and bf16");
    fails(wide.on(device), a, b, 32, "bf16 with operands of 8 bits");
}

// matmul_forward, matmul_backward_input, matmul_backward_weight and activation_forward against ref::.
#include "test/support/device_array.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int rows, n, k;
};
// One element, edges of tiles on every side, whole tiles, long sums.
constexpr Shape kShapes[] = {{1, 1, 1},     {1, 64, 7},     {37, 7, 64},    {37, 132, 1},
                             {130, 1, 132}, {130, 132, 64}, {64, 128, 128}, {37, 768, 132},
                             {1, 257, 768}, {130, 64, 768}, {130, 132, 132}};

std::string describe(const Shape& s) { return format("rows %d, n %d, k %d", s.rows, s.n, s.k); }

constexpr ActivationFunction kActivations[] = {ActivationFunction::none, ActivationFunction::gelu_new,
                                               ActivationFunction::silu, ActivationFunction::relu2};
constexpr bool keeps_sum(ActivationFunction f) {
    return f == ActivationFunction::gelu_new || f == ActivationFunction::silu;
}
std::string describe(ActivationFunction f) {
    return std::string("activation ") + (f == ActivationFunction::none ? "none" : name_of(f));
}

// gelu and gelu' as float functions of an exact x: a cubic polynomial a(x), a tanh (whose argument's error matters only
// for small arguments) and a few products. In gelu', |x a'(x)| <= |x| + |x|^3 / 9 multiplies the tanh's error. silu has
// an exp instead of the tanh, and in its derivative |x| multiplies the error. relu2 has no such function.
constexpr double kTanhError = kFunctionError + 8 * kRoundoff;
double activation_error(ActivationFunction f, double x) {
    return f == ActivationFunction::none    ? 0
           : f == ActivationFunction::relu2 ? 2 * kRoundoff * x * x
                                            : kTanhError * std::abs(x);
}
// Error of the derivative computed from what the product keeps.
double slope_error(ActivationFunction f, double kept) {
    switch (f) {
        case ActivationFunction::none: return 0;
        case ActivationFunction::gelu_new: return kTanhError * (1 + std::abs(kept) + std::abs(kept * kept * kept) / 9);
        case ActivationFunction::silu: return kTanhError * (1 + std::abs(kept));
        case ActivationFunction::relu2: return kFunctionError * 2 * std::sqrt(kept);
    }
    return 0;
}
// The largest derivative between x - error and x + error: |gelu'|, |gelu''|, |silu'| and |silu''| stay below 1.13.
double steepest(ActivationFunction f, double x, double error) {
    return f == ActivationFunction::none ? 1 : f == ActivationFunction::relu2 ? 2 * (std::abs(x) + error) : 1.13;
}

}  // namespace

template <class T> static void test_matmul_forward(const Shape& s, bool with_bias, ActivationFunction activation) {
    size_t count = size_t(s.rows) * s.n;
    Stored<T> out("out", Role::output, nans(count)), pre_activation("pre_activation", Role::output, nans(count));
    Stored<T> inp("inp", Role::input, random_values(size_t(s.rows) * s.k, 1));
    Stored<T> weight("weight", Role::input, random_values(size_t(s.n) * s.k, 2));
    Stored<T> bias("bias", Role::input, random_values(s.n, 3));
    auto op = [&]<class Side>(Side side) {
        return ops::MatmulForward{.out = out.on(side),
                                  .pre_activation = keeps_sum(activation) ? pre_activation.on(side) : nullptr,
                                  .inp = inp.on(side),
                                  .weight = weight.on(side),
                                  .bias = with_bias ? bias.on(side) : nullptr,
                                  .rows = s.rows,
                                  .n = s.n,
                                  .k = s.k,
                                  .activation = activation};
    };
    std::vector<double> sums(count), size(count), inp_size = absolute(inp.host), weight_size = absolute(weight.host),
                                                  bias_size = absolute(bias.host);
    auto sums_op = op(OnHost());
    sums_op.out = sums.data(), sums_op.pre_activation = nullptr, sums_op.activation = ActivationFunction::none;
    ref::matmul_forward(sums_op);
    auto size_op = sums_op;
    size_op.out = size.data(), size_op.inp = inp_size.data(), size_op.weight = weight_size.data();
    if (with_bias) size_op.bias = bias_size.data();
    ref::matmul_forward(size_op);
    ops::matmul_forward(op(OnDevice<T>()), Stream());
    ref::matmul_forward(op(OnHost()));
    auto sum_error = [&](size_t i) { return summation_error(s.k + 1) * size[i]; };
    // The activation's argument: the sum as stored, or the exact sum.
    auto before_error = [&](size_t i) {
        return sum_error(i) + (keeps_sum(activation) ? stored_error<T>(pre_activation.host[i]) : 0);
    };
    check_close(out, [&](size_t i) {
        return stored_error<T>(out.host[i]) + steepest(activation, sums[i], before_error(i)) * before_error(i) +
               activation_error(activation, sums[i]);
    });
    if (!keeps_sum(activation)) return;
    check_close(pre_activation, [&](size_t i) { return stored_error<T>(pre_activation.host[i]) + sum_error(i); });

    // activation_forward on the stored sum must give the bits of this epilogue.
    std::vector<T> epilogue = out.fetch();
    Stored<T> stored("stored pre_activation", Role::input, pre_activation.fetch());
    Stored<T> again("activation_forward's out", Role::output, nans(count));
    ops::activation_forward(
        ops::ActivationForward{
            .out = again.on(OnDevice<T>()), .inp = stored.on(OnDevice<T>()), .count = count, .activation = activation},
        Stream());
    check_same_bits(again, epilogue);
}

TEMPLATE_TEST_CASE("matmul_forward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes)
        for (bool with_bias : {false, true})
            for (ActivationFunction activation : kActivations) {
                INFO(describe(s) << ", bias " << with_bias << ", " << describe(activation));
                test_matmul_forward<TestType>(s, with_bias, activation);
            }
}

TEMPLATE_TEST_CASE("matmul_backward_input", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes)
        for (ActivationFunction activation : kActivations) {
            INFO(describe(s) << ", " << describe(activation));
            const bool is_activated = activation != ActivationFunction::none;
            size_t count = size_t(s.rows) * s.k;
            Stored<T> dinp("dinp", Role::output, nans(count));
            Stored<T> dout("dout", Role::input, random_values(size_t(s.rows) * s.n, 1));
            Stored<T> weight("weight", Role::input, random_values(size_t(s.n) * s.k, 2));
            std::vector<double> numbers = random_values(count, 3, 4);
            if (activation == ActivationFunction::relu2)  // an output: half of the elements are 0
                for (double& x : numbers) x = std::max(x, 0.0);
            Stored<T> kept("kept", Role::input, numbers);
            auto op = [&]<class Side>(Side side) {
                return ops::MatmulBackwardInput{.dinp = dinp.on(side),
                                                .dout = dout.on(side),
                                                .weight = weight.on(side),
                                                .kept = is_activated ? kept.on(side) : nullptr,
                                                .rows = s.rows,
                                                .n = s.n,
                                                .k = s.k,
                                                .activation = activation};
            };
            std::vector<double> size(count), dout_size = absolute(dout.host), weight_size = absolute(weight.host);
            ref::matmul_backward_input(ops::MatmulBackwardInput{.dinp = size.data(),
                                                                .dout = dout_size.data(),
                                                                .weight = weight_size.data(),
                                                                .kept = nullptr,
                                                                .rows = s.rows,
                                                                .n = s.n,
                                                                .k = s.k});
            ops::matmul_backward_input(op(OnDevice<T>()), Stream());
            ref::matmul_backward_input(op(OnHost()));
            const bool is_library = activation == ActivationFunction::gelu_new && !gpu_name().empty() && sizeof(T) == 2;
            const auto rounding = is_library ? gelu_gradient_stored_error<T> : stored_error<T>;
            check_close(dinp, [&](size_t i) {
                const double slope = !is_activated                             ? 1
                                     : activation == ActivationFunction::relu2 ? 2 * std::sqrt(kept.host[i])
                                                                               : 1.13;
                const double relative = summation_error(s.n) * slope + slope_error(activation, kept.host[i]);
                return rounding(dinp.host[i]) + size[i] * (relative + kRoundoff * slope * is_activated);
            });
        }
}

// Arrays that an activation requires, and arrays that it must not have.
TEST_CASE("matmul_forward and matmul_backward_input: arrays of the activation", "[ops]") {
    Stored<float> inp("inp", Role::input, std::vector<double>{1}),
        weight("weight", Role::input, std::vector<double>{2});
    Stored<float> out("out", Role::output, nans(1)), more("more", Role::output, std::vector<double>{3});
    const OnDevice<float> device;
    for (ActivationFunction activation : kActivations)
        for (bool has_array : {false, true}) {
            INFO(describe(activation) << ", array " << has_array);
            float* array = has_array ? more.on(device) : nullptr;
            const ops::MatmulForward forward{out.on(device), array, inp.on(device), weight.on(device), nullptr, 1, 1, 1,
                                             activation};
            if (has_array == keeps_sum(activation))
                CHECK_NOTHROW(ops::matmul_forward(forward, Stream()));
            else
                expect_error(Exit::internal, {"matmul_forward"}, [&] { ops::matmul_forward(forward, Stream()); });
            const ops::MatmulBackwardInput backward{out.on(device), inp.on(device), weight.on(device), array, 1, 1, 1,
                                                    activation};
            if (has_array == (activation != ActivationFunction::none))
                CHECK_NOTHROW(ops::matmul_backward_input(backward, Stream()));
            else
                expect_error(Exit::internal, {"matmul_backward_input"},
                             [&] { ops::matmul_backward_input(backward, Stream()); });
        }
    synchronize(Stream());
}

TEMPLATE_TEST_CASE("matmul_backward_weight", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes)
        for (bool with_bias : {false, true})
            for (bool accumulate : {false, true}) {
                INFO(describe(s) << ", bias " << with_bias << ", accumulate " << accumulate);
                size_t count = size_t(s.n) * s.k;
                Array<float> dweight("dweight", Role::output, accumulate ? random_values(count, 4) : nans(count));
                Array<float> dbias("dbias", Role::output, accumulate ? random_values(s.n, 5) : nans(s.n));
                Stored<T> dout("dout", Role::input, random_values(size_t(s.rows) * s.n, 1));
                Stored<T> inp("inp", Role::input, random_values(size_t(s.rows) * s.k, 2));
                auto op = [&]<class Side>(Side side) {
                    return ops::MatmulBackwardWeight{.dweight = dweight.on(side),
                                                     .dbias = with_bias ? dbias.on(side) : nullptr,
                                                     .scratch = nullptr,
                                                     .dout = dout.on(side),
                                                     .inp = inp.on(side),
                                                     .rows = s.rows,
                                                     .n = s.n,
                                                     .k = s.k,
                                                     .accumulate = accumulate};
                };
                std::vector<float> dweight_size = absolute(dweight.host), dbias_size = absolute(dbias.host);
                std::vector<double> dout_size = absolute(dout.host), inp_size = absolute(inp.host);
                auto size_op = op(OnHost());
                size_op.dweight = dweight_size.data(), size_op.dbias = with_bias ? dbias_size.data() : nullptr;
                size_op.dout = dout_size.data(), size_op.inp = inp_size.data();
                ref::matmul_backward_weight(size_op);

                auto device_op = op(OnDevice<T>());
                auto scratch = scratch_of(ops::matmul_backward_weight_scratch_bytes(device_op));
                device_op.scratch = scratch.on(OnDevice<T>());
                ops::matmul_backward_weight(device_op, Stream());
                ref::matmul_backward_weight(op(OnHost()));
                double sum_error = summation_error(s.rows + 1);
                check_close(dweight,
                            [&](size_t i) { return stored_error_fp32(dweight.host[i]) + sum_error * dweight_size[i]; });
                if (with_bias)
                    check_close(dbias,
                                [&](size_t i) { return stored_error_fp32(dbias.host[i]) + sum_error * dbias_size[i]; });
                scratch.fetch();
            }
}

// FP16 ends at 65504: a larger sum is stored as infinity of its sign, which dynamic loss scaling detects. A sum with
// only partial sums beyond the range is correct, because sums are float.
TEST_CASE("matmul_forward: fp16 overflow is infinity", "[ops]") {
    Stored<fp16> out("out", Role::output, nans(4));
    Stored<fp16> inp("inp", Role::input, std::vector<double>{256, 256, 256});
    Stored<fp16> weight("weight", Role::input,
                        std::vector<double>{255, 0.5, 0, /**/ 128, 128, 64, /**/ -128, -128, -64, /**/ 255, 255, -255});
    auto op = [&]<class Side>(Side side) {
        return ops::MatmulForward{.out = out.on(side),
                                  .pre_activation = nullptr,
                                  .inp = inp.on(side),
                                  .weight = weight.on(side),
                                  .bias = nullptr,
                                  .rows = 1,
                                  .n = 4,
                                  .k = 3};
    };
    ops::matmul_forward(op(OnDevice<fp16>()), Stream());
    ref::matmul_forward(op(OnHost()));
    CHECK(out.host == std::vector<double>{65408, 81920, -81920, 65280});
    std::vector<fp16> values = out.fetch();
    CHECK(to_float(values[0]) == 65408);
    CHECK(to_float(values[1]) == INFINITY);
    CHECK(to_float(values[2]) == -INFINITY);
    CHECK(to_float(values[3]) == 65280);
}

// matmul_forward, matmul_backward_input, matmul_backward_weight and activation_forward against ref::.
#include "test/device_array.h"
#include "test/random_values.h"
#include "test/tolerance.h"

namespace {

struct Shape {
    int rows, n, k;
};
// One element, edges of tiles on every side, whole tiles, long sums.
constexpr Shape kShapes[] = {{1, 1, 1},     {1, 64, 7},     {37, 7, 64},    {37, 132, 1},
                             {130, 1, 132}, {130, 132, 64}, {64, 128, 128}, {37, 768, 132},
                             {1, 257, 768}, {130, 64, 768}, {130, 132, 132}};

std::string describe(const Shape& s) { return format("rows %d, n %d, k %d", s.rows, s.n, s.k); }

// gelu and gelu' as float functions of an exact x: a cubic polynomial a(x), a tanh (whose argument's error matters only
// where it is small) and a few products. In gelu' an error of the tanh is multiplied by |x a'(x)| <= |x| + |x|^3 / 9.
// |gelu'| and |gelu''| stay below 1.13.
constexpr double kTanhError = kFunctionError + 8 * kRoundoff;
double gelu_error(double x) { return kTanhError * std::abs(x); }
double gelu_slope_error(double x) { return kTanhError * (1 + std::abs(x) + std::abs(x * x * x) / 9); }
constexpr double kGeluSteepest = 1.13;

}  // namespace

template <class T> static void test_matmul_forward(const Shape& s, bool with_bias, bool with_gelu) {
    size_t count = size_t(s.rows) * s.n;
    Stored<T> out("out", Role::output, nans(count)), pre_activation("pre_activation", Role::output, nans(count));
    Stored<T> inp("inp", Role::input, random_values(size_t(s.rows) * s.k, 1));
    Stored<T> weight("weight", Role::input, random_values(size_t(s.n) * s.k, 2));
    Stored<T> bias("bias", Role::input, random_values(s.n, 3));
    auto op = [&]<class Side>(Side side) {
        return ops::MatmulForward{.out = out.on(side),
                                  .pre_activation = with_gelu ? pre_activation.on(side) : nullptr,
                                  .inp = inp.on(side),
                                  .weight = weight.on(side),
                                  .bias = with_bias ? bias.on(side) : nullptr,
                                  .rows = s.rows,
                                  .n = s.n,
                                  .k = s.k};
    };
    std::vector<double> size(count), inp_size = absolute(inp.host), weight_size = absolute(weight.host),
                                     bias_size = absolute(bias.host);
    ref::matmul_forward(ops::MatmulForward{.out = size.data(),
                                           .pre_activation = nullptr,
                                           .inp = inp_size.data(),
                                           .weight = weight_size.data(),
                                           .bias = with_bias ? bias_size.data() : nullptr,
                                           .rows = s.rows,
                                           .n = s.n,
                                           .k = s.k});
    ops::matmul_forward(op(OnDevice<T>()), Stream());
    ref::matmul_forward(op(OnHost()));
    auto sum_bound = [&](size_t i, double sum) { return stored_error<T>(sum) + summation_error(s.k + 1) * size[i]; };
    if (!with_gelu) {
        check_close(out, [&](size_t i) { return sum_bound(i, out.host[i]); });
        return;
    }
    check_close(pre_activation, [&](size_t i) { return sum_bound(i, pre_activation.host[i]); });
    check_close(out, [&](size_t i) {
        return stored_error<T>(out.host[i]) + kGeluSteepest * sum_bound(i, pre_activation.host[i]) +
               gelu_error(pre_activation.host[i]);
    });

    // activation_forward on what was stored promises the bits of this epilogue.
    std::vector<T> epilogue = out.fetch();
    Stored<T> stored("stored pre_activation", Role::input, pre_activation.fetch());
    Stored<T> again("activation_forward's out", Role::output, nans(count));
    ops::activation_forward(
        ops::ActivationForward{.out = again.on(OnDevice<T>()), .inp = stored.on(OnDevice<T>()), .count = count},
        Stream());
    check_same_bits(again, epilogue);
}

TEMPLATE_TEST_CASE("matmul_forward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes)
        for (bool with_bias : {false, true})
            for (bool with_gelu : {false, true}) {
                INFO(describe(s) << ", bias " << with_bias << ", gelu " << with_gelu);
                test_matmul_forward<TestType>(s, with_bias, with_gelu);
            }
}

TEMPLATE_TEST_CASE("matmul_backward_input", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes)
        for (bool with_gelu : {false, true}) {
            INFO(describe(s) << ", gelu " << with_gelu);
            size_t count = size_t(s.rows) * s.k;
            Stored<T> dinp("dinp", Role::output, nans(count));
            Stored<T> dout("dout", Role::input, random_values(size_t(s.rows) * s.n, 1));
            Stored<T> weight("weight", Role::input, random_values(size_t(s.n) * s.k, 2));
            Stored<T> pre_activation("pre_activation", Role::input, random_values(count, 3, 4));
            auto op = [&]<class Side>(Side side) {
                return ops::MatmulBackwardInput{.dinp = dinp.on(side),
                                                .dout = dout.on(side),
                                                .weight = weight.on(side),
                                                .kept = with_gelu ? pre_activation.on(side) : nullptr,
                                                .rows = s.rows,
                                                .n = s.n,
                                                .k = s.k};
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
            check_close(dinp, [&](size_t i) {
                double slope_error = with_gelu ? gelu_slope_error(pre_activation.host[i]) + kRoundoff : 0;
                double steepest = with_gelu ? kGeluSteepest : 1;
                return stored_error<T>(dinp.host[i]) + size[i] * (summation_error(s.n) * steepest + slope_error);
            });
        }
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

// FP16 ends at 65504: a larger sum is stored as infinity of its sign (dynamic loss scaling looks for it), and a sum
// whose partial sums alone are beyond the range is right, because sums are float.
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

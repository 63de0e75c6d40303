// activation_forward and gated activations against ref::. test_ops_matmul.cpp checks that activation_forward gives the
// same bits as matmul_forward's epilogue.
#include "test/support/device_array.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

// Ordinary numbers, and numbers for which a careless formula cancels, overflows or loses the sign.
std::vector<double> numbers(size_t count) {
    std::vector<double> values = {0,   -0.0, 1,    -1,    -3,     3,       -5,       5,       -8,    8,
                                  -12, 12,   -100, 30000, -30000, 0x1p-20, -0x1p-14, 0x1p-14, -0.75, 0.5};
    const std::vector<double> random = random_values(count, 1, 6);
    values.insert(values.end(), random.begin(), random.end());
    values.resize(count);
    return values;
}

constexpr double kActivationError = kFunctionError + 8 * kRoundoff;

}  // namespace

// As for the GEMMs: a tanh or an exp whose argument is a polynomial, a few roundings, and a factor x.
TEMPLATE_TEST_CASE("activation_forward: parts of packs and odd addresses", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (ActivationFunction activation : {ActivationFunction::gelu_new, ActivationFunction::silu})
        for (auto [count, shift] : {std::pair<size_t, int>{1, 0}, {7, 0}, {37, 1}, {5003, 0}, {20000, 0}}) {
            INFO(name_of(activation) << ", count " << count << ", shift " << shift);
            Stored<T> inp("inp", Role::input, numbers(count), shift);
            Stored<T> out("out", Role::output, nans(count), shift);
            auto op = [&]<class Side>(Side side) {
                return ops::ActivationForward{
                    .out = out.on(side), .inp = inp.on(side), .count = inp.host.size(), .activation = activation};
            };
            ops::activation_forward(op(OnDevice<T>()), Stream());
            ref::activation_forward(op(OnHost()));
            check_close(
                out, [&](size_t i) { return kActivationError * std::abs(inp.host[i]) + stored_error<T>(out.host[i]); });
        }
}

TEMPLATE_TEST_CASE("activation_forward: ends of the range", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (ActivationFunction activation : {ActivationFunction::gelu_new, ActivationFunction::silu}) {
        INFO(name_of(activation));
        const T largest = std::is_same_v<T, fp16> ? from_float<T>(65504.0f) : from_float<T>(0x1.fep127f);
        const T smallest = from_float<T>(-to_float(largest));
        Array<T> inp("inp", Role::input,
                     std::vector<T>{largest, smallest, from_float<T>(NAN), from_float<T>(INFINITY)});
        Array<T> out("out", Role::output, std::vector<T>(4));
        OnDevice<T> device;
        ops::activation_forward(ops::ActivationForward{out.on(device), inp.on(device), 4, activation}, Stream());
        const std::vector<T> got = out.fetch();
        CHECK(to_float(got[0]) == to_float(largest));
        CHECK(to_float(got[1]) == 0);
        CHECK(std::isnan(to_float(got[2])));
        CHECK(to_float(got[3]) == INFINITY);
    }
}

TEST_CASE("activation_forward: relu2 is not recomputed", "[ops]") {
    Array<float> inp("inp", Role::input, std::vector<float>{1}), out("out", Role::output, std::vector<float>{0});
    const OnDevice<float> device;
    for (ActivationFunction activation : {ActivationFunction::none, ActivationFunction::relu2})
        expect_error(Exit::internal, {"activation_forward"}, [&] {
            ops::activation_forward(ops::ActivationForward{out.on(device), inp.on(device), 1, activation}, Stream());
        });
}

namespace {

struct GatedShape {
    int rows, hidden;
    int shift = 0;  // of the arrays, in elements
};
// One element; a row shorter than a pack; rows that end on and off a pack's border; odd addresses.
constexpr GatedShape kGatedShapes[] = {{1, 1}, {3, 7}, {5, 64}, {37, 132}, {4, 1027}, {9, 384}, {6, 72, 1}};
constexpr ActivationFunction kGates[] = {ActivationFunction::gelu_new, ActivationFunction::silu,
                                         ActivationFunction::relu2};

// Errors of f and f' as float functions of an exact x; for gelu' and silu' as in test_ops_matmul.cpp.
double error_of(ActivationFunction f, double x) {
    return f == ActivationFunction::relu2 ? kRoundoff * x * x : kActivationError * std::abs(x);
}
double slope_error_of(ActivationFunction f, double x) {
    if (f == ActivationFunction::relu2) return 0;
    const double cubic = f == ActivationFunction::gelu_new ? std::abs(x * x * x) / 9 : 0;
    return kActivationError * (1 + std::abs(x) + cubic);
}

}  // namespace

TEMPLATE_TEST_CASE("gated_activation_forward", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (ActivationFunction activation : kGates)
        for (const GatedShape& s : kGatedShapes) {
            INFO(name_of(activation) << ", rows " << s.rows << ", hidden " << s.hidden << ", shift " << s.shift);
            const size_t count = size_t(s.rows) * s.hidden, hidden = size_t(s.hidden);
            Stored<T> out("out", Role::output, nans(count), s.shift);
            Stored<T> inp("inp", Role::input, random_values(2 * count, 1, 5), s.shift);
            auto op = [&]<class Side>(Side side) {
                return ops::GatedActivationForward{.out = out.on(side),
                                                   .inp = inp.on(side),
                                                   .rows = s.rows,
                                                   .hidden = s.hidden,
                                                   .activation = activation};
            };
            ops::gated_activation_forward(op(OnDevice<T>()), Stream());
            ref::gated_activation_forward(op(OnHost()));
            check_close(out, [&](size_t i) {
                const double* row = inp.host.data() + i / hidden * 2 * hidden;
                const double gate = row[i % hidden], up = row[hidden + i % hidden];
                return error_of(activation, gate) * std::abs(up) + kRoundoff * std::abs(out.host[i]) +
                       stored_error<T>(out.host[i]);
            });
        }
}

TEMPLATE_TEST_CASE("gated_activation_backward", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (ActivationFunction activation : kGates)
        for (const GatedShape& s : kGatedShapes) {
            INFO(name_of(activation) << ", rows " << s.rows << ", hidden " << s.hidden << ", shift " << s.shift);
            const size_t count = size_t(s.rows) * s.hidden, hidden = size_t(s.hidden);
            Stored<T> dinp("dinp", Role::output, nans(2 * count), s.shift);
            Stored<T> dout("dout", Role::input, random_values(count, 2), s.shift);
            Stored<T> inp("inp", Role::input, random_values(2 * count, 1, 5), s.shift);
            auto op = [&]<class Side>(Side side) {
                return ops::GatedActivationBackward{.dinp = dinp.on(side),
                                                    .dout = dout.on(side),
                                                    .inp = inp.on(side),
                                                    .rows = s.rows,
                                                    .hidden = s.hidden,
                                                    .activation = activation};
            };
            ops::gated_activation_backward(op(OnDevice<T>()), Stream());
            ref::gated_activation_backward(op(OnHost()));
            check_close(dinp, [&](size_t i) {
                const double* row = inp.host.data() + i / (2 * hidden) * 2 * hidden;
                const size_t place = i % hidden;
                const double gate = row[place], up = row[hidden + place];
                const double gradient = std::abs(dout.host[i / (2 * hidden) * hidden + place]);
                const bool is_gate = i % (2 * hidden) < hidden;
                const double error =
                    is_gate ? std::abs(up) * slope_error_of(activation, gate) : error_of(activation, gate);
                return gradient * error + 2 * kRoundoff * std::abs(dinp.host[i]) + stored_error<T>(dinp.host[i]);
            });
        }
}

// For gates beyond the range of exp the product is 0 or the other factor, never NaN; NaN itself is preserved.
TEMPLATE_TEST_CASE("gated_activation: ends of the range", "[ops]", float, bf16, fp16) {
    using T = TestType;
    const float largest = std::is_same_v<T, fp16> ? 65504.0f : 0x1.fep127f;
    for (ActivationFunction activation : {ActivationFunction::gelu_new, ActivationFunction::silu}) {
        INFO(name_of(activation));
        std::vector<T> values;
        for (float gate : {largest, -largest, NAN}) values.push_back(from_float<T>(gate));
        for (float up : {1.0f, 1.0f, 1.0f}) values.push_back(from_float<T>(up));
        Array<T> inp("inp", Role::input, values), dout("dout", Role::input, std::vector<T>(3, from_float<T>(1.0f)));
        Array<T> out("out", Role::output, std::vector<T>(3)), dinp("dinp", Role::output, std::vector<T>(6));
        OnDevice<T> device;
        ops::gated_activation_forward(ops::GatedActivationForward{out.on(device), inp.on(device), 1, 3, activation},
                                      Stream());
        ops::gated_activation_backward(
            ops::GatedActivationBackward{dinp.on(device), dout.on(device), inp.on(device), 1, 3, activation}, Stream());
        const std::vector<T> got = out.fetch(), gradient = dinp.fetch();
        CHECK(to_float(got[0]) == largest);
        CHECK(to_float(got[1]) == 0);
        CHECK(std::isnan(to_float(got[2])));
        CHECK(to_float(gradient[0]) == 1);
        CHECK(std::abs(to_float(gradient[1])) <= 1e-31f);
        CHECK(std::isnan(to_float(gradient[2])));
        CHECK(to_float(gradient[3]) == largest);
        CHECK(std::abs(to_float(gradient[4])) <= 1e-31f);
    }
}

// activation_forward alone against ref::; that it gives the bits of matmul_forward's epilogue is tested with the
// products.
#include "test/device_array.h"
#include "test/random_values.h"
#include "test/tolerance.h"

namespace {

// Ordinary numbers, and those where a careless form cancels, overflows or loses its sign.
std::vector<double> numbers(size_t count) {
    std::vector<double> values = {0,   -0.0, 1,    -1,    -3,     3,       -5,       5,       -8,    8,
                                  -12, 12,   -100, 30000, -30000, 0x1p-20, -0x1p-14, 0x1p-14, -0.75, 0.5};
    const std::vector<double> random = random_values(count, 1, 6);
    values.insert(values.end(), random.begin(), random.end());
    values.resize(count);
    return values;
}

}  // namespace

// As for the products: a tanh, whose argument is a polynomial, and a few roundings, all times x.
TEMPLATE_TEST_CASE("activation_forward: parts of packs and odd addresses", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (auto [count, shift] : {std::pair<size_t, int>{1, 0}, {7, 0}, {37, 1}, {5003, 0}, {20000, 0}}) {
        INFO("count " << count << ", shift " << shift);
        Stored<T> inp("inp", Role::input, numbers(count), shift);
        Stored<T> out("out", Role::output, nans(count), shift);
        auto op = [&]<class Side>(Side side) {
            return ops::ActivationForward{.out = out.on(side), .inp = inp.on(side), .count = inp.host.size()};
        };
        ops::activation_forward(op(OnDevice<T>()), Stream());
        ref::activation_forward(op(OnHost()));
        check_close(out, [&](size_t i) {
            return (kFunctionError + 8 * kRoundoff) * std::abs(inp.host[i]) + stored_error<T>(out.host[i]);
        });
    }
}

TEMPLATE_TEST_CASE("activation_forward: ends of the range", "[ops]", float, bf16, fp16) {
    using T = TestType;
    const T largest = std::is_same_v<T, fp16> ? from_float<T>(65504.0f) : from_float<T>(0x1.fep127f);
    const T smallest = from_float<T>(-to_float(largest));
    Array<T> inp("inp", Role::input, std::vector<T>{largest, smallest, from_float<T>(NAN), from_float<T>(INFINITY)});
    Array<T> out("out", Role::output, std::vector<T>(4));
    OnDevice<T> device;
    ops::activation_forward(ops::ActivationForward{.out = out.on(device), .inp = inp.on(device), .count = 4}, Stream());
    const std::vector<T> got = out.fetch();
    CHECK(to_float(got[0]) == to_float(largest));
    CHECK(to_float(got[1]) == 0);
    CHECK(std::isnan(to_float(got[2])));
    CHECK(to_float(got[3]) == INFINITY);
}

// What only the CPU's matrix products promise: the bits do not depend on the number of threads, whoever multiplies;
// both who can multiply agree; and the steady state allocates nothing. That the results are right is
// test_ops_matmul.cpp's.
#include <omp.h>

#include "kernels/cpu/matmul.h"
#include "test/allocations.h"
#include "test/catch.h"
#include "test/device_array.h"
#include "test/random_values.h"

namespace {

struct Shape {
    int rows, n, k;
};
// Several tiles each way with edges on all sides and more than one chunk of the depth for each of the three products;
// fewer rows than a tile has; fewer columns.
constexpr Shape kShapes[] = {{530, 810, 402}, {7, 1000, 300}, {1000, 5, 33}};

enum class Values { random, small_integers };

// The three products of one layer. What they write, one after the other, is `results()`.
template <class T> class Layer {
public:
    Layer(const Shape& s, Values kind)
        : s_(s),
          kind_(kind),
          inp_("inp", Role::input, values(s.rows, s.k, 1)),
          weight_("weight", Role::input, values(s.n, s.k, 2)),
          bias_("bias", Role::input, values(1, s.n, 3)),
          dout_("dout", Role::input, values(s.rows, s.n, 4)),
          out_("out", Role::output, nans(size_t(s.rows) * s.n)),
          pre_gelu_("pre_gelu", Role::output, nans(size_t(s.rows) * s.n)),
          dinp_("dinp", Role::output, nans(size_t(s.rows) * s.k)),
          dweight_("dweight", Role::output, values(s.n, s.k, 5)),
          dbias_("dbias", Role::output, values(1, s.n, 6)) {}

    void multiply(ProductPath path, bool with_gelu) {
        const OnDevice<T> device;
        T* pre_gelu = with_gelu ? pre_gelu_.on(device) : nullptr;
        matmul_forward_by<T>(path, {out_.on(device), pre_gelu, inp_.on(device), weight_.on(device), bias_.on(device),
                                    s_.rows, s_.n, s_.k});
        matmul_backward_input_by<T>(path, {dinp_.on(device), dout_.on(device), weight_.on(device),
                                           with_gelu ? inp_.on(device) : nullptr, s_.rows, s_.n, s_.k});
        matmul_backward_weight_by<T>(path, {dweight_.on(device), dbias_.on(device), nullptr, dout_.on(device),
                                            inp_.on(device), s_.rows, s_.n, s_.k, true});
    }

    std::string results() const {
        std::string bytes;
        for (const auto* array : {&out_, &pre_gelu_, &dinp_}) append(bytes, array->fetch());
        for (const auto* array : {&dweight_, &dbias_}) append(bytes, array->fetch());
        return bytes;
    }

private:
    std::vector<double> values(int rows, int cols, uint64_t seed) const {
        std::vector<double> values = random_values(size_t(rows) * cols, seed);
        if (kind_ == Values::small_integers)
            for (double& value : values) value = std::round(2 * value);
        return values;
    }

    template <class Value> static void append(std::string& bytes, const std::vector<Value>& values) {
        bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
    }

    Shape s_;
    Values kind_;
    Array<T> inp_, weight_, bias_, dout_, out_, pre_gelu_, dinp_;
    Array<float> dweight_, dbias_;
};

template <class T> std::string results_by(const Shape& s, ProductPath path, int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    Layer<T> layer(s, Values::random);
    layer.multiply(path, true);
    CHECK(omp_get_max_threads() == threads);
    omp_set_num_threads(before);
    return layer.results();
}

template <class T> void check_threads(ProductPath path) {
    for (const Shape& s : kShapes) {
        const std::string expected = results_by<T>(s, path, 4);
        for (int threads : {3, 2, 1}) {
            INFO(s.rows << " rows, n " << s.n << ", k " << s.k << ", " << threads << " threads");
            const bool same = results_by<T>(s, path, threads) == expected;
            CHECK(same);
        }
    }
}

}  // namespace

TEMPLATE_TEST_CASE("a product of panels has the same bits on any number of threads", "[cpu]", float, bf16, fp16) {
    check_threads<TestType>(ProductPath::panels);
}

TEST_CASE("a product of the library has the same bits on any number of threads", "[cpu]") {
    check_threads<float>(ProductPath::library);
    if (fastest_product_path(Dtype::bf16) == ProductPath::library) check_threads<bf16>(ProductPath::library);
}

// Sums of small integers are exact in any order.
TEST_CASE("panels and the library agree", "[cpu]") {
    for (const Shape& s : kShapes) {
        INFO(s.rows << " rows, n " << s.n << ", k " << s.k);
        Layer<float> panels(s, Values::small_integers), library(s, Values::small_integers);
        panels.multiply(ProductPath::panels, false);
        library.multiply(ProductPath::library, false);
        const bool same = panels.results() == library.results();
        CHECK(same);
    }
}

TEMPLATE_TEST_CASE("a product of panels allocates nothing once its shape was seen", "[cpu]", float, bf16, fp16) {
    Layer<TestType> layer(kShapes[0], Values::random);
    layer.multiply(ProductPath::panels, true);
    const long before = allocations();
    layer.multiply(ProductPath::panels, true);
    CHECK(allocations() - before == 0);
}

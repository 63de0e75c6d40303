// Guarantees of the CPU's GEMMs only: results do not depend on the number of threads on any path, all paths agree, no
// product affects the next one, and the steady state allocates nothing. test_ops_matmul.cpp checks the results
// themselves, for the path that this machine uses.
#include <omp.h>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/onednn.h"
#include "test/support/allocations.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"

namespace {

struct Shape {
    int rows, n, k;
};
// Several tiles in each direction with edges on all sides and more than one slice of the depth for each of the three
// products; fewer rows than a tile, fewer columns, and odd depths, in the first slice and in later ones.
constexpr Shape kShapes[] = {{530, 810, 522}, {7, 1001, 300}, {1001, 5, 33}, {30, 40, 513}};

enum class Values { random, integers, infinite };

// The panel kernels that can multiply this type.
template <class T> std::vector<ProductPath> panels_of() {
    if (dtype_of<T> == Dtype::bf16) return {ProductPath::float_panels, ProductPath::bf16_panels};
    return {ProductPath::float_panels};
}

// The three products of one layer. `results()` returns their outputs in order.
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
          pre_activation_("pre_activation", Role::output, nans(size_t(s.rows) * s.n)),
          dinp_("dinp", Role::output, nans(size_t(s.rows) * s.k)),
          dweight_("dweight", Role::output, values(s.n, s.k, 5)),
          dbias_("dbias", Role::output, values(1, s.n, 6)) {}

    void multiply(ProductPath path, bool with_gelu) {
        const OnDevice<T> device;
        const auto activation = with_gelu ? ActivationFunction::gelu_new : ActivationFunction::none;
        T* pre_activation = with_gelu ? pre_activation_.on(device) : nullptr;
        matmul_forward_by(path, {out_.on(device), pre_activation, inp_.on(device), weight_.on(device), bias_.on(device),
                                 s_.rows, s_.n, s_.k, activation});
        matmul_backward_input_by(path, {dinp_.on(device), dout_.on(device), weight_.on(device),
                                        with_gelu ? inp_.on(device) : nullptr, s_.rows, s_.n, s_.k, activation});
        matmul_backward_weight_by(path, {dweight_.on(device), dbias_.on(device), nullptr, dout_.on(device),
                                         inp_.on(device), s_.rows, s_.n, s_.k, true});
    }

    std::string results() const {
        std::string bytes;
        for (const auto* array : {&out_, &pre_activation_, &dinp_}) append(bytes, array->fetch());
        for (const auto* array : {&dweight_, &dbias_}) append(bytes, array->fetch());
        return bytes;
    }

private:
    std::vector<double> values(int rows, int cols, uint64_t seed) const {
        std::vector<double> values = random_values(size_t(rows) * cols, seed);
        if (kind_ == Values::integers)
            for (double& value : values) value = std::round(255 * value);
        if (kind_ == Values::infinite)
            for (double& value : values) value = std::copysign(INFINITY, value);
        return values;
    }

    template <class Value> static void append(std::string& bytes, const std::vector<Value>& values) {
        bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
    }

    Shape s_;
    Values kind_;
    Array<T> inp_, weight_, bias_, dout_, out_, pre_activation_, dinp_;
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
    for (ProductPath path : panels_of<TestType>()) check_threads<TestType>(path);
}

TEST_CASE("a product of the library has the same bits on any number of threads", "[cpu]") {
    check_threads<float>(ProductPath::library);
    if (fastest_product_path(Dtype::bf16) == ProductPath::library) check_threads<bf16>(ProductPath::library);
}

// Integers of up to eight bits, the precision of bf16, of both signs: sums stay below 2^24 and are exact in any order.
template <class T> static void check_agreement(ProductPath one, ProductPath other) {
    for (const Shape& s : kShapes) {
        INFO(s.rows << " rows, n " << s.n << ", k " << s.k);
        Layer<T> by_one(s, Values::integers), by_other(s, Values::integers);
        by_one.multiply(one, false);
        by_other.multiply(other, false);
        const bool same = by_one.results() == by_other.results();
        CHECK(same);
    }
}

TEST_CASE("panels and the library agree", "[cpu]") {
    check_agreement<float>(ProductPath::float_panels, ProductPath::library);
}

TEST_CASE("panels of bf16 and of float agree", "[cpu]") {
    check_agreement<bf16>(ProductPath::bf16_panels, ProductPath::float_panels);
}

// Panels are padded to whole vectors and pairs; the padding still holds NaN from a larger product.
TEMPLATE_TEST_CASE("a product does not depend on the product before", "[cpu]", float, bf16, fp16) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    for (ProductPath path : panels_of<TestType>())
        for (const Shape& s : kShapes) {
            INFO(s.rows << " rows, n " << s.n << ", k " << s.k << ", path " << int(path));
            Layer<TestType> first(s, Values::integers), again(s, Values::integers);
            Layer<TestType>({800, 800, 800}, Values::integers).multiply(path, false);
            first.multiply(path, false);
            Layer<TestType>({800, 800, 800}, Values::infinite).multiply(path, false);
            again.multiply(path, false);
            const bool same = first.results() == again.results();
            CHECK(same);
        }
    omp_set_num_threads(threads);
}

// Infinities reveal a diverging run: none may get lost, become NaN or reach another column. Two bf16 values that are
// moved as one word must not pass through a float: the first pair of weights below would be a signaling NaN.
TEMPLATE_TEST_CASE("infinite weights give infinite sums where they belong", "[cpu]", float, bf16, fp16) {
    using T = TestType;
    constexpr int kRows = 2, kColumns = 5, kDepth = 5;
    for (ProductPath path : panels_of<T>()) {
        std::vector<double> weights(kColumns * kDepth, 1);
        weights[1 * kDepth + 3] = INFINITY;
        weights[2 * kDepth + 2] = -INFINITY;
        weights[3 * kDepth + 4] = INFINITY;
        Array<T> inp("inp", Role::input, std::vector<double>(kRows * kDepth, 1)),
            weight("weight", Role::input, weights);
        Array<T> out("out", Role::output, nans(kRows * kColumns));
        const OnDevice<T> device;
        matmul_forward_by(
            path, {out.on(device), nullptr, inp.on(device), weight.on(device), nullptr, kRows, kColumns, kDepth});
        const std::vector<T> values = out.fetch();
        for (int i = 0; i < kRows * kColumns; i++) {
            INFO("element " << i << ", path " << int(path));
            const double expected[kColumns] = {5, INFINITY, -INFINITY, INFINITY, 5};
            CHECK(to_float(values[i]) == expected[i % kColumns]);
        }
    }
}

// The kernel computes half of a product of a matrix with its own transpose, recognized by its address.
TEMPLATE_TEST_CASE("symmetric products have the bits of the whole product", "[cpu]", float, bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    const int threads = omp_get_max_threads();
    for (const ProductPath path : panels_of<T>())
        for (const auto& [n, depth] :
             {std::pair{1, 1}, {5, 700}, {33, 1}, {95, 64}, {97, 300}, {200, 129}, {385, 40}, {777, 70}, {900, 9}})
            for (const int count : {1, 3}) {
                INFO("n " << n << ", depth " << depth << ", path " << int(path) << ", threads " << count);
                omp_set_num_threads(count);
                const size_t sums = size_t(n) * size_t(n);
                const std::vector<double> values = random_values(size_t(n) * size_t(depth), 1);
                Array<T> x("x", Role::input, values), copy("copy", Role::input, values);
                Array<T> gram("x x^T", Role::output, nans(sums)), whole("whole", Role::output, nans(sums));
                matmul_forward_by(path, {gram.on(device), nullptr, x.on(device), x.on(device), nullptr, n, n, depth});
                matmul_forward_by(path,
                                  {whole.on(device), nullptr, x.on(device), copy.on(device), nullptr, n, n, depth});
                check_same_bits(gram, whole.fetch());
                // Neither the products with a part of the rows nor a product with a bias are symmetric.
                Array<T> bias("bias", Role::input, random_values(size_t(n), 2));
                for (const int cols : {(n + 1) / 2, n}) {
                    const T* added = cols == n ? bias.on(device) : nullptr;
                    matmul_forward_by(path,
                                      {gram.on(device), nullptr, x.on(device), x.on(device), added, n, cols, depth});
                    matmul_forward_by(
                        path, {whole.on(device), nullptr, x.on(device), copy.on(device), added, n, cols, depth});
                    check_same_bits(gram, whole.fetch());
                }
                // The same values as (depth, n).
                Array<float> inner("x^T x", Role::output, nans(sums)), all("all", Role::output, nans(sums));
                matmul_backward_weight_by(
                    path, {inner.on(device), nullptr, nullptr, x.on(device), x.on(device), depth, n, n, false});
                matmul_backward_weight_by(
                    path, {all.on(device), nullptr, nullptr, x.on(device), copy.on(device), depth, n, n, false});
                check_same_bits(inner, all.fetch());
            }
    omp_set_num_threads(threads);
}

TEMPLATE_TEST_CASE("a product of panels allocates nothing once its shape was seen", "[cpu]", float, bf16, fp16) {
    for (ProductPath path : panels_of<TestType>()) {
        Layer<TestType> layer(kShapes[0], Values::random);
        layer.multiply(path, true);
        const long before = allocations();
        layer.multiply(path, true);
        CHECK(allocations() - before == 0);
    }
}

TEST_CASE("the type and the CPU determine the GEMM path, and the log names it", "[cpu]") {
    for (Dtype dtype : {Dtype::fp32, Dtype::fp16}) CHECK(fastest_product_path(dtype) == ProductPath::float_panels);
    const ProductPath path = fastest_product_path(Dtype::bf16);
    CHECK((path == ProductPath::float_panels) == !(kTargetMultipliesBf16 || library_has_matrix_instructions()));
    if (path == ProductPath::bf16_panels) CHECK(__builtin_cpu_supports("avx512bf16"));
    const char* who = path == ProductPath::library       ? "bf16: oneDNN (AMX)"
                      : path == ProductPath::bf16_panels ? "bf16: bf16 panels (AVX512-BF16)"
                                                         : "bf16: fp32 panels";
    CHECK(matmul_path() == format("fp32: fp32 panels, %s, fp16: fp32 panels", who));
}

// momentum_direction, apply_direction, frobenius_normalize, row_normalize and scaled_add against ref::.
#include "test/reference/update_rules.h"
#include "test/support/bounded.h"
#include "test/support/device_array.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"
#include "test/support/update_chunks.h"

namespace {

// Calls body.operator()<T>() for every storage type.
template <class Body> void for_types(Body body) {
    body.template operator()<float>(), body.template operator()<bf16>(), body.template operator()<fp16>();
}

// The arguments that both ops on chunks have.
struct Chunked {
    size_t count = element_count(), state_count = count + state_shift(kTensors);
    Array<ops::Chunk> chunks{"chunks", Role::input, chunks_of_one_rank()};
    Array<ops::Chunk> far_chunks{"far chunks", Role::input, far(chunks_of_one_rank())};
    Array<ops::UpdateScalars> scalars{
        "scalars", Role::input,
        std::vector<ops::UpdateScalars>{scalars_of(0.02f, 0.9f, 0.95f), scalars_of(0.03f, 0.8f, 0.6f)}};
    Array<ops::GradNorm> grad_norm;
    int n_chunks = int(chunks.host.size());

    explicit Chunked(int non_finite_tensor)
        : grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = 3, .scale = 1.0f / 1024 / 3, .non_finite_tensor = non_finite_tensor, .reserved = 0}}) {
    }

    static ops::UpdateScalars scalars_of(float learning_rate, float keep, float momentum) {
        ops::UpdateScalars scalars{};
        scalars.learning_rate = learning_rate, scalars.keep = keep, scalars.momentum = momentum;
        return scalars;
    }
};

template <class T> struct Momentum : Chunked {
    bool nesterov;
    Stored<T> direction{"direction", Role::output, random_values(state_count, 1)};
    Array<float> m{"m", Role::output, random_values(state_count, 2)};
    Array<float> grad{"grad", Role::input, random_values(count, 3, 2048)};

    explicit Momentum(bool has_nesterov, int non_finite_tensor = -1)
        : Chunked(non_finite_tensor), nesterov(has_nesterov) {}
    template <class Side> ops::MomentumDirection on(Side side) {
        return {.direction = direction.on(side),
                .m = m.on(side),
                .grad = grad.on(side),
                .chunks = chunks.on(side),
                .scalars = scalars.on(side),
                .grad_norm = grad_norm.on(side),
                .n_chunks = n_chunks,
                .nesterov = nesterov};
    }
    template <class Other> void check_same(const Other& expected) const {
        check_same_bits(direction, expected.direction.fetch());
        check_same_bits(m, expected.m.fetch());
    }
};

}  // namespace

TEMPLATE_TEST_CASE("momentum_direction", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const bool nesterov : {false, true}) {
        INFO("nesterov " << nesterov);
        Momentum<T> arrays(nesterov);
        const ops::MomentumDirection op = arrays.on(OnHost());
        // 0 outside the chunks, where nothing changes.
        std::vector<double> m_error(arrays.state_count), direction_error(arrays.state_count);
        for (const ops::Chunk& chunk : arrays.chunks.host)
            for (size_t e = 0; e < size_t(chunk.count); e++) {
                const size_t place = chunk.state_begin + e;
                Bounded m(op.m.as<float>()[place]);
                const Bounded g = Bounded(op.grad[chunk.begin + e]) * Bounded(op.grad_norm->scale);
                const Bounded direction = ref::direct_element(op.scalars[chunk.group], nesterov, g, m);
                m_error[place] = m.error + stored_error_fp32(m.value);
                direction_error[place] = direction.error + stored_error<T>(direction.value);
            }
        ops::momentum_direction(arrays.on(OnDevice<T>()), Stream());
        ref::momentum_direction(op);
        check_close(arrays.m, [&](size_t i) { return m_error[i]; });
        check_close(arrays.direction, [&](size_t i) { return direction_error[i]; });
    }
}

TEMPLATE_TEST_CASE("momentum_direction without a momentum is the gradient", "[ops]", float, bf16, fp16) {
    Momentum<TestType> arrays(true);
    ops::MomentumDirection op = arrays.on(OnHost()), on_device = arrays.on(OnDevice<TestType>());
    op.m = on_device.m = nullptr;
    ops::momentum_direction(on_device, Stream());
    ref::momentum_direction(op);
    check_close(arrays.direction, [&](size_t i) { return 2 * stored_error<TestType>(arrays.direction.host[i]); });
}

namespace {

template <class Param, class T> struct Application : Chunked {
    bool cautious;
    Array<float> master{"master", Role::output, masters(count)};
    Stored<Param> param{"param", Role::output, nans(count)};
    Stored<T> direction{"direction", Role::input, directions(*this)};

    explicit Application(bool is_cautious, int non_finite_tensor = -1)
        : Chunked(non_finite_tensor), cautious(is_cautious) {}

    // Numbers of both signs, zeros, and numbers whose product is 0 in float.
    static std::vector<double> masters(size_t count) {
        std::vector<double> values = random_values(count, 1);
        for (size_t e = 0; e < count; e++) values[e] *= e % 7 == 0 ? 1e-30 : e % 7 == 1 ? 0 : 1;
        return values;
    }
    static std::vector<double> directions(const Chunked& arrays) {
        std::vector<double> values = random_values(arrays.state_count, 2);
        for (const ops::Chunk& chunk : arrays.chunks.host)
            for (size_t e = 0; e < size_t(chunk.count); e++) {
                const size_t place = (chunk.begin + e) % 7;
                values[chunk.state_begin + e] *= place == 0 ? 1e-30 : place == 2 ? 0 : 1;
            }
        return values;
    }

    static constexpr bool kHasParam = !std::is_same_v<Param, float>;
    template <class Side> ops::ApplyDirection on(Side side) {
        return {.master = master.on(side),
                .param = kHasParam ? View(param.on(side)) : View(),
                .direction = direction.on(side),
                .chunks = chunks.on(side),
                .scalars = scalars.on(side),
                .grad_norm = grad_norm.on(side),
                .n_chunks = n_chunks,
                .cautious = cautious};
    }
    template <class Other> void check_same(const Other& expected) const {
        check_same_bits(master, expected.master.fetch());
        check_same_bits(param, expected.param.fetch());
    }
};

template <class Param, class T> void check_apply_direction(bool cautious) {
    INFO("direction " << name_of(dtype_of<T>) << ", cautious " << cautious);
    Application<Param, T> arrays(cautious);
    const ops::ApplyDirection op = arrays.on(OnHost());
    std::vector<double> error(arrays.count);  // 0 outside the chunks
    for (const ops::Chunk& chunk : arrays.chunks.host)
        for (size_t e = 0; e < size_t(chunk.count); e++) {
            const double master = element(op.master, chunk.begin + e),
                         direction = element(op.direction, chunk.state_begin + e);
            const Bounded stepped = ref::apply_element(op.scalars[chunk.group], !cautious || direction * master >= 0,
                                                       Bounded(direction), Bounded(master));
            error[chunk.begin + e] = stepped.error + stored_error_fp32(stepped.value);
        }
    std::vector<Param> expected_param = arrays.param.fetch();
    ops::apply_direction(arrays.on(OnDevice<Param>()), Stream());
    ref::apply_direction(op);
    check_close(arrays.master, [&](size_t e) { return error[e]; });
    // The parameter is the master as the device stored it, rounded to its type.
    const std::vector<float> master = arrays.master.fetch();
    for (const ops::Chunk& chunk : arrays.chunks.host)
        for (size_t e = chunk.begin; arrays.kHasParam && e < chunk.begin + size_t(chunk.count); e++)
            expected_param[e] = from_float<Param>(master[e]);
    check_same_bits(arrays.param, expected_param);
}

}  // namespace

TEMPLATE_TEST_CASE("apply_direction", "[ops]", float, bf16, fp16) {
    for (const bool cautious : {false, true})
        for_types([&]<class T>() { check_apply_direction<TestType, T>(cautious); });
}

TEMPLATE_TEST_CASE("momentum_direction and apply_direction do nothing when a gradient is not finite", "[ops]", float,
                   bf16, fp16) {
    using T = TestType;
    for (const int tensor : {0, 3}) {
        Momentum<T> momentum(true, tensor);
        ops::momentum_direction(momentum.on(OnDevice<T>()), Stream());
        momentum.check_same(Momentum<T>(true));
        Application<T, T> application(false, tensor);
        ops::apply_direction(application.on(OnDevice<T>()), Stream());
        application.check_same(Application<T, T>(false));
    }
}

TEMPLATE_TEST_CASE("momentum_direction and apply_direction beyond 2^32 elements", "[ops]", float, bf16) {
    using T = TestType;
    const OnDevice<T> device;
    Momentum<T> momentum(true), expected_momentum(true);
    ops::momentum_direction(expected_momentum.on(device), Stream());
    ops::MomentumDirection far_momentum = momentum.on(device);
    far_momentum.direction = momentum.direction.on(device) - kFar;
    far_momentum.m = far_momentum.m.as<float>() - kFar, far_momentum.grad -= kFar;
    far_momentum.chunks = momentum.far_chunks.on(device);
    ops::momentum_direction(far_momentum, Stream());
    momentum.check_same(expected_momentum);

    Application<T, T> application(true), expected_application(true);
    ops::apply_direction(expected_application.on(device), Stream());
    ops::ApplyDirection far_application = application.on(device);
    far_application.master = application.master.on(device) - kFar;
    if (far_application.param) far_application.param = application.param.on(device) - kFar;
    far_application.direction = application.direction.on(device) - kFar;
    far_application.chunks = application.far_chunks.on(device);
    ops::apply_direction(far_application, Stream());
    application.check_same(expected_application);
}

namespace {

// Normalizes `values` of type In. The shifts are as in Array.
template <class Out, class In> struct Normalization {
    size_t count;
    float eps;
    Stored<In> inp;
    Stored<Out> out;

    Normalization(const std::vector<double>& values, float min_norm, int inp_shift = 0, int out_shift = 0)
        : count(values.size()),
          eps(min_norm),
          inp("inp", Role::input, values, inp_shift),
          out("out", Role::output, nans(count), out_shift) {
        run(out.on(OnDevice<Out>()), inp.on(OnDevice<In>()));
    }
    void run(View to, ConstView from) const {
        ops::FrobeniusNormalize op{.out = to, .inp = from, .scratch = nullptr, .count = count, .eps = eps};
        auto scratch = scratch_of(ops::frobenius_normalize_scratch_bytes(op));
        op.scratch = scratch.on(OnDevice<Out>());
        ops::frobenius_normalize(op, Stream());
        scratch.fetch();
    }
    // The norm is a root of a sum in double, rounded to float; then come a division and the rounding to Out.
    void check() {
        ref::frobenius_normalize(
            {.out = out.on(OnHost()), .inp = inp.on(OnHost()), .scratch = nullptr, .count = count, .eps = eps});
        double sum = 0;
        for (const double x : inp.host) sum += x * x;
        const double norm = std::sqrt(sum);
        const Bounded divisor = norm > eps ? Bounded::rounded(norm, norm * double(count) * 0x1p-53) : Bounded(eps);
        check_close(out, [&](size_t i) {
            const Bounded quotient = Bounded(inp.host[i]) / divisor;
            return quotient.error + stored_error<Out>(quotient.value);
        });
    }
};

}  // namespace

// Squares of 1e30 and 1e-30 are outside float's range. The norm of numbers near 1e-30 is less than eps, and the norm of
// numbers near 1e-8 is about eps.
TEMPLATE_TEST_CASE("frobenius_normalize", "[ops]", float, bf16, fp16) {
    for_types([&]<class In>() {
        INFO("inp " << name_of(dtype_of<In>));
        for (const size_t count : {1, 39, 8192, 8197, 10'000, 30'003})
            for (const double width : {1.0, 1e30, 1e-8, 1e-30, 0.0}) {
                if (width == 1e30 && std::is_same_v<In, fp16>) continue;
                INFO("count " << count << ", width " << width);
                Normalization<TestType, In>(random_values(count, 1, width), 1e-7f, count % 2 == 1, count % 3 == 1)
                    .check();
            }
    });
}

// The parts of a GPU's blocks become longer when there are 1024 of them.
TEST_CASE("frobenius_normalize: a large matrix", "[ops]") {
    Normalization<bf16, float>(random_values((1024 << 13) + 4099, 1), 1e-7f).check();
}

TEMPLATE_TEST_CASE("frobenius_normalize: the same bits in place and at every address", "[ops]", float, bf16, fp16) {
    using T = TestType;
    const std::vector<double> values = random_values(40'003, 1);
    const Normalization<T, T> expected(values, 1e-7f), shifted(values, 1e-7f, 1, 1);
    check_same_bits(shifted.out, expected.out.fetch());
    Stored<T> in_place("in place", Role::output, values);
    expected.run(in_place.on(OnDevice<T>()), in_place.on(OnDevice<T>()));
    check_same_bits(in_place, expected.out.fetch());
}

TEMPLATE_TEST_CASE("frobenius_normalize: no number is finite if the norm is not", "[ops]", float, bf16, fp16) {
    const size_t count = 20'001;
    const auto check_all_nan = [&](const std::vector<double>& values) {
        for (const TestType value : Normalization<TestType, float>(values, 1e-7f).out.fetch())
            if (!std::isnan(to_float(value))) FAIL_CHECK("a result is " << to_float(value));
    };
    for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
        for (const size_t place : {size_t(0), count / 2, count - 1}) {
            INFO(bad << " at " << place);
            std::vector<double> values = random_values(count, 1);
            values[place] = bad;
            check_all_nan(values);
        }
    check_all_nan(std::vector<double>(count, 3e38));  // each finite, but the norm exceeds float
}

namespace {

// A random matrix; row 1 is 0, and row 2 is 1000 times as large as the others.
std::vector<double> uneven_rows(int rows, int cols) {
    std::vector<double> values = random_values(size_t(rows) * size_t(cols), 1);
    for (size_t i = 0; i < values.size(); i++) {
        const size_t row = i / size_t(cols);
        values[i] *= row == 1 ? 0 : row == 2 ? 1000 : 1;
    }
    return values;
}

template <class Out, class In> struct Rows {
    int rows, cols;
    Stored<In> inp;
    Stored<Out> out;
    Array<float> v;
    Array<ops::GradNorm> grad_norm;

    Rows(int row_count, int col_count, int inp_shift = 0, int out_shift = 0, int non_finite_tensor = -1)
        : rows(row_count),
          cols(col_count),
          inp("inp", Role::input, uneven_rows(rows, cols), inp_shift),
          out("out", Role::output, nans(inp.host.size()), out_shift),
          v("v", Role::output, moments(rows)),
          grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = 1, .scale = 1, .non_finite_tensor = non_finite_tensor, .reserved = 0}}) {}
    static std::vector<double> moments(int rows) {
        std::vector<double> values = random_values(size_t(rows), 2);
        for (double& value : values) value = 1e-2 * value * value;
        return values;
    }
    template <class Side> ops::RowNormalize on(Side side) {
        return {.out = out.on(side),
                .inp = inp.on(side),
                .v = v.on(side),
                .scratch = nullptr,
                .grad_norm = grad_norm.on(side),
                .rows = rows,
                .cols = cols,
                .beta2 = 0.9f,
                .one_minus_beta2 = 0.1f,
                .eps = 1e-8f,
                .norm = 3};
    }
    void run(ops::RowNormalize op) {
        auto scratch = scratch_of(ops::row_normalize_scratch_bytes(op));
        op.scratch = scratch.on(OnDevice<Out>());
        ops::row_normalize(op, Stream());
        scratch.fetch();
    }
    void run() { run(on(OnDevice<Out>())); }
    // Roundings: the mean, v, its root, the row's factor, the matrix's factor, their product, and the result.
    void check() {
        run();
        std::vector<Bounded> factors, moments;
        double squares = 0, factor_error = 0;
        const ops::RowNormalize op = on(OnHost());
        for (size_t r = 0; r < size_t(rows); r++) {
            double sum = 0;
            for (size_t i = r * size_t(cols); i < (r + 1) * size_t(cols); i++) sum += inp.host[i] * inp.host[i];
            moments.push_back(Bounded(op.beta2) * Bounded(v.host[r]) +
                              Bounded(op.one_minus_beta2) * Bounded::rounded(sum / cols, 0));
            factors.push_back(Bounded(1) / (sqrt(moments[r]) + Bounded(op.eps)));
            squares += factors[r].value * factors[r].value * sum;
            factor_error = std::max(factor_error, factors[r].error / factors[r].value);
        }
        ref::row_normalize(op);
        check_close(v, [&](size_t r) { return moments[r].error + stored_error_fp32(moments[r].value); });
        const double norm = std::sqrt(squares);
        const Bounded scale = Bounded(op.norm) / Bounded::rounded(norm, norm * factor_error);
        check_close(out, [&](size_t i) {
            const Bounded result = Bounded(inp.host[i]) * (factors[i / size_t(cols)] * scale);
            return result.error + stored_error<Out>(result.value);
        });
    }
};

}  // namespace

TEMPLATE_TEST_CASE("row_normalize", "[ops]", float, bf16, fp16) {
    for_types([&]<class In>() {
        for (const auto& [rows, cols] : {std::pair(1, 1), {3, 8}, {40, 39}, {7, 41}, {5, 4103}, {520, 16}}) {
            if (rows == 520 && !std::is_same_v<In, float>) continue;  // a block has 512 threads
            INFO("inp " << name_of(dtype_of<In>) << ", " << rows << " rows of " << cols);
            Rows<TestType, In>(rows, cols, cols == 41, rows == 5).check();
        }
    });
}

TEMPLATE_TEST_CASE("row_normalize: the same bits in place and at every address", "[ops]", float, bf16, fp16) {
    using T = TestType;
    Rows<T, T> expected(33, 48), shifted(33, 48, 1, 1), in_place(33, 48);
    expected.run(), shifted.run();
    check_same_bits(shifted.out, expected.out.fetch());
    check_same_bits(shifted.v, expected.v.fetch());
    Stored<T> values("in place", Role::output, uneven_rows(33, 48));
    ops::RowNormalize op = in_place.on(OnDevice<T>());
    op.out = values.on(OnDevice<T>()), op.inp = values.on(OnDevice<T>());
    in_place.run(op);
    check_same_bits(values, expected.out.fetch());
}

TEMPLATE_TEST_CASE("row_normalize: a matrix of zeros stays 0", "[ops]", float, bf16, fp16) {
    Rows<TestType, float> arrays(3, 16);
    Array<float> zeros("zeros", Role::input, std::vector<float>(48)), v("v", Role::output, std::vector<float>(3));
    ops::RowNormalize op = arrays.on(OnDevice<TestType>());
    op.inp = zeros.on(OnDevice<TestType>()), op.v = v.on(OnDevice<TestType>());
    arrays.run(op);
    for (const TestType value : arrays.out.fetch()) CHECK(to_float(value) == 0);
    for (const float moment : v.fetch()) CHECK(moment == 0);
}

TEMPLATE_TEST_CASE("row_normalize does nothing when a gradient is not finite", "[ops]", float, bf16, fp16) {
    Rows<TestType, float> arrays(7, 24, 0, 0, 2), untouched(7, 24);
    arrays.run();
    check_same_bits(arrays.out, untouched.out.fetch());
    check_same_bits(arrays.v, untouched.v.fetch());
}

namespace {

// alpha and beta of Newton-Schulz iterations: the terms partly cancel.
constexpr float kAlpha = 3.4445f, kBeta = -4.775f;

template <class Out, class A, class B> void check_scaled_add() {
    for (const size_t count : {1, 37, 1000, 1024, 40'003}) {
        const int out_shift = count == 37, b_shift = count == 1000;
        INFO("out " << name_of(dtype_of<Out>) << ", a " << name_of(dtype_of<A>) << ", b " << name_of(dtype_of<B>)
                    << ", count " << count);
        Stored<Out> out("out", Role::output, nans(count), out_shift);
        Stored<A> a("a", Role::input, random_values(count, 1));
        Stored<B> b("b", Role::input, random_values(count, 2), b_shift);
        const auto op = [&](auto side) {
            return ops::ScaledAdd{
                .out = out.on(side), .a = a.on(side), .b = b.on(side), .count = count, .alpha = kAlpha, .beta = kBeta};
        };
        ops::scaled_add(op(OnDevice<Out>()), Stream());
        ref::scaled_add(op(OnHost()));
        // Rounded are beta b, the sum, and the stored number.
        check_close(out, [&](size_t i) {
            return kRoundoff * (std::abs(kBeta * b.host[i]) + std::abs(out.host[i])) + stored_error<Out>(out.host[i]);
        });
    }
}

}  // namespace

TEMPLATE_TEST_CASE("scaled_add", "[ops]", bf16, fp16) {
    using T = TestType;
    check_scaled_add<float, float, float>(), check_scaled_add<float, float, T>();
    check_scaled_add<float, T, float>(), check_scaled_add<float, T, T>();
    check_scaled_add<T, float, float>(), check_scaled_add<T, float, T>();
    check_scaled_add<T, T, float>(), check_scaled_add<T, T, T>();
}

TEST_CASE("scaled_add: two 16-bit types in one op", "[ops]") {
    ops::ScaledAdd op{.out = View(nullptr, Dtype::fp32),
                      .a = View(nullptr, Dtype::bf16),
                      .b = View(nullptr, Dtype::fp16),
                      .count = 1,
                      .alpha = 1,
                      .beta = 1};
    expect_error(Exit::internal, {"scaled_add", "fp32, bf16 and fp16"}, [&] { ops::scaled_add(op, Stream()); });
}

TEMPLATE_TEST_CASE("scaled_add in place", "[ops]", float, bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    const size_t count = 3001;
    const std::vector<double> left = random_values(count, 1), right = random_values(count, 2);
    Stored<T> out("out", Role::output, nans(count)), a("a", Role::output, left), b("b", Role::output, right);
    ops::scaled_add({out.on(device), a.on(device), b.on(device), count, kAlpha, kBeta}, Stream());
    ops::scaled_add({a.on(device), a.on(device), b.on(device), count, kAlpha, kBeta}, Stream());
    check_same_bits(a, out.fetch());
    Stored<T> again("a", Role::input, left);
    ops::scaled_add({b.on(device), again.on(device), b.on(device), count, kAlpha, kBeta}, Stream());
    check_same_bits(b, out.fetch());
}

// All devices round at the same places: a hash of results computed on one CPU.
TEST_CASE("momentum_direction, apply_direction and scaled_add: the same bits everywhere", "[ops]") {
    const OnDevice<bf16> device;
    uint64_t hash = 0;
    const auto add = [&]<class T>(const std::vector<T>& values) {
        for (const T value : values) hash = hash * 6364136223846793005u + std::bit_cast<uint32_t>(to_float(value));
    };
    for (const bool option : {false, true}) {
        Momentum<float> momentum(option);
        ops::momentum_direction(momentum.on(device), Stream());
        add(momentum.m.fetch()), add(momentum.direction.fetch());
        Application<bf16, float> application(option);
        ops::apply_direction(application.on(device), Stream());
        add(application.master.fetch());
        const size_t count = momentum.state_count;
        Array<float> sum("sum", Role::output, nans(count));
        ops::scaled_add({sum.on(device), momentum.m.on(device), momentum.direction.on(device), count, kAlpha, kBeta},
                        Stream());
        add(sum.fetch());
    }
    CHECK(hash == 0xfe2c0da00c9d3298);
}

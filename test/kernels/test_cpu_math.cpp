// The basis of the CPU ops: number conversions, exp, GELU, and results that do not depend on the number of threads.
#include <omp.h>

#include <functional>
#include <limits>

#include "kernels/base/exact_squares.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "model/update.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Conversions.

// The value of a half's bits by the definition of the format: `fraction_bits`, exponent bias
// 2^(exponent bits - 1) - 1.
double value_of_bits(uint16_t bits, int fraction_bits) {
    const int exponent_bits = 15 - fraction_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int fraction = bits & ((1 << fraction_bits) - 1), exponent = (bits & 0x7fff) >> fraction_bits;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

// Rounding to nearest even: the spacing of the format around |x| is a power of two, so x / spacing is exact.
double rounded_to_format(double x, int fraction_bits) {
    const int bias = (1 << (14 - fraction_bits)) - 1;
    if (!std::isfinite(x) || x == 0) return x;
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    const double rounded =
        std::ldexp(std::nearbyint(std::ldexp(x, fraction_bits - exponent)), exponent - fraction_bits);
    return std::abs(rounded) >= std::ldexp(1.0, bias + 1) ? std::copysign(INFINITY, x) : rounded;
}

template <class T> inline constexpr int kFractionBits = std::is_same_v<T, bf16> ? 7 : 10;

bool same_number(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

template <class T> bool converts_like_the_definition(float x) {
    return same_number(to_float(from_float<T>(x)), rounded_to_format(x, kFractionBits<T>));
}

}  // namespace

TEMPLATE_TEST_CASE("every half has its format's value and survives the round trip", "[numeric]", bf16, fp16) {
    int wrong = 0;
    for (int bits = 0; bits < 0x10000; bits++) {
        const TestType half{uint16_t(bits)};
        const double value = value_of_bits(half.bits, kFractionBits<TestType>);
        const bool same_bits = from_float<TestType>(to_float(half)).bits == half.bits;
        if (!same_number(to_float(half), value) || !(same_bits || std::isnan(value))) wrong++;
    }
    CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("from_float rounds to nearest even", "[numeric]", bf16, fp16) {
    int wrong = 0;
    for (uint64_t i = 0; i < 500'000; i++)
        for (uint32_t word : philox(1, 2, i).word)
            if (!converts_like_the_definition<TestType>(std::bit_cast<float>(word))) wrong++;
    // Every half, the midpoint between it and the next one, and the floats on both sides of each.
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint32_t half = std::bit_cast<uint32_t>(to_float(TestType{uint16_t(bits)}));
        for (uint32_t middle : {0u, 0x1000u, 0x8000u})
            for (uint32_t offset : {~0u, 0u, 1u})
                if (!converts_like_the_definition<TestType>(std::bit_cast<float>(half + middle + offset))) wrong++;
    }
    // Subnormal fp16 are spaced differently from floats: their midpoints.
    for (int i = 0; i <= 2048; i++)
        if (!converts_like_the_definition<TestType>(float(std::ldexp(i + 0.5, -24)))) wrong++;
    CHECK(wrong == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// exp and the activations.

namespace {

// The largest error(x) over a dense sweep of the finite floats with |x| <= limit; NaN is larger than everything.
double worst_over_floats(float limit, const std::function<double(float)>& error) {
    double worst = 0;
    for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 1021) {
        const float x = std::bit_cast<float>(uint32_t(bits));
        if (!(std::abs(x) <= limit)) continue;
        const double e = error(x);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

// Unit in the last place of a float at |x|, subnormal numbers included.
double ulp(double x) { return std::max(std::ldexp(1.0, std::ilogb(x) - 23), 0x1p-149); }

}  // namespace

TEST_CASE("exp_approx is within 1.5 units in the last place", "[vector_math]") {
    const double worst = worst_over_floats(110, [](float x) {
        const double exact = std::exp(double(x));
        if (exact >= 0x1.ffffffp127) return std::isinf(exp_approx(x)) ? 0.0 : INFINITY;
        return std::abs(exp_approx(x) - exact) / ulp(exact);
    });
    CHECK(worst <= 1.5);

    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    CHECK(exp_approx(0) == 1);
    CHECK(exp_approx(-kInfinity) == 0);
    CHECK(exp_approx(std::numeric_limits<float>::lowest()) == 0);
    CHECK(exp_approx(kInfinity) == kInfinity);
    CHECK(exp_approx(std::numeric_limits<float>::max()) == kInfinity);
    CHECK(std::isnan(exp_approx(NAN)));
    CHECK(std::isnan(exp_approx(-NAN)));
}

TEST_CASE("tanh_approx is within 4 units in the last place", "[vector_math]") {
    const double worst = worst_over_floats(20, [](float x) {
        const double exact = std::tanh(double(x));
        return std::abs(tanh_approx(x) - exact) / ulp(exact);
    });
    CHECK(worst <= 4);

    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    CHECK(tanh_approx(kInfinity) == 1);
    CHECK(tanh_approx(-kInfinity) == -1);
    CHECK(tanh_approx(std::numeric_limits<float>::max()) == 1);
    CHECK(std::isnan(tanh_approx(NAN)));
}

TEST_CASE("gelu and its derivative are within their documented error", "[vector_math]") {
    const auto gelu_gradient = [](float x) { return activation_pair<ActivationFunction::gelu_new>(x).gradient; };
    const double worst = worst_over_floats(
        1e4f, [](float x) { return std::abs(gelu(x) - ref::gelu(x)) / std::max(1.0, std::abs(double(x))); });
    CHECK(worst <= 4e-7);
    const double worst_gradient =
        worst_over_floats(1e4f, [&](float x) { return std::abs(gelu_gradient(x) - ref::gelu_slope(x)); });
    CHECK(worst_gradient <= 5e-7);

    constexpr float kHuge = std::numeric_limits<float>::max();
    CHECK(gelu(kHuge) == kHuge);
    CHECK(gelu(-kHuge) == 0);
    CHECK(gelu_gradient(kHuge) == 1);
    CHECK(std::abs(gelu_gradient(-kHuge)) <= 1e-34f);
    CHECK(std::isnan(gelu(NAN)));
    CHECK(std::isnan(gelu_gradient(NAN)));
}

TEST_CASE("silu and its derivative are within their documented error", "[vector_math]") {
    constexpr auto kSilu = ActivationFunction::silu;
    const auto silu_gradient = [](float x) { return activation_pair<kSilu>(x).gradient; };
    const double worst = worst_over_floats(1e4f, [](float x) {
        return std::abs(silu(x) - ref::activation(kSilu, x)) / std::max(1.0, std::abs(double(x)));
    });
    CHECK(worst <= 4e-7);
    const double worst_gradient =
        worst_over_floats(1e4f, [&](float x) { return std::abs(silu_gradient(x) - ref::activation_slope(kSilu, x)); });
    CHECK(worst_gradient <= 5e-7);

    constexpr float kHuge = std::numeric_limits<float>::max();
    CHECK(silu(kHuge) == kHuge);
    CHECK(silu(-kHuge) == 0);
    CHECK(silu_gradient(kHuge) == 1);
    CHECK(std::abs(silu_gradient(-kHuge)) <= 1e-32f);
    CHECK(std::isnan(silu(NAN)));
    CHECK(std::isnan(silu_gradient(NAN)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax over more columns than the CPU op processes at a time.

TEST_CASE("cross_entropy: the largest logit is near the beginning, middle or end", "[cross_entropy]") {
    constexpr int kRows = 3, kVocab = 2500, kPadded = 2560;
    std::vector<double> values = random_values(size_t(kRows) * kPadded, 1);
    values[0 * kPadded + 3] = values[1 * kPadded + 1500] = values[2 * kPadded + 2499] = 9;
    Stored<float> logits("logits", Role::output, values);
    Array<float> loss("loss", Role::output, nans(kRows));
    Array<int> targets("targets", Role::input, std::vector<int>{0, 1024, 2499});
    auto op = [&]<class Side>(Side side) {
        return ops::CrossEntropy{.logits = logits.on(side),
                                 .loss = loss.on(side),
                                 .targets = targets.on(side),
                                 .loss_scale = nullptr,
                                 .rows = kRows,
                                 .vocab = kVocab,
                                 .padded_vocab = kPadded,
                                 .grad_scale = 1,
                                 .write_dlogits = true};
    };
    ops::cross_entropy(op(OnDevice<float>()), Stream());
    ref::cross_entropy(op(OnHost()));
    // Storing a loss near 9 rounds it by up to half a unit, 5e-7; logits of size 9 have as large an error before exp.
    check_close(loss, [](size_t) { return 2e-6; });
    check_close(logits, [&](size_t i) { return 1e-6 * std::abs(logits.host[i]) + 1e-7; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Threads.

namespace {

template <class T> Stored<T> input(size_t count, uint64_t seed) {
    return {"input", Role::input, random_values(count, seed)};
}
template <class T> Stored<T> output(size_t count) { return {"output", Role::output, random_values(count, 99)}; }

// Runs the op with 1 to 4 threads from the same start and compares its outputs bit for bit with the outputs of one
// thread. `run` makes its arrays, launches the op and appends the bytes of each output.
using Bytes = std::vector<unsigned char>;
void check_any_number_of_threads(const std::function<void(Bytes&)>& run) {
    const int threads_before = omp_get_max_threads();
    Bytes expected;
    for (int threads = 1; threads <= 4; threads++) {
        omp_set_num_threads(threads);
        Bytes bytes;
        run(bytes);
        if (threads == 1) expected = bytes;
        INFO("threads " << threads);
        CHECK(!bytes.empty());
        CHECK(bytes == expected);
    }
    omp_set_num_threads(threads_before);
}

template <class T, class Host> void append(Bytes& bytes, const Array<T, Host>& array) {
    const std::vector<T> values = array.fetch();
    const auto* begin = reinterpret_cast<const unsigned char*>(values.data());
    bytes.insert(bytes.end(), begin, begin + values.size() * sizeof(T));
}

}  // namespace

TEMPLATE_TEST_CASE("embedding: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    constexpr int kBatch = 3, kSeqLen = 41, kChannels = 37, kVocab = 29, kPositions = 50;
    const OnDevice<T> device;
    auto tokens = Array<int>("tokens", Role::input, random_integers(kBatch * kSeqLen, 3, kVocab));
    auto wte = input<T>(kVocab * kChannels, 1), wpe = input<T>(kPositions * kChannels, 2);
    auto dout = input<T>(kBatch * kSeqLen * kChannels, 4);
    check_any_number_of_threads([&](Bytes& bytes) {
        auto out = output<T>(kBatch * kSeqLen * kChannels);
        ops::embedding_forward(ops::EmbeddingForward{.out = out.on(device),
                                                     .tokens = tokens.on(device),
                                                     .wte = wte.on(device),
                                                     .wpe = wpe.on(device),
                                                     .batch = kBatch,
                                                     .seq_len = kSeqLen,
                                                     .channels = kChannels},
                               Stream());
        auto dwte = output<float>(kVocab * kChannels), dwpe = output<float>(kPositions * kChannels);
        ops::EmbeddingBackward op{.dwte = dwte.on(device),
                                  .dwpe = dwpe.on(device),
                                  .scratch = nullptr,
                                  .dout = dout.on(device),
                                  .tokens = tokens.on(device),
                                  .batch = kBatch,
                                  .seq_len = kSeqLen,
                                  .channels = kChannels,
                                  .vocab = kVocab,
                                  .n_positions = kPositions,
                                  .accumulate = false};
        auto scratch = scratch_of(ops::embedding_backward_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::embedding_backward(op, Stream());
        append(bytes, out), append(bytes, dwte), append(bytes, dwpe);
    });
}

TEMPLATE_TEST_CASE("norm: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    constexpr int kRows = 171, kCols = 100;
    const OnDevice<T> device;
    auto inp = input<T>(kRows * kCols, 1), branch = input<T>(kRows * kCols, 2), dout = input<T>(kRows * kCols, 3);
    auto weight = input<T>(kCols, 4), bias = input<T>(kCols, 5);
    check_any_number_of_threads([&](Bytes& bytes) {
        auto residual = output<T>(kRows * kCols), out = output<T>(kRows * kCols), dinp = output<T>(kRows * kCols);
        auto mean = output<float>(kRows), rstd = output<float>(kRows);
        auto dweight = output<float>(kCols), dbias = output<float>(kCols);
        ops::residual_norm_forward(ops::ResidualNormForward{.residual = residual.on(device),
                                                            .out = out.on(device),
                                                            .mean = mean.on(device),
                                                            .rstd = rstd.on(device),
                                                            .inp = inp.on(device),
                                                            .branch = branch.on(device),
                                                            .weight = weight.on(device),
                                                            .bias = bias.on(device),
                                                            .rows = kRows,
                                                            .cols = kCols,
                                                            .eps = 1e-5f},
                                   Stream());
        ops::NormBackward op{.dinp = dinp.on(device),
                             .dweight = dweight.on(device),
                             .dbias = dbias.on(device),
                             .scratch = nullptr,
                             .dout = dout.on(device),
                             .inp = residual.on(device),
                             .weight = weight.on(device),
                             .mean = mean.on(device),
                             .rstd = rstd.on(device),
                             .rows = kRows,
                             .cols = kCols,
                             .accumulate_dinp = false,
                             .accumulate = true};
        auto scratch = scratch_of(ops::norm_backward_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::norm_backward(op, Stream());
        append(bytes, residual), append(bytes, out), append(bytes, mean), append(bytes, rstd);
        append(bytes, dinp), append(bytes, dweight), append(bytes, dbias);
    });
}

TEMPLATE_TEST_CASE("attention: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    constexpr int kBatch = 2, kSeqLen = 77, kHeads = 6, kKvHeads = 3, kHeadSize = 20;
    constexpr size_t kRows = kBatch * kSeqLen, kQkv = kRows * (kHeads + 2 * kKvHeads) * kHeadSize;
    constexpr size_t kOut = kRows * kHeads * kHeadSize;
    const OnDevice<T> device;
    auto qkv = input<T>(kQkv, 1), dout = input<T>(kOut, 2);
    check_any_number_of_threads([&](Bytes& bytes) {
        auto out = output<T>(kOut), dqkv = output<T>(kQkv);
        auto lse = output<float>(kRows * kHeads);
        ops::attention_forward(ops::AttentionForward{.out = out.on(device),
                                                     .lse = lse.on(device),
                                                     .qkv = qkv.on(device),
                                                     .batch = kBatch,
                                                     .seq_len = kSeqLen,
                                                     .n_head = kHeads,
                                                     .n_kv_head = kKvHeads,
                                                     .head_size = kHeadSize,
                                                     .scale = 0.3f,
                                                     .window = 50},
                               Stream());
        ops::AttentionBackward op{.dqkv = dqkv.on(device),
                                  .scratch = nullptr,
                                  .dout = dout.on(device),
                                  .qkv = qkv.on(device),
                                  .out = out.on(device),
                                  .lse = lse.on(device),
                                  .batch = kBatch,
                                  .seq_len = kSeqLen,
                                  .n_head = kHeads,
                                  .n_kv_head = kKvHeads,
                                  .head_size = kHeadSize,
                                  .scale = 0.3f,
                                  .window = 50};
        auto scratch = scratch_of(ops::attention_backward_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::attention_backward(op, Stream());
        append(bytes, out), append(bytes, lse), append(bytes, dqkv);
    });
}

TEMPLATE_TEST_CASE("cross_entropy: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    constexpr int kRows = 23, kVocab = 1100, kPadded = 1152;
    const OnDevice<T> device;
    auto targets = Array<int>("targets", Role::input, random_integers(kRows, 3, kVocab));
    check_any_number_of_threads([&](Bytes& bytes) {
        auto logits = output<T>(kRows * kPadded);
        auto loss = output<float>(kRows);
        Array<double> sum("sum", Role::output, std::vector<double>{0.5});
        ops::cross_entropy(ops::CrossEntropy{.logits = logits.on(device),
                                             .loss = loss.on(device),
                                             .targets = targets.on(device),
                                             .loss_scale = nullptr,
                                             .rows = kRows,
                                             .vocab = kVocab,
                                             .padded_vocab = kPadded,
                                             .grad_scale = 0.1f,
                                             .write_dlogits = true},
                           Stream());
        ops::loss_sum({.out = sum.on(device), .loss = loss.on(device), .rows = kRows, .accumulate = true}, Stream());
        append(bytes, logits), append(bytes, loss), append(bytes, sum);
    });
}

TEMPLATE_TEST_CASE("update: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    // The second chunk starts at an odd offset, so it is divided into vectors differently from the first one.
    const std::vector<ops::Chunk> cut{
        {.begin = 0, .count = 1001, .tensor = 0, .index = 0, .group = 0, .state_begin = 3},
        {.begin = 1001, .count = 517, .tensor = 1, .index = 1, .group = 0, .state_begin = 1004},
        {.begin = 1600, .count = 4093, .tensor = 2, .index = 2, .group = 0, .state_begin = 1603}};
    constexpr size_t kCount = 6000;
    const OnDevice<T> device;
    auto grad = input<float>(kCount, 1);
    Array<ops::Chunk> chunks("chunks", Role::input, cut);
    Array<float> loss_scale("loss_scale", Role::input, std::vector<float>{1});
    Array<ops::UpdateScalars> scalars(
        "scalars", Role::input,
        std::vector<ops::UpdateScalars>{update_scalars(OptimizerSettings(), {OptimizerKind::adamw, 0.1}, 1e-3, 2)});
    const int n_chunks = int(cut.size());
    check_any_number_of_threads([&](Bytes& bytes) {
        auto master = output<float>(kCount), m = output<float>(kCount);
        auto v = Array<float>("v", Role::output, absolute(random_values(kCount, 5)));
        auto param = output<T>(kCount);
        Array<double> sums("sums", Role::output, std::vector<double>(3 * ops::kSquareEntries));
        Array<ops::GradNorm> norm("norm", Role::output, std::vector<ops::GradNorm>(1));
        ops::squared_sums({sums.on(device), grad.on(device), chunks.on(device), n_chunks}, Stream());
        ops::grad_norm_finish({.out = norm.on(device),
                               .sums = sums.on(device),
                               .loss_scale = loss_scale.on(device),
                               .n_tensors = 3,
                               .clip = 1.0f},
                              Stream());
        for (const OptimizerKind rule : {OptimizerKind::adamw, OptimizerKind::sgd}) {
            const bool has_v = optimizer_row(rule).slots.size() > 1;
            ops::elementwise_update({.rule = rule,
                                     .master = master.on(device),
                                     .param = param.on(device),
                                     .state = {m.on(device), has_v ? v.on(device) : nullptr},
                                     .grad = grad.on(device),
                                     .chunks = chunks.on(device),
                                     .scalars = scalars.on(device),
                                     .grad_norm = norm.on(device),
                                     .n_chunks = n_chunks},
                                    Stream());
            append(bytes, master), append(bytes, m), append(bytes, v), append(bytes, param);
        }
        auto direction = output<T>(kCount);
        ops::momentum_direction({.direction = direction.on(device),
                                 .m = m.on(device),
                                 .grad = grad.on(device),
                                 .chunks = chunks.on(device),
                                 .scalars = scalars.on(device),
                                 .grad_norm = norm.on(device),
                                 .n_chunks = n_chunks,
                                 .nesterov = true},
                                Stream());
        ops::apply_direction({.master = master.on(device),
                              .param = param.on(device),
                              .direction = direction.on(device),
                              .chunks = chunks.on(device),
                              .scalars = scalars.on(device),
                              .grad_norm = norm.on(device),
                              .n_chunks = n_chunks,
                              .cautious = true},
                             Stream());
        append(bytes, direction), append(bytes, m), append(bytes, master), append(bytes, param);
        append(bytes, sums), append(bytes, norm);
    });
}

TEMPLATE_TEST_CASE("flat arrays: any number of threads gives the same bits", "[threads]", float, bf16, fp16) {
    using T = TestType;
    constexpr size_t kCount = 100'003;  // several blocks
    const OnDevice<T> device;
    auto inp = input<T>(kCount, 1);
    check_any_number_of_threads([&](Bytes& bytes) {
        auto normal = output<float>(kCount);
        auto gelu_of_inp = output<T>(kCount), rounded = output<T>(kCount);
        ops::normal_fill({normal.on(device), kCount, 7, 1, 0.02f, 0}, Stream());
        ops::cast(ops::Cast{rounded.on(device), normal.on(device), kCount}, Stream());
        ops::activation_forward(ops::ActivationForward{gelu_of_inp.on(device), inp.on(device), kCount}, Stream());
        append(bytes, normal), append(bytes, rounded), append(bytes, gelu_of_inp);
        auto normalized = output<T>(kCount), sum = output<T>(kCount);
        ops::FrobeniusNormalize op{normalized.on(device), inp.on(device), nullptr, kCount, 1e-7f};
        auto scratch = scratch_of(ops::frobenius_normalize_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::frobenius_normalize(op, Stream());
        ops::scaled_add({sum.on(device), normal.on(device), inp.on(device), kCount, 0.5f, -2}, Stream());
        append(bytes, normalized), append(bytes, sum);
    });
}

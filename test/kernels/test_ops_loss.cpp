// cross_entropy and loss_sum against ref::.
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int rows, vocab, padded_vocab;
    double width;   // logits lie in (-width, width); 200 overflows exp unless the largest is subtracted
    int shift = 0;  // of the logits, in elements
};
constexpr Shape kShapes[] = {{1, 5, 5, 1},       {37, 5, 128, 200},    {37, 257, 384, 4},
                             {130, 257, 257, 4}, {37, 1000, 1024, 4},  {3, 1000, 1001, 200},
                             {5, 3000, 3072, 4}, {3, 3000, 3072, 200}, {2, 3001, 3072, 4, 1}};
// Longer than one pass of a block's threads, and longer than a GPU's shared memory in each type.
constexpr Shape kLongShapes[] = {{2, 20001, 20096, 20}, {2, 50257, 50304, 20}, {1, 60001, 60003, 20}};

// The padding is NaN, so any read of it shows.
std::vector<double> padded_logits(const Shape& s) {
    std::vector<double> logits = random_values(size_t(s.rows) * s.padded_vocab, 1, s.width);
    for (size_t i = 0; i < logits.size(); i++)
        if (int(i % s.padded_vocab) >= s.vocab) logits[i] = NAN;
    return logits;
}

// Row 1 and every fifth after it have no target.
std::vector<int> targets_with_gaps(const Shape& s) {
    std::vector<int> targets = random_integers(s.rows, 2, s.vocab);
    for (int row = 1; row < s.rows; row += 5) targets[row] = -1;
    return targets;
}

}  // namespace

template <class T>
static void test_cross_entropy(const Shape& s, bool write_dlogits, bool with_loss_scale, float softcap = 0,
                               float z_loss = 0) {
    INFO("rows " << s.rows << ", vocab " << s.vocab << ", padded_vocab " << s.padded_vocab << ", shift " << s.shift
                 << ", write_dlogits " << write_dlogits << ", loss_scale " << with_loss_scale << ", softcap " << softcap
                 << ", z_loss " << z_loss);
    Stored<T> logits("logits", Role::output, padded_logits(s), s.shift);
    Array<float> loss("loss", Role::output, nans(s.rows));
    Array<int> targets("targets", Role::input, targets_with_gaps(s));
    Array<float> loss_scale("loss_scale", Role::input, std::vector<float>{1024});
    auto op = [&]<class Side>(Side side) {
        return ops::CrossEntropy{.logits = logits.on(side),
                                 .loss = loss.on(side),
                                 .targets = targets.on(side),
                                 .loss_scale = with_loss_scale ? loss_scale.on(side) : nullptr,
                                 .rows = s.rows,
                                 .vocab = s.vocab,
                                 .padded_vocab = s.padded_vocab,
                                 .grad_scale = 1.0f / float(s.rows),
                                 .write_dlogits = write_dlogits,
                                 .softcap = softcap,
                                 .z_loss = z_loss};
    };
    const std::vector<double> logits_before = logits.host;
    std::vector<T> before = logits.fetch();
    ops::cross_entropy(op(OnDevice<T>()), Stream());
    ref::cross_entropy(op(OnHost()));

    // Differences of logits round relative to their terms; exp, log and the sum over the vocabulary add their errors.
    // A capped logit is at most the cap and has a tanh's error relative to it.
    const double width = softcap > 0 ? std::min<double>(s.width, softcap) : s.width;
    double argument_error = 4 * kRoundoff * (width + std::log(s.vocab)) + 2 * kFunctionError * softcap;
    double sum_error = summation_error(s.vocab) + 2 * kFunctionError;
    check_close(loss, [&](size_t row) { return argument_error + sum_error + stored_error_fp32(loss.host[row]); });
    if (!write_dlogits) {
        check_same_bits(logits, before);
        return;
    }
    // probability (1 + 2 z_loss lse) - (v is target), times the cap's derivative 1 - tanh^2 and the scale. The lse has
    // the loss's error, the derivative a tanh's.
    double scale = (with_loss_scale ? 1024.0 : 1.0) / s.rows;
    check_close(logits, [&](size_t i) {
        bool is_target = targets.host[i / s.padded_vocab] == int(i % s.padded_vocab);
        const double tanh = softcap > 0 ? std::tanh(logits_before[i] / softcap) : 0, slope = 1 - tanh * tanh;
        const double boosted = slope > 0 ? logits.host[i] / scale / slope + is_target : 1;  // the probability term
        const double difference_error = std::abs(boosted) * 2 * (argument_error + sum_error) +
                                        2 * z_loss * (argument_error + sum_error) +
                                        3 * kRoundoff * std::abs(logits.host[i]) / scale;
        const double slope_error = softcap > 0 ? 2 * kFunctionError * (std::abs(boosted) + is_target) : 0;
        return scale * (difference_error + slope_error) + stored_error<T>(logits.host[i]);
    });
    std::vector<T> dlogits = logits.fetch();
    size_t not_zero = 0;
    for (size_t i = 0; i < dlogits.size(); i++) {
        bool is_padding = int(i % s.padded_vocab) >= s.vocab;
        if (is_padding || targets.host[i / s.padded_vocab] < 0) not_zero += !(ref::load(dlogits[i]) == 0);
    }
    INFO("elements of the padding and of rows without a target that are not 0");
    CHECK(not_zero == 0);
}

TEMPLATE_TEST_CASE("cross_entropy", "[ops]", float, bf16, fp16) {
    auto test = [](const Shape& s, bool write_dlogits, bool with_loss_scale) {
        test_cross_entropy<TestType>(s, write_dlogits, with_loss_scale);
    };
    for (const Shape& s : kShapes)
        for (bool write_dlogits : {false, true})
            for (bool with_loss_scale : {false, true}) test(s, write_dlogits, with_loss_scale);
    for (const Shape& s : kLongShapes) test(s, true, false);
}

// Caps below, near and above the logits, and a z-loss that contributes visibly to the gradient.
TEMPLATE_TEST_CASE("cross_entropy: soft cap and z-loss", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes)
        for (auto [softcap, z_loss] : {std::pair(2.5f, 0.0f), {15.0f, 0.0f}, {0.0f, 0.01f}, {30.0f, 0.02f}})
            test_cross_entropy<TestType>(s, true, s.rows > 5, softcap, z_loss);
    test_cross_entropy<TestType>(kShapes[3], false, false, 2.5f, 0.02f);
    test_cross_entropy<TestType>(kLongShapes[2], true, false, 15, 0.02f);
}

// The loss has the same bits with and without gradients: training and evaluation agree.
TEMPLATE_TEST_CASE("cross_entropy: the loss does not depend on write_dlogits", "[ops]", float, bf16, fp16) {
    using T = TestType;
    const Shape s{3, 3000, 3072, 20};
    std::vector<float> losses[2];
    for (bool write_dlogits : {false, true}) {
        Stored<T> logits("logits", Role::output, padded_logits(s));
        Array<float> loss("loss", Role::output, nans(s.rows));
        Array<int> targets("targets", Role::input, targets_with_gaps(s));
        OnDevice<T> device;
        ops::cross_entropy(ops::CrossEntropy{.logits = logits.on(device),
                                             .loss = loss.on(device),
                                             .targets = targets.on(device),
                                             .loss_scale = nullptr,
                                             .rows = s.rows,
                                             .vocab = s.vocab,
                                             .padded_vocab = s.padded_vocab,
                                             .grad_scale = 1,
                                             .write_dlogits = write_dlogits},
                           Stream());
        losses[write_dlogits] = loss.fetch();
    }
    CHECK(losses[0] == losses[1]);
}

// A NaN or infinite logit must show in the loss and in the gradients; taking a maximum must not hide it.
TEST_CASE("cross_entropy: logits that are not finite", "[ops]") {
    for (float bad : {NAN, INFINITY})
        for (int place : {0, 100, 256}) {
            INFO("a logit of " << bad << " at " << place);
            std::vector<double> values = random_values(257, 1, 4);
            values[size_t(place)] = bad;
            Stored<float> logits("logits", Role::output, values);
            Array<float> loss("loss", Role::output, std::vector<float>{0});
            Array<int> targets("targets", Role::input, std::vector<int>{7});
            OnDevice<float> device;
            ops::cross_entropy(ops::CrossEntropy{.logits = logits.on(device),
                                                 .loss = loss.on(device),
                                                 .targets = targets.on(device),
                                                 .loss_scale = nullptr,
                                                 .rows = 1,
                                                 .vocab = 257,
                                                 .padded_vocab = 257,
                                                 .grad_scale = 1,
                                                 .write_dlogits = true},
                               Stream());
            CHECK(!std::isfinite(loss.fetch()[0]));
            CHECK(!std::isfinite(logits.fetch()[size_t(place)]));
        }
}

// A loss scale beyond FP16's range gives infinite gradients, which the gradient norm detects; the loss stays correct.
TEST_CASE("cross_entropy: fp16 overflow is infinity", "[ops]") {
    Stored<fp16> logits("logits", Role::output, std::vector<double>{0, 0});
    Array<float> loss("loss", Role::output, nans(1));
    Array<int> targets("targets", Role::input, std::vector<int>{1});
    Array<float> loss_scale("loss_scale", Role::input, std::vector<float>{0x1p18f});
    OnDevice<fp16> device;
    ops::cross_entropy(ops::CrossEntropy{.logits = logits.on(device),
                                         .loss = loss.on(device),
                                         .targets = targets.on(device),
                                         .loss_scale = loss_scale.on(device),
                                         .rows = 1,
                                         .vocab = 2,
                                         .padded_vocab = 2,
                                         .grad_scale = 1,
                                         .write_dlogits = true},
                       Stream());
    std::vector<fp16> dlogits = logits.fetch();
    CHECK(to_float(dlogits[0]) == INFINITY);
    CHECK(to_float(dlogits[1]) == -INFINITY);
    CHECK(std::abs(loss.fetch()[0] - std::log(2.0)) <= summation_error(2) + 2 * kFunctionError);
}

// Sums of float numbers in double: float sums would be off by far more than this bound.
TEST_CASE("loss_sum", "[ops]") {
    for (int rows : {1, 7, 130, 5000})
        for (bool accumulate : {false, true}) {
            INFO("rows " << rows << ", accumulate " << accumulate);
            Array<double> out("out", Role::output, std::vector<double>{accumulate ? 12.5 : NAN});
            Array<float> loss("loss", Role::input, random_values(rows, 1, 5, 5));
            auto op = [&](auto side) {
                return ops::LossSum{.out = out.on(side), .loss = loss.on(side), .rows = rows, .accumulate = accumulate};
            };
            ops::loss_sum(op(OnDevice<float>()), Stream());
            ref::loss_sum(op(OnHost()));
            check_close(out, [&](size_t) { return 2 * (rows + 2) * 0x1p-53 * out.host[0]; });
        }
}

// cross_entropy, also of parts of the vocabulary, and loss_sum against ref::.
#include <list>

#include "test/support/arch_kernels.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int rows, vocab, padded_vocab;
    double width;   // logits lie in (-width, width); 200 overflows exp unless the largest is subtracted
    int shift = 0;  // of the logits, in elements
};
constexpr Shape kShapes[] = {{1, 5, 5, 1},       {7, 5, 128, 200},     {7, 257, 384, 4},
                             {37, 257, 257, 4},  {7, 1000, 1024, 4},   {3, 1000, 1001, 200},
                             {5, 3000, 3072, 4}, {3, 3000, 3072, 200}, {2, 3001, 3072, 4, 1}};
// Longer than one pass of a block's threads, and longer than a GPU's shared memory in each type.
constexpr Shape kLongShapes[] = {{2, 20001, 20096, 20}, {2, 50257, 50304, 20}, {1, 60001, 60003, 20}};
// Two and more blocks' shared memory, with whole packs.
constexpr Shape kClusterShapes[] = {{3, 50625, 50632, 20}, {2, 101256, 101256, 200}};

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

// Arithmetic errors of a loss and its gradients.
struct LossErrors {
    double softcap, z_loss;
    double lse;  // absolute; also the loss's

    // Differences of logits round relative to their terms; exp, log and the sum over the vocabulary add their errors.
    // A capped logit is at most the cap and has a tanh's error relative to it.
    LossErrors(const Shape& s, double cap, double weight) : softcap(cap), z_loss(weight) {
        const double width = cap > 0 ? std::min<double>(s.width, cap) : s.width;
        const double argument_error = 4 * kRoundoff * (width + std::log(s.vocab)) + 2 * kFunctionError * cap;
        lse = argument_error + summation_error(s.vocab) + 2 * kFunctionError;
    }

    // probability (1 + 2 z_loss lse) - (v is target), times the cap's derivative 1 - tanh^2 and the scale. The
    // derivative has a tanh's error. A GPU may return 0 for a probability below 2^-126.
    template <class T> double of_gradient(double gradient, double logit, bool is_target, double scale) const {
        const double tanh = softcap > 0 ? std::tanh(logit / softcap) : 0, slope = 1 - tanh * tanh;
        const double boosted = slope > 0 ? gradient / scale / slope + is_target : 1;  // the probability term
        const double difference_error =
            std::abs(boosted) * 2 * lse + 2 * z_loss * lse + 3 * kRoundoff * std::abs(gradient) / scale + 0x1p-126;
        const double slope_error = softcap > 0 ? 2 * kFunctionError * (std::abs(boosted) + is_target) : 0;
        return scale * (difference_error + slope_error) + stored_error<T>(gradient);
    }
};

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

    const LossErrors errors(s, softcap, z_loss);
    check_close(loss, [&](size_t row) { return errors.lse + stored_error_fp32(loss.host[row]); });
    if (!write_dlogits) {
        check_same_bits(logits, before);
        return;
    }
    const double scale = (with_loss_scale ? 1024.0 : 1.0) / s.rows;
    check_close(logits, [&](size_t i) {
        const bool is_target = targets.host[i / s.padded_vocab] == int(i % s.padded_vocab);
        return errors.of_gradient<T>(logits.host[i], logits_before[i], is_target, scale);
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

template <class T> static std::vector<float> losses(const Shape& s, bool write_dlogits) {
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
    return loss.fetch();
}

// The loss has the same bits with and without gradients: training and evaluation agree.
TEMPLATE_TEST_CASE("cross_entropy: the loss does not depend on write_dlogits", "[ops]", float, bf16, fp16) {
    const Shape s{3, 3000, 3072, 20};
    CHECK(losses<TestType>(s, false) == losses<TestType>(s, true));
}

TEMPLATE_TEST_CASE("cross_entropy with kernels for this GPU", "[arch]", float, bf16, fp16) {
    const WithArchKernels used(arch_kernels());
    for (const Shape& s : kClusterShapes) test_cross_entropy<TestType>(s, true, true);
    const Shape& s = kClusterShapes[0];
    test_cross_entropy<TestType>(s, false, false);
    test_cross_entropy<TestType>(s, true, false, 15, 0.02f);
    CHECK(losses<TestType>(s, false) == losses<TestType>(s, true));
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

namespace {

// A vocabulary of `vocab` tokens, divided into parts of `width` columns. The last parts may have padding.
struct Division {
    int rows, vocab, parts, width;
    double range = 4;    // logits lie in (-range, range)
    double step = 0;     // added to the logits of part p: p step
    int row_length = 0;  // columns of a part's logits; 0: width

    int first(int part) const { return part * width; }
    int tokens(int part) const { return std::clamp(vocab - first(part), 0, width); }
    int columns() const { return row_length ? row_length : width; }
};
// Parts with padding, and parts of nothing else; widths that are aligned or odd; a part that is longer than one pass of
// a block's threads; parts whose sums underflow next to the largest.
constexpr Division kDivisions[] = {{7, 40, 8, 5, 4, 0, 8},   {7, 5, 1, 5, 200},
                                   {7, 5, 8, 1, 200},        {37, 257, 2, 192},
                                   {7, 257, 4, 65, 200},     {5, 1000, 8, 128},
                                   {5, 1000, 8, 128, 4, 60}, {5, 1000, 8, 128, 4, -60},
                                   {3, 3000, 8, 512, 200},   {3, 3001, 4, 768, 4, 0, 771},
                                   {1, 40001, 2, 20032, 20}};

// The logits of a part, with NaN in the padding, from the logits of the whole vocabulary.
std::vector<double> logits_of_part(const Division& d, int part, const std::vector<double>& whole) {
    std::vector<double> logits = nans(size_t(d.rows) * d.columns());
    for (int row = 0; row < d.rows; row++)
        std::copy_n(whole.begin() + ptrdiff_t(row) * d.vocab + d.first(part), d.tokens(part),
                    logits.begin() + ptrdiff_t(row) * d.columns());
    return logits;
}

template <class T> struct Parts {
    Division d;
    float softcap, z_loss;
    Stored<T> whole;
    std::list<Stored<T>> logits;
    Array<int> targets{"targets", Role::input, targets_with_gaps({d.rows, d.vocab, d.vocab, d.range})};
    Array<ops::VocabularySums> sums{"sums", Role::output,
                                    std::vector<ops::VocabularySums>(size_t(d.parts) * d.rows, {NAN, NAN, NAN})};
    std::vector<std::vector<float>> losses;  // of each part's cross_entropy

    Parts(const Division& division, float cap = 0, float weight = 0, std::pair<int, double> changed = {-1, 0})
        : d(division), softcap(cap), z_loss(weight), whole("whole", Role::output, logits_of(d, changed)) {
        for (int p = 0; p < d.parts; p++) logits.emplace_back("logits", Role::output, logits_of_part(d, p, whole.host));
    }

    static std::vector<double> logits_of(const Division& d, std::pair<int, double> changed) {
        std::vector<double> values = random_values(size_t(d.rows) * d.vocab, 1, d.range);
        for (size_t i = 0; i < values.size(); i++) values[i] += d.step * int(i % size_t(d.vocab) / size_t(d.width));
        if (changed.first >= 0) values[size_t(changed.first)] = changed.second;
        return values;
    }

    template <class Side> ops::VocabularySumsOfRows sums_op(Side side, int part, Stored<T>& of_part) {
        return {.out = sums.on(side) + size_t(part) * d.rows,
                .logits = of_part.on(side),
                .targets = targets.on(side),
                .rows = d.rows,
                .vocab = d.tokens(part),
                .padded_vocab = d.columns(),
                .first_token = d.first(part),
                .softcap = softcap};
    }

    ops::CrossEntropy op_of_whole(float* loss) {
        return {.logits = whole.on(OnHost()),
                .loss = loss,
                .targets = targets.on(OnHost()),
                .loss_scale = nullptr,
                .rows = d.rows,
                .vocab = d.vocab,
                .padded_vocab = d.vocab,
                .grad_scale = 1.0f / float(d.rows),
                .write_dlogits = true,
                .softcap = softcap,
                .z_loss = z_loss};
    }

    void run() {
        const OnDevice<T> device;
        int part = 0;
        for (Stored<T>& of_part : logits) ops::vocabulary_sums(sums_op(device, part++, of_part), Stream());
        part = 0;
        for (Stored<T>& of_part : logits) {
            Array<float> loss("loss", Role::output, nans(size_t(d.rows)));
            ops::CrossEntropy op = op_of_whole(loss.on(device));
            op.logits = of_part.on(device);
            op.targets = targets.on(device);
            op.vocab = d.tokens(part);
            op.padded_vocab = d.columns();
            op.sums = sums.on(device);
            op.parts = d.parts;
            op.first_token = d.first(part++);
            ops::cross_entropy(op, Stream());
            losses.push_back(loss.fetch());
        }
    }
};

}  // namespace

// Compares losses and gradients with ref:: on the whole vocabulary.
template <class T> static void test_parts(const Division& d, float softcap, float z_loss) {
    INFO("rows " << d.rows << ", vocab " << d.vocab << ", " << d.parts << " parts of " << d.width << ", range "
                 << d.range << ", step " << d.step << ", softcap " << softcap << ", z_loss " << z_loss);
    Parts<T> parts(d, softcap, z_loss);
    const std::vector<double> before = parts.whole.host;
    Array<float> loss("loss", Role::output, nans(size_t(d.rows)));
    ref::cross_entropy(parts.op_of_whole(loss.host.data()));
    parts.run();
    const double range = d.range + std::abs(d.step) * (d.parts - 1);
    LossErrors errors({d.rows, d.vocab, d.vocab, range}, softcap, z_loss);
    errors.lse += 2 * kRoundoff * range + kFunctionError + summation_error(d.parts);  // the rescaled sums
    for (const std::vector<float>& of_part : parts.losses) {
        CHECK(of_part == parts.losses[0]);
        for (size_t row = 0; row < of_part.size(); row++)
            CHECK(std::abs(of_part[row] - loss.host[row]) <= errors.lse + stored_error_fp32(loss.host[row]));
    }
    int part = 0;
    for (Stored<T>& logits : parts.logits) {
        INFO("part " << part);
        logits.host = logits_of_part(d, part, parts.whole.host);
        const std::vector<double> logits_before = logits_of_part(d, part, before);
        for (double& value : logits.host)
            if (std::isnan(value)) value = 0;  // the padding
        check_close(logits, [&](size_t i) {
            const int row = int(i) / d.columns(), column = int(i) % d.columns();
            if (column >= d.tokens(part) || parts.targets.host[size_t(row)] < 0) return 0.0;
            const bool is_target = parts.targets.host[size_t(row)] == d.first(part) + column;
            return errors.of_gradient<T>(logits.host[i], logits_before[i], is_target, 1.0 / d.rows);
        });
        part++;
    }
}

TEMPLATE_TEST_CASE("cross_entropy of parts of the vocabulary", "[ops]", float, bf16, fp16) {
    for (const Division& d : kDivisions) test_parts<TestType>(d, d.rows > 5 ? 30 : 0, d.rows > 5 ? 0.02f : 0);
    test_parts<TestType>(kDivisions[3], 0, 0);
    test_parts<TestType>(kDivisions[6], 30, 0.02f);
}

// ref::'s sums have one rounding. Logits stay as they are.
TEMPLATE_TEST_CASE("vocabulary_sums", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Division& d : kDivisions)
        for (float softcap : d.rows == 3 ? std::vector{15.0f} : std::vector{0.0f, 15.0f}) {
            INFO("rows " << d.rows << ", vocab " << d.vocab << ", " << d.parts << " parts of " << d.width
                         << ", softcap " << softcap);
            Parts<T> parts(d, softcap);
            int part = 0;
            for (Stored<T>& logits : parts.logits) {
                const std::vector<T> before = logits.fetch();
                ops::vocabulary_sums(parts.sums_op(OnDevice<T>(), part, logits), Stream());
                ref::vocabulary_sums(parts.sums_op(OnHost(), part++, logits));
                check_same_bits(logits, before);
            }
            const LossErrors errors({d.rows, d.vocab, d.vocab, d.range + std::abs(d.step) * d.parts}, softcap, 0);
            const std::vector<ops::VocabularySums> sums = parts.sums.fetch();
            const double logit_error = 2 * kFunctionError * double(softcap);
            size_t wrong = 0;
            for (size_t i = 0; i < sums.size(); i++) {
                const auto& [max, sum, target] = parts.sums.host[i];
                wrong += !(sums[i].max == max || std::abs(sums[i].max - max) <= logit_error);
                wrong += !(std::abs(sums[i].sum - sum) <= errors.lse * double(sum));
                wrong += !(std::abs(sums[i].target - target) <= logit_error);
            }
            CHECK(wrong == 0);
        }
}

namespace {

float sum_as_tree(const float* terms, int n) {
    if (n == 1) return terms[0];
    int left = 1;
    while (2 * left < n) left *= 2;
    return sum_as_tree(terms, left) + sum_as_tree(terms + left, n - left);
}

}  // namespace

// Sums near 1, whose logarithm shows the last bit.
TEST_CASE("cross_entropy adds the sums of parts in the order of a tree", "[ops]") {
    for (int parts : {1, 2, 3, 4, 5, 8, 13, 32, 33, 100, 600}) {
        INFO(parts << " parts");
        std::vector<ops::VocabularySums> sums;
        std::vector<float> terms;
        for (double value : random_values(size_t(parts), 7, 1.0 / parts, 1.0 / parts)) {
            terms.push_back(float(value));
            sums.push_back({.max = 0, .sum = float(value), .target = 0});
        }
        Array<ops::VocabularySums> of_parts("sums", Role::input, sums);
        Array<float> loss("loss", Role::output, nans(1)), logits("logits", Role::output, nans(1));
        Array<int> targets("targets", Role::input, std::vector<int>{3});
        const OnDevice<float> device;
        ops::cross_entropy(ops::CrossEntropy{.logits = logits.on(device),
                                             .loss = loss.on(device),
                                             .targets = targets.on(device),
                                             .loss_scale = nullptr,
                                             .rows = 1,
                                             .vocab = 1,
                                             .padded_vocab = 1,
                                             .grad_scale = 1,
                                             .write_dlogits = false,
                                             .sums = of_parts.on(device),
                                             .parts = parts,
                                             .first_token = 0},
                           Stream());
        CHECK(loss.fetch()[0] == float(std::log(double(sum_as_tree(terms.data(), parts)))));
    }
}

// The loss of every part and the gradient of the logit must show it, wherever the logit is.
TEST_CASE("cross_entropy of parts: logits that are not finite", "[ops]") {
    for (float bad : {NAN, INFINITY})
        for (int place : {0, 70, 256}) {
            INFO("a logit of " << bad << " at " << place);
            Parts<float> parts({1, 257, 4, 65}, 0, 0, {place, bad});
            parts.run();
            for (const std::vector<float>& loss : parts.losses) CHECK(!std::isfinite(loss[0]));
            CHECK(!std::isfinite(std::next(parts.logits.begin(), place / 65)->fetch()[size_t(place % 65)]));
        }
}

// The sum is exact, in whatever order it is added.
TEST_CASE("loss_sum", "[ops]") {
    for (int rows : {1, 7, 130, 5000})
        for (bool accumulate : {false, true}) {
            const double width = accumulate ? 5 : 0.05;  // small losses have digits below 2^-26
            INFO("rows " << rows << ", accumulate " << accumulate);
            Array<double> out("out", Role::output, std::vector<double>{accumulate ? 12.5 : NAN});
            Array<float> loss("loss", Role::input, random_values(rows, 1, width, width));
            auto op = [&](auto side) {
                return ops::LossSum{.out = out.on(side), .loss = loss.on(side), .rows = rows, .accumulate = accumulate};
            };
            ops::loss_sum(op(OnDevice<float>()), Stream());
            ref::loss_sum(op(OnHost()));
            check_close(out, [](size_t) { return 0; });
        }
}

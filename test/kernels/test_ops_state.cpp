// Optimizer state and master weights in bf16: stochastic rounding, its random bits, and the ops that round.
#include <cfloat>
#include <cstddef>

#include "kernels/base/rounding.h"
#include "kernels/shared/update_rules.h"
#include "test/reference/rounding.h"
#include "test/reference/update_rules.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/update_chunks.h"

namespace {

constexpr uint32_t kDraws = 1 << 16;
constexpr uint64_t kSeed = 1234, kUpdate = 17;
constexpr int kArrays[] = {0, 1, ref::kMasterArray};

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

}  // namespace

TEST_CASE("round_stochastically adds the random bits to those that bf16 cuts off", "[numeric]") {
    std::vector<float> values = {0.0f, 1.0f, -1.0f, 1.00001f, 0.1f, 0x1.fep127f, 0x1.ffp127f, 0x1.fdfffep127f, FLT_MAX};
    values.insert(values.end(), {FLT_MIN, 0x1p-133f, 0x1p-134f, 0x1p-149f, 0x1.fffffep-127f, INFINITY});
    for (const double value : random_values(100, 1, 3)) values.push_back(float(value));
    for (const float value : values)
        for (const float x : {value, -value}) {
            INFO(x);
            double sum = 0;
            bool is_equal = true;
            for (uint32_t random = 0; random < kDraws; random++) {
                const float rounded = to_float(round_stochastically<bf16>(x, random));
                is_equal = is_equal && bits_of(rounded) == bits_of(float(ref::rounded_to_bf16(x, random)));
                sum += double(rounded) / kDraws;
            }
            CHECK(is_equal);
            if (std::abs(x) <= 0x1.fep127f) CHECK(sum == double(x));
        }
}

TEST_CASE("round_stochastically keeps NaN", "[numeric]") {
    for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff80ffffu, 0xffffffffu, 0x7fc00000u})
        for (const uint32_t random : {0u, 1u, 0xffffu}) {
            CHECK(std::isnan(to_float(round_stochastically<bf16>(std::bit_cast<float>(nan), random))));
            CHECK(bits_of(round_stochastically<float>(std::bit_cast<float>(nan), random)) == nan);
        }
}

namespace {

uint32_t random_bits(uint64_t update, int tensor, uint32_t element, int array) {
    const bool of_master = array == ref::kMasterArray;
    const ops::RoundingBits random(ops::rounding_key(kSeed, update), tensor, of_master);
    return random.of(element) >> (of_master ? 0 : 16 * array) & 0xffffu;
}

// Whether numbers of 16 bits are uniform, by Pearson's test of their high and of their low halves: within 6 standard
// deviations of the mean of chi squared.
void check_uniform(const std::vector<uint32_t>& numbers) {
    for (const int shift : {0, 8}) {
        std::vector<double> counts(256);
        for (const uint32_t number : numbers) counts[number >> shift & 0xffu]++;
        const double expected = double(numbers.size()) / 256;
        double chi_squared = 0;
        for (const double count : counts) chi_squared += (count - expected) * (count - expected) / expected;
        CHECK(chi_squared < 255 + 6 * std::sqrt(2.0 * 255));
    }
}

// Whether two sequences are uncorrelated: within 5 standard deviations.
void check_uncorrelated(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += (a[i] / 65535.0 - 0.5) * (b[i] / 65535.0 - 0.5);
    CHECK(std::abs(sum / double(a.size()) * 12) < 5 / std::sqrt(double(a.size())));
}

template <class Draw> std::vector<uint32_t> drawn(Draw draw) {
    std::vector<uint32_t> numbers(kDraws);
    for (uint32_t i = 0; i < kDraws; i++) numbers[i] = draw(i);
    return numbers;
}

}  // namespace

TEST_CASE("the random bits of stochastic rounding are uniform and uncorrelated", "[numeric]") {
    for (const int array : kArrays) {
        const auto base = drawn([&](uint32_t i) { return random_bits(kUpdate, 3, i, array); });
        check_uniform(base);
        const auto of_updates = drawn([&](uint32_t i) { return random_bits(i + 1, 3, 5, array); });
        check_uniform(of_updates);
        check_uniform(drawn([&](uint32_t i) { return random_bits(kUpdate, int(i), 5, array); }));
        for (const int other : kArrays)
            if (other != array)
                check_uncorrelated(base, drawn([&](uint32_t i) { return random_bits(kUpdate, 3, i, other); }));
        check_uncorrelated(base, drawn([&](uint32_t i) { return random_bits(kUpdate + 1, 3, i, array); }));
        check_uncorrelated(base, drawn([&](uint32_t i) { return random_bits(kUpdate, 4, i, array); }));
        check_uncorrelated(of_updates, drawn([&](uint32_t i) { return random_bits(i + 2, 3, 5, array); }));
        check_uncorrelated(of_updates, drawn([&](uint32_t i) { return random_bits(i + 1, 3, 6, array); }));
        for (uint32_t distance = 1; distance < kDraws; distance *= 2)
            check_uncorrelated(base, drawn([&](uint32_t i) { return random_bits(kUpdate, 3, i + distance, array); }));
    }
}

TEST_CASE("the random bits of stochastic rounding are those that the documentation defines", "[numeric]") {
    for (const uint64_t update : {1, 2, 1000000})
        for (const int tensor : {0, 7})
            for (const uint64_t element : {0ull, 1ull, 12345ull, 4294967295ull, 4294967296ull})
                for (const int array : kArrays)
                    CHECK(random_bits(update, tensor, uint32_t(element), array) ==
                          ref::rounding_bits(kSeed, update, tensor, element, array));
}

namespace {

constexpr OptimizerKind kRules[] = {OptimizerKind::adamw, OptimizerKind::adam,    OptimizerKind::sgd,
                                    OptimizerKind::lion,  OptimizerKind::rmsprop, OptimizerKind::adagrad,
                                    OptimizerKind::lamb,  OptimizerKind::lars};

// The arguments of the ops that update state and masters. Both start with the same numbers, bf16's, in either type.
template <class State, class Master = float> struct Update {
    size_t count = element_count(), state_count = count + state_shift(kTensors);
    Array<Master> master{"master", Role::output, numbers_of_bf16(random_values(count, 1))};
    Array<State> first{"state 0", Role::output, numbers_of_bf16(random_values(state_count, 2, 0.1, 0.1))};
    Array<State> second{"state 1", Role::output, numbers_of_bf16(random_values(state_count, 3, 0.01, 0.01))};
    Array<bf16> param{"param", Role::output, nans(count)};
    Array<float> direction{"direction", Role::output, random_values(state_count, 5)};
    Array<float> grad{"grad", Role::input, random_values(count, 4, 2)};
    Array<ops::Chunk> chunks{"chunks", Role::input, chunks_of_one_rank()};
    Array<ops::GradNorm> grad_norm{
        "grad_norm", Role::input,
        std::vector<ops::GradNorm>{{.norm = 3, .scale = 0.75f, .non_finite_tensor = -1, .reserved = 0}}};
    Array<ops::UpdateScalars> scalars{"scalars", Role::input,
                                      std::vector<ops::UpdateScalars>{scalars_of(0.01f, 0.1f), scalars_of(0.02f, 0)}};
    Array<float> ratios{"trust ratios", Role::input, std::vector<float>{0.5f, 1.5f, 0.25f, 3, 0.75f, 2}};  // of tensors
    Array<double> sums{"sums", Role::output, std::vector<double>(2 * chunks_of_all_tensors().size())};

    static constexpr bool kHasParam = std::is_same_v<Master, float>;
    static std::vector<double> numbers_of_bf16(std::vector<double> values) {
        for (double& value : values) value = ref::rounded_to_bf16(value, 0);
        return values;
    }
    static ops::UpdateScalars scalars_of(float learning_rate, float decay) {
        return {.learning_rate = learning_rate,
                .weight_decay = decay,
                .keep = 1 - learning_rate * decay,
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .one_minus_beta1 = 0.1f,
                .one_minus_beta2 = 0.05f,
                .step_size = learning_rate / 0.271f,
                .root_bias_correction2 = 0.172f,
                .eps = 1e-3f,
                .momentum = 0.85f,
                .step_momentum = 1,
                .step_gradient = 0,
                .alpha = 0.97f,
                .one_minus_alpha = 0.03f,
                .bias_correction1 = 0.271f,
                .trust_coefficient = 0.02f,
                .clip_threshold = 1,
                .rounding_key = ops::rounding_key(kSeed, kUpdate)};
    }
    void update(OptimizerKind rule) {
        const OnDevice<State> device;
        int n_states = 0;
        ops::dispatch(rule, [&]<class Rule>() { n_states = Rule::kStates; });
        const bool is_layerwise = rule == OptimizerKind::lamb || rule == OptimizerKind::lars;
        ops::elementwise_update({.rule = rule,
                                 .master = master.on(device),
                                 .param = kHasParam ? View(param.on(device)) : View(),
                                 .state = {first.on(device), n_states > 1 ? View(second.on(device)) : View()},
                                 .grad = grad.on(device),
                                 .chunks = chunks.on(device),
                                 .scalars = scalars.on(device),
                                 .grad_norm = grad_norm.on(device),
                                 .n_chunks = int(chunks.host.size()),
                                 .trust_ratios = is_layerwise ? ratios.on(device) : nullptr},
                                Stream());
    }
    void direct(bool nesterov) {
        const OnDevice<State> device;
        ops::momentum_direction({.direction = direction.on(device),
                                 .m = first.on(device),
                                 .grad = grad.on(device),
                                 .chunks = chunks.on(device),
                                 .scalars = scalars.on(device),
                                 .grad_norm = grad_norm.on(device),
                                 .n_chunks = int(chunks.host.size()),
                                 .nesterov = nesterov},
                                Stream());
    }
    void apply(bool cautious) {
        const OnDevice<State> device;
        ops::apply_direction({.master = master.on(device),
                              .param = kHasParam ? View(param.on(device)) : View(),
                              .direction = direction.on(device),
                              .chunks = chunks.on(device),
                              .scalars = scalars.on(device),
                              .grad_norm = grad_norm.on(device),
                              .n_chunks = int(chunks.host.size()),
                              .cautious = cautious},
                             Stream());
    }
    void measure(OptimizerKind rule) {
        const OnDevice<State> device;
        const bool has_v = rule == OptimizerKind::lamb;
        ops::trust_sums({.rule = rule,
                         .out = sums.on(device),
                         .master = master.on(device),
                         .state = {first.on(device), has_v ? ConstView(second.on(device)) : ConstView()},
                         .grad = grad.on(device),
                         .chunks = chunks.on(device),
                         .scalars = scalars.on(device),
                         .grad_norm = grad_norm.on(device),
                         .n_chunks = int(chunks.host.size())},
                        Stream());
    }
};

// The array in bf16 must be the array in fp32, rounded with each element's bits in the chunks that the op updates.
void check_rounded(const Update<float>& exact, const Array<float>& in_fp32, const Array<bf16>& in_bf16, int array) {
    const std::vector<float> values = in_fp32.fetch();
    std::vector<bf16> expected(values.size());
    for (size_t i = 0; i < values.size(); i++) expected[i] = from_float<bf16>(values[i]);
    for (const ops::Chunk& chunk : exact.chunks.host)
        for (size_t e = 0; e < size_t(chunk.count); e++) {
            const size_t place = (array == ref::kMasterArray ? chunk.begin : chunk.state_begin) + e;
            const size_t element = chunk.begin + e - begin_of(chunk.tensor);
            const uint32_t random = ref::rounding_bits(kSeed, kUpdate, chunk.tensor, element, array);
            expected[place] = from_float<bf16>(float(ref::rounded_to_bf16(values[place], random)));
        }
    check_same_bits(in_bf16, expected);
}

}  // namespace

TEST_CASE("elementwise_update rounds state in bf16 stochastically, after the step", "[ops]") {
    for (const OptimizerKind rule : kRules) {
        INFO(name_of(rule));
        Update<float> in_fp32;
        Update<bf16> in_bf16;
        in_fp32.update(rule), in_bf16.update(rule);
        check_same_bits(in_bf16.master, in_fp32.master.fetch());
        check_same_bits(in_bf16.param, in_fp32.param.fetch());
        check_rounded(in_fp32, in_fp32.first, in_bf16.first, 0);
        check_rounded(in_fp32, in_fp32.second, in_bf16.second, 1);
    }
}

TEST_CASE("elementwise_update rounds masters in bf16 stochastically", "[ops]") {
    for (const OptimizerKind rule : kRules) {
        INFO(name_of(rule));
        Update<float> in_fp32;
        Update<float, bf16> in_bf16;
        Update<bf16, bf16> both;
        in_fp32.update(rule), in_bf16.update(rule), both.update(rule);
        check_rounded(in_fp32, in_fp32.master, in_bf16.master, ref::kMasterArray);
        check_same_bits(in_bf16.first, in_fp32.first.fetch());
        check_same_bits(in_bf16.second, in_fp32.second.fetch());
        check_same_bits(both.master, in_bf16.master.fetch());
        check_rounded(in_fp32, in_fp32.first, both.first, 0);
        check_rounded(in_fp32, in_fp32.second, both.second, 1);
    }
}

TEST_CASE("apply_direction rounds masters in bf16 stochastically", "[ops]") {
    for (const bool cautious : {false, true}) {
        Update<float> in_fp32;
        Update<float, bf16> in_bf16;
        in_fp32.apply(cautious), in_bf16.apply(cautious);
        check_rounded(in_fp32, in_fp32.master, in_bf16.master, ref::kMasterArray);
    }
}

TEST_CASE("momentum_direction rounds a momentum in bf16 stochastically", "[ops]") {
    for (const bool nesterov : {false, true}) {
        Update<float> in_fp32;
        Update<bf16> in_bf16;
        in_fp32.direct(nesterov), in_bf16.direct(nesterov);
        check_same_bits(in_bf16.direction, in_fp32.direction.fetch());
        check_rounded(in_fp32, in_fp32.first, in_bf16.first, 0);
    }
}

TEMPLATE_TEST_CASE("trust_sums reads state and masters in bf16", "[ops]", float, bf16) {
    for (const OptimizerKind rule : {OptimizerKind::lamb, OptimizerKind::lars}) {
        Update<float> in_fp32;
        Update<bf16, TestType> in_bf16;
        in_fp32.measure(rule), in_bf16.measure(rule);
        in_bf16.sums.host = in_fp32.sums.fetch();  // the CPU adds in an order that depends on the type
        check_close(in_bf16.sums, [&](size_t i) { return ops::kChunkElements * 0x1p-52 * in_bf16.sums.host[i]; });
    }
}

// Rounded to the nearest number, v would stop at 0.81: its steps of 0.01 (1 - v) would be less than half of the
// distance between bf16's numbers. Rounded stochastically, its mean follows the formula.
TEST_CASE("elementwise_update with state in bf16 follows AdamW's formula in the mean", "[ops]") {
    constexpr int kElements = 512, kSteps = 600;
    Array<float> master("master", Role::output, std::vector<float>(kElements));
    Array<bf16> m("m", Role::output, std::vector<float>(kElements)),
        v("v", Role::output, std::vector<float>(kElements));
    Array<ops::Chunk> chunks(
        "chunks", Role::input,
        std::vector<ops::Chunk>{
            {.begin = 0, .count = kElements, .tensor = 0, .index = 0, .group = 0, .state_begin = 0}});
    Array<ops::GradNorm> norm("grad_norm", Role::input, std::vector<ops::GradNorm>{{1, 1, -1, 0}});
    ops::UpdateScalars scalars = Update<bf16>::scalars_of(0.01f, 0);
    scalars.beta2 = 0.99f, scalars.one_minus_beta2 = 0.01f;
    double weight = 0, moments[] = {0, 0};
    for (int t = 1; t <= kSteps; t++) {
        const float gradient = t % 2 ? 1.25f : 0.75f;
        Array<float> grad("grad", Role::input, std::vector<float>(kElements, gradient));
        scalars.rounding_key = ops::rounding_key(kSeed, uint64_t(t));
        Array<ops::UpdateScalars> group("scalars", Role::input, std::vector<ops::UpdateScalars>{scalars});
        const OnDevice<bf16> device;
        ops::elementwise_update({.rule = OptimizerKind::adamw,
                                 .master = master.on(device),
                                 .param = nullptr,
                                 .state = {m.on(device), v.on(device)},
                                 .grad = grad.on(device),
                                 .chunks = chunks.on(device),
                                 .scalars = group.on(device),
                                 .grad_norm = norm.on(device),
                                 .n_chunks = 1},
                                Stream());
        ref::update_element(OptimizerKind::adamw, scalars, double(gradient), weight, moments);
    }
    CHECK(moments[1] > 1);
    for (const bool is_v : {false, true}) {
        double sum = 0, squares = 0;
        for (const bf16 value : (is_v ? v : m).fetch()) {
            const double error = double(to_float(value)) - moments[is_v];
            sum += error, squares += error * error;
        }
        const double mean = sum / kElements, deviation = std::sqrt(squares / kElements - mean * mean);
        INFO((is_v ? "v" : "m") << ": error of the mean " << mean << ", standard deviation " << deviation);
        CHECK(deviation > 0x1p-10);
        CHECK(deviation < 0x1p-4);
        CHECK(std::abs(mean) < 4 * deviation / std::sqrt(double(kElements)));
    }
}

// Rounded to the nearest number, a weight of 1 would not move: its steps of 0.0001 are less than half of the distance
// between bf16's numbers.
TEST_CASE("apply_direction with masters in bf16 moves weights in the mean", "[ops]") {
    constexpr int kElements = 1024, kSteps = 400;
    Array<bf16> master("master", Role::output, std::vector<float>(kElements, 1.0f));
    Array<float> direction("direction", Role::input, std::vector<float>(kElements, 1.0f));
    Array<ops::Chunk> chunks(
        "chunks", Role::input,
        std::vector<ops::Chunk>{
            {.begin = 0, .count = kElements, .tensor = 0, .index = 0, .group = 0, .state_begin = 0}});
    Array<ops::GradNorm> norm("grad_norm", Role::input, std::vector<ops::GradNorm>{{1, 1, -1, 0}});
    for (int t = 1; t <= kSteps; t++) {
        ops::UpdateScalars scalars = Update<bf16>::scalars_of(0.0001f, 0);
        scalars.rounding_key = ops::rounding_key(kSeed, uint64_t(t));
        Array<ops::UpdateScalars> group("scalars", Role::input, std::vector<ops::UpdateScalars>{scalars});
        const OnDevice<bf16> device;
        ops::apply_direction({.master = master.on(device),
                              .param = nullptr,
                              .direction = direction.on(device),
                              .chunks = chunks.on(device),
                              .scalars = group.on(device),
                              .grad_norm = norm.on(device),
                              .n_chunks = 1,
                              .cautious = false},
                             Stream());
    }
    double sum = 0, squares = 0;
    for (const bf16 value : master.fetch()) {
        const double error = double(to_float(value)) - (1 - 0.0001 * kSteps);
        sum += error, squares += error * error;
    }
    const double mean = sum / kElements, deviation = std::sqrt(squares / kElements - mean * mean);
    INFO("error of the mean " << mean << ", standard deviation " << deviation);
    CHECK(deviation > 0x1p-10);
    CHECK(deviation < 0x1p-5);
    CHECK(std::abs(mean) < 4 * deviation / std::sqrt(double(kElements)));
}

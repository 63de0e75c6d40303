// Learning rate, loss scale and FLOPs at their edge cases.
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "runtime/checkpoint/fields.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/config/config.h"
#include "runtime/config/loss_scale.h"
#include "runtime/config/schedule.h"
#include "runtime/performance/performance.h"
#include "test/support/expect_error.h"

namespace {

Config schedule_of(const std::string& name, int warmup_steps, int max_steps) {
    Config config;
    config.optim.learning_rate = 0.3;  // not a binary fraction, so that an inexact final rate shows
    config.schedule.name = choice_named<LrSchedule>(name).value();
    config.schedule.warmup_steps = warmup_steps;
    config.schedule.final_lr_fraction = 0.1;
    config.train.max_steps = max_steps;
    return config;
}

// The learning rate of a step if only the number of steps limits the run.
double learning_rate(const Config& config, int step) { return learning_rate(config, planned_length(config, 1), step); }

bool is_near(double x, double expected) { return std::abs(x - expected) <= 1e-15; }

LossScaleState state_of(const nlohmann::ordered_json& json) {
    return value_of<LossScaleState>(json, "MANIFEST.json: state.loss_scale", ".");
}

constexpr double kPeak = 0.3, kFinal = 0.3 * 0.1;

}  // namespace

TEST_CASE("the warm-up rises from lr / warmup_steps to lr and is the same in every schedule", "[schedule]") {
    for (const char* name : {"cosine", "linear", "wsd", "constant", "cyclic"}) {
        INFO(name);
        const Config config = schedule_of(name, 7, 100);
        for (int step = 1; step < 7; step++) CHECK(is_near(learning_rate(config, step), kPeak * step / 7));
        CHECK(learning_rate(config, 7) == kPeak);
    }
}

TEST_CASE("a group's warm-up, final rate and cooldown replace the schedule's", "[schedule]") {
    Config config = schedule_of("wsd", 7, 100);
    config.optim.groups = {{.tensors = "vector", .lr_scale = 3},
                           {.tensors = "embedding", .warmup_steps = 20},
                           {.tensors = "matrix", .warmup_steps = 0, .final_lr_fraction = 0.5, .cooldown_power = 1}};
    const RunLength length = planned_length(config, 1);
    for (const int step : {1, 7, 10, 20, 80, 85, 90, 100}) {
        INFO(step);
        const std::vector<double> rates = group_rates(config, length, step);
        REQUIRE(rates.size() == 3);
        CHECK(rates[0] == learning_rate(config, step));
        CHECK(is_near(rates[1], step < 20 ? kPeak * step / 20 : learning_rate(config, step)));
        CHECK(is_near(rates[2], step <= 80 ? kPeak : kPeak * (1 - 0.5 * (step - 80) / 20)));
    }
}

TEST_CASE("the last step has the final rate exactly", "[schedule]") {
    for (const char* name : {"cosine", "linear", "wsd"})
        for (int warmup : {0, 1, 7})
            for (int steps : {8, 10, 101, 19073}) {
                INFO(name << ", warm-up " << warmup << " of " << steps);
                const Config config = schedule_of(name, warmup, steps);
                CHECK(learning_rate(config, steps) == kFinal);
                CHECK(learning_rate(config, steps - 1) > kFinal);
            }
    CHECK(learning_rate(schedule_of("constant", 7, 100), 100) == kPeak);
}

TEST_CASE("schedules without a warm-up, of one step, and of warm-up only", "[schedule]") {
    for (const char* name : {"cosine", "linear", "wsd"}) {
        INFO(name);
        CHECK(learning_rate(schedule_of(name, 0, 1), 1) == kFinal);
        // With wsd a cooldown of at least one step follows the warm-up; check_config() requires it.
        const int rest = std::string(name) == "wsd" ? 1 : 0;
        CHECK(learning_rate(schedule_of(name, 1, 1 + rest), 1) == kPeak);
        CHECK(learning_rate(schedule_of(name, 10, 10 + 2 * rest), 10) == kPeak);
        CHECK(is_near(learning_rate(schedule_of(name, 10, 10 + 2 * rest), 1), kPeak / 10));
        const double first = learning_rate(schedule_of(name, 0, 1000000), 1);
        CHECK(first <= kPeak);
        CHECK(first > kPeak * 0.99999);
    }
}

TEST_CASE("cosine, linear and wsd follow their formulas in between", "[schedule]") {
    // Halfway from the end of the warm-up at 20 to step 100.
    CHECK(is_near(learning_rate(schedule_of("cosine", 20, 100), 60), (kPeak + kFinal) / 2));
    CHECK(is_near(learning_rate(schedule_of("linear", 20, 100), 60), (kPeak + kFinal) / 2));
    // A quarter: cos(pi/4) = sqrt(1/2).
    CHECK(is_near(learning_rate(schedule_of("cosine", 20, 100), 40),
                  kFinal + (kPeak - kFinal) * (1 + std::sqrt(0.5)) / 2));
    CHECK(is_near(learning_rate(schedule_of("linear", 20, 100), 40), kFinal + (kPeak - kFinal) * 0.75));

    Config wsd = schedule_of("wsd", 20, 100);
    wsd.schedule.cooldown_fraction = 0.36;
    CHECK(cooldown_steps(wsd, 100) == 36);
    for (int step = 20; step <= 64; step++) CHECK(learning_rate(wsd, step) == kPeak);
    CHECK(is_near(learning_rate(wsd, 65), kFinal + (kPeak - kFinal) * (1 - 1.0 / 6)));  // sqrt(1/36)
    CHECK(is_near(learning_rate(wsd, 73), kFinal + (kPeak - kFinal) * 0.5));            // sqrt(9/36)
    wsd.schedule.cooldown_power = 1;
    CHECK(is_near(learning_rate(wsd, 73), kFinal + (kPeak - kFinal) * 0.75));
    wsd.schedule.cooldown_power = 2;
    CHECK(is_near(learning_rate(wsd, 82), kFinal + (kPeak - kFinal) * 0.75));
    CHECK(learning_rate(wsd, 100) == kFinal);
    wsd.schedule.cooldown_fraction = 0;
    CHECK(cooldown_steps(wsd, 100) == 1);
    CHECK(learning_rate(wsd, 99) == kPeak);
    CHECK(learning_rate(wsd, 100) == kFinal);
}

TEST_CASE("the cyclic schedule is a triangle that begins at the peak after the warm-up", "[schedule]") {
    Config config = schedule_of("cyclic", 5, 1000);
    config.schedule.cycle_steps = 8;
    for (int cycle = 0; cycle < 3; cycle++) {
        const int begin = 5 + 8 * cycle;
        CHECK(learning_rate(config, begin) == kPeak);
        CHECK(is_near(learning_rate(config, begin + 2), (kPeak + kFinal) / 2));
        CHECK(learning_rate(config, begin + 4) == kFinal);
        CHECK(is_near(learning_rate(config, begin + 6), (kPeak + kFinal) / 2));
    }
}

TEST_CASE("every schedule stays between 0 and lr, and never rises while it decays", "[schedule]") {
    for (const char* name : {"cosine", "linear", "wsd", "constant", "cyclic"}) {
        Config config = schedule_of(name, 13, 517);
        config.schedule.final_lr_fraction = 0;
        config.schedule.cycle_steps = 31;
        double before = kPeak;
        for (int step = 1; step <= 517; step++) {
            INFO(name << ", step " << step);
            const double rate = learning_rate(config, step);
            CHECK((rate >= 0 && rate <= kPeak));
            if (step <= 13 || config.schedule.name == LrSchedule::cyclic) continue;
            CHECK(rate <= before);
            before = rate;
        }
    }
}

namespace {

Config wsd_of_minutes(double minutes, int warmup_steps = 10, int max_steps = 0) {
    Config config = schedule_of("wsd", warmup_steps, max_steps);
    config.train.max_minutes = minutes;
    return config;
}

// Simulates a trainer whose steps take `step_s` seconds. Returns the last step; `length` is the decision at that point.
int run_until_end(const Config& config, RunLength& length, const std::function<double(int step)>& step_s,
                  double* elapsed_s = nullptr) {
    bool is_decided = false;
    double elapsed = 0;
    for (int step = 1;; step++) {
        elapsed += step_s(step);
        const auto decision = is_decided ? std::nullopt : course_by_time(config, length, step, elapsed);
        if (decision) length = *decision, is_decided = true;
        if (step != length.end_step) continue;
        if (elapsed_s) *elapsed_s = elapsed;
        return step;
    }
}

}  // namespace

TEST_CASE("the first limit of steps and epochs ends a run", "[schedule]") {
    Config config = schedule_of("constant", 0, 1000);
    config.train.seq_len = 64;
    config.train.total_batch_tokens = 512;  // 8 samples per step
    CHECK(planned_length(config, 100).end_step == 1000);
    config.train.max_epochs = 3;  // 37.5 steps
    CHECK(planned_length(config, 100).end_step == 38);
    config.train.max_epochs = 0.5;
    CHECK(planned_length(config, 100).end_step == 7);
    config.train.max_steps = 0;
    CHECK(planned_length(config, 100).end_step == 7);
    config.train.max_epochs = 1000;
    config.train.max_steps = 30;
    CHECK(planned_length(config, 100).end_step == 30);
    config.train.max_epochs = 3;
    config.schedule.warmup_steps = 29;
    CHECK(planned_length(config, 100).end_step == 30);
    expect_error(Exit::config, {"train.max_epochs 3, at 6.2 steps per epoch", "19 steps", "schedule.warmup_steps (29)"},
                 [&] { planned_length(config, 50); });
}

TEST_CASE("train.batch_ramp sets the tokens of the first steps", "[schedule]") {
    const auto config_of = [](const std::string& ramp) {
        return parse_config(
            "{\"train\": {\"batch_size\": 2, \"seq_len\": 10, \"total_batch_tokens\": 240, \"batch_ramp\": " + ramp +
                "}}",
            "test");
    };
    CHECK(config_of("[]").train.batch_ramp.empty());
    CHECK(batch_text(config_of("[]")) == "240");
    const Config config = config_of(R"([{"until_step": 3, "total_batch_tokens": 60},
                                        {"until_step": 7, "total_batch_tokens": 360}])");
    REQUIRE(config.train.batch_ramp == Ramp{{3, 60}, {7, 360}});
    CHECK(parse_config(config_json(config), "test").train.batch_ramp == config.train.batch_ramp);
    CHECK(batch_text(config) == "60 to 240");
    CHECK_NOTHROW(check_config(config, "test", 3));
    int64_t tokens = 0;
    for (int step = 1; step <= 20; step++) {
        INFO(step);
        const int64_t expected = step <= 3 ? 60 : step <= 7 ? 360 : 240;
        CHECK(batch_tokens(config, step) == expected);
        CHECK(micro_steps(config, 3, step) == int(expected / 60));
        CHECK(tokens_of_steps(config, step - 1) == tokens);
        tokens += expected;
    }
    CHECK(tokens_of_steps(config, kMaxSteps) == 3 * 60 + 4 * 360 + (kMaxSteps - 7) * 240L);
    CHECK(max_micro_steps(config, 1) == 18);
    CHECK(max_micro_steps(config, 3) == 6);
    CHECK(largest_batch_size(config, 1, 100) == 6);
    CHECK(largest_batch_size(config, 4, 100) == 0);
    for (const char* wrong :
         {"{}", "60", "[60]", "[{}]", R"([{"until_step": 3}])", R"([{"until_step": 0, "total_batch_tokens": 60}])",
          R"([{"until_step": 3, "total_batch_tokens": 0}])", R"([{"until_step": 3, "total_batch_tokens": 2147483648}])",
          R"([{"until_step": 1000000001, "total_batch_tokens": 60}])",
          R"([{"until_step": 3, "total_batch_tokens": 60.5}])",
          R"([{"until_step": 3, "total_batch_tokens": 60, "x": 1}])"}) {
        INFO(wrong);
        expect_error(Exit::config, {"test: train.batch_ramp must be a list of up to 256 {\"until_step\": an integer"},
                     [&] { config_of(wrong); });
    }
    for (const int second : {2, 3}) {
        Config wrong = config;
        wrong.train.batch_ramp[1].until_step = second;
        expect_error(Exit::config,
                     {format("train.batch_ramp: until_step %d must be above the previous one (3)", second)},
                     [&] { check_config(wrong, "test", 3); });
    }
}

TEST_CASE("epochs and minutes count the tokens of a batch ramp", "[schedule]") {
    Config config = schedule_of("constant", 0, 0);
    config.train.seq_len = 64;
    config.train.total_batch_tokens = 512;
    config.train.batch_ramp = {{10, 64}, {20, 128}};  // 10 and 20 of an epoch's 100 samples
    for (const auto& [epochs, steps] : {std::pair(0.35, 21), {1.0, 29}, {3.0, 54}}) {
        INFO(epochs);
        config.train.max_epochs = epochs;
        CHECK(planned_length(config, 100).end_step == steps);
    }
    for (const auto& [epochs, steps] : {std::pair(0.05, 5), {0.1, 10}, {0.2, 15}, {0.3, 20}}) {
        config.train.max_epochs = epochs;
        expect_error(Exit::config, {format("ends the run after %d steps", steps), "batch_ramp lasts until step 20"},
                     [&] { planned_length(config, 100); });
    }
    config.train.max_epochs = 0;
    config.train.max_minutes = 10;
    CHECK(expected_end(config, {}, 10, 60) == 28);    // 1 minute for 640 tokens
    CHECK(expected_end(config, {}, 40, 120) == 135);  // 2 minutes for 12160 tokens
}

TEST_CASE("the cooldown of a run with a time limit begins early enough to end on time", "[schedule]") {
    const Config config = wsd_of_minutes(10);
    for (double pace_s : {0.01, 0.37, 1.0, 7.0}) {
        INFO(pace_s << " s per step");
        RunLength length;
        double elapsed_s = 0;
        const int end = run_until_end(
            config, length, [&](int) { return pace_s; }, &elapsed_s);
        CHECK(elapsed_s <= 600 + pace_s);
        CHECK(elapsed_s > 600 - 2 * pace_s);
        CHECK(std::abs(length.cooldown_begin - 0.8 * end) <= 1.5);
        CHECK(learning_rate(config, length, length.cooldown_begin) == kPeak);
        CHECK(learning_rate(config, length, length.cooldown_begin + 1) < kPeak);
        CHECK(learning_rate(config, length, end) == kFinal);
    }
}

TEST_CASE("a busy start does not shorten a run with a time limit", "[schedule]") {
    RunLength length;
    double elapsed_s = 0;
    // The first second runs at a tenth of the speed; 0.1 s per step afterwards.
    const int end = run_until_end(
        wsd_of_minutes(5), length, [](int step) { return step <= 10 ? 1.0 : 0.1; }, &elapsed_s);
    CHECK(end > 2850);
    CHECK(elapsed_s <= 301);
}

TEST_CASE("a step limit reached before the time limit keeps its own cooldown", "[schedule]") {
    const Config config = wsd_of_minutes(10, 10, 500);
    const RunLength planned = planned_length(config, 1);
    CHECK(planned == RunLength{500, 400});
    RunLength length = planned;
    CHECK(run_until_end(config, length, [](int) { return 1.0; }) == 500);
    CHECK(length == planned);
    // A cooldown that has begun never changes, even if the machine slows down.
    length = planned;
    CHECK(run_until_end(config, length, [](int step) { return step <= 401 ? 1.0 : 50.0; }) == 500);
    // The time limit is reached first.
    length = planned;
    CHECK(run_until_end(config, length, [](int) { return 2.0; }) == 300);
    CHECK(length == RunLength{300, 240});
}

TEST_CASE("a time limit within the warm-up or a step still has a cooldown from the rate reached", "[schedule]") {
    const Config config = wsd_of_minutes(1, 100);
    RunLength length;
    CHECK(run_until_end(config, length, [](int) { return 1.0; }) == 60);
    CHECK(length.cooldown_begin == 48);
    CHECK(is_near(learning_rate(config, length, 48), kPeak * 0.48));
    CHECK(learning_rate(config, length, 49) < kPeak * 0.48);
    CHECK(learning_rate(config, length, 60) == kFinal);

    RunLength one;
    CHECK(run_until_end(config, one, [](int) { return 300.0; }) == 2);
    CHECK(one.cooldown_begin == 1);
}

TEST_CASE("a constant rate runs until the next step would exceed the time limit", "[schedule]") {
    Config config = wsd_of_minutes(1, 0);
    config.schedule.name = LrSchedule::constant;
    RunLength length;
    double elapsed_s = 0;
    CHECK(run_until_end(
              config, length, [](int) { return 0.7; }, &elapsed_s) == 85);
    CHECK(elapsed_s <= 60);
    config.train.max_steps = 50;
    length = planned_length(config, 1);
    CHECK(run_until_end(config, length, [](int) { return 0.7; }) == 50);
}

TEST_CASE("the expected end follows from the pace so far", "[schedule]") {
    const Config config = wsd_of_minutes(10);
    CHECK(expected_end(config, {}, 0, 0) == 0);
    CHECK(expected_end(config, {}, 100, 60) == 1000);
    CHECK(expected_end(config, {700, 650}, 100, 60) == 700);
    CHECK(expected_end(config, {}, 1, 1e-9) == kMaxSteps);
}

// ---------------------------------------------------------------------------------------------------------------------

namespace {

// A loss scale with its options.
class LossScaler {
public:
    explicit LossScaler(const Config::LossScale& options) : LossScaler(options, first_loss_scale(options)) {}
    LossScaler(const Config::LossScale& options, const LossScaleState& state) : options_(options), state_(state) {}
    float scale() const { return state_.scale; }
    const LossScaleState& state() const { return state_; }
    void step_applied(int step) { state_.step_applied(options_, step); }
    void step_skipped(int step, const std::string& tensor) {
        const std::string diagnosis = state_.step_skipped(options_, step, tensor);
        if (!diagnosis.empty()) throw Error(Exit::non_finite, diagnosis);
    }

private:
    Config::LossScale options_;
    LossScaleState state_;
};

Config::LossScale dynamic_scale() {
    return {.dynamic = true,
            .initial = 1024,
            .growth_interval = 3,
            .growth_factor = 2,
            .backoff_factor = 0.5,
            .hysteresis = 2,
            .minimum = 256,
            .max_skipped_steps = 10};
}

}  // namespace

TEST_CASE("the loss scale grows after growth_interval finite steps in a row", "[loss_scale]") {
    LossScaler scaler(dynamic_scale());
    for (int step = 1; step <= 2; step++) scaler.step_applied(step);
    CHECK(scaler.scale() == 1024);
    scaler.step_applied(3);
    CHECK(scaler.scale() == 2048);
    for (int step = 4; step <= 5; step++) scaler.step_applied(step);
    scaler.step_skipped(6, "wte");
    for (int step = 7; step <= 8; step++) scaler.step_applied(step);
    CHECK(scaler.scale() == 2048);
    scaler.step_applied(9);
    CHECK(scaler.scale() == 4096);
    for (int step = 10; step < 1000; step++) scaler.step_applied(step);
    CHECK(std::isfinite(scaler.scale()));
    CHECK(scaler.scale() == 0x1p100f);
}

TEST_CASE("the loss scale is reduced once the hysteresis is used up, which only growth restores", "[loss_scale]") {
    LossScaler scaler(dynamic_scale());
    scaler.step_skipped(1, "wte");
    CHECK(scaler.scale() == 1024);
    scaler.step_applied(2);  // one good step does not restore it
    scaler.step_skipped(3, "wte");
    CHECK(scaler.scale() == 512);
    for (int step = 4; step <= 6; step++) scaler.step_applied(step);
    CHECK(scaler.scale() == 1024);
    scaler.step_skipped(7, "wte");
    CHECK(scaler.scale() == 1024);
    scaler.step_skipped(8, "wte");
    scaler.step_skipped(9, "wte");
    CHECK(scaler.scale() == 256);
    CHECK(scaler.state().total_skipped == 5);
    CHECK(scaler.state().skipped_in_a_row == 3);
    CHECK(scaler.state().last_good_step == 6);
}

TEST_CASE("a non-finite step at the smallest loss scale is explained", "[loss_scale]") {
    Config::LossScale options = dynamic_scale();
    options.minimum = 300;
    LossScaler scaler(options);
    scaler.step_applied(1);
    for (int step = 2; step <= 4; step++) scaler.step_skipped(step, "wte");
    CHECK(scaler.scale() == 300);  // not 256
    expect_error(Exit::non_finite,
                 {"step 5", "blocks.3.mlp.weight", "300", "loss_scale.minimum", "last good step was 1"},
                 [&] { scaler.step_skipped(5, "blocks.3.mlp.weight"); });
}

TEST_CASE("more than max_skipped_steps skips in a row end the run, with and without dynamic scaling", "[loss_scale]") {
    Config::LossScale options = dynamic_scale();
    options.dynamic = GENERATE(false, true);
    options.fixed = 8;
    options.minimum = 1e-9;
    options.max_skipped_steps = 4;
    LossScaler scaler(options);
    for (int round = 0; round < 3; round++) {
        for (int i = 1; i <= 4; i++) scaler.step_skipped(10 * round + i, "wpe");
        scaler.step_applied(10 * round + 5);
    }
    for (int step = 36; step < 40; step++) scaler.step_skipped(step, "wpe");
    if (!options.dynamic) CHECK(scaler.scale() == 8);
    CHECK(scaler.state().total_skipped == 16);
    expect_error(Exit::non_finite,
                 {"step 40", "in 5 consecutive steps", "max_skipped_steps is 4", "wpe", "last good step 25"},
                 [&] { scaler.step_skipped(40, "wpe"); });

    options.max_skipped_steps = 0;
    expect_error(Exit::non_finite, {"in 1 consecutive steps"}, [&] { LossScaler(options).step_skipped(1, "wpe"); });
}

TEST_CASE("a loss scaler restored from a checkpoint continues unchanged", "[loss_scale]") {
    Config::LossScale options = dynamic_scale();
    options.growth_factor = 1.7;
    options.backoff_factor = 0.3;
    options.minimum = 1e-9;
    auto advance = [](LossScaler& scaler, int step) {
        if (step * 7 % 5 == 0 || step * 11 % 13 == 0)
            scaler.step_skipped(step, "wte");
        else
            scaler.step_applied(step);
    };
    for (int cut = 0; cut <= 60; cut++) {
        LossScaler straight(options), resumed(options);
        for (int step = 1; step <= 60; step++) {
            if (step == cut) {
                const std::string text = nlohmann::ordered_json(resumed.state()).dump();
                const auto state = state_of(nlohmann::ordered_json::parse(text));
                resumed = LossScaler(options, state);
            }
            advance(straight, step);
            advance(resumed, step);
        }
        CHECK(nlohmann::ordered_json(straight.state()) == nlohmann::ordered_json(resumed.state()));
    }
}

TEST_CASE("a damaged loss-scale state is rejected with file and field", "[loss_scale]") {
    const nlohmann::ordered_json good = LossScaler(dynamic_scale()).state();
    CHECK_NOTHROW(state_of(good));
    for (const auto& [key, value] : good.items())
        for (const char* bad : {"null", "\"1\"", "-1", "1e300", "[]"}) {
            INFO(key << " = " << bad);
            auto damaged = good;
            damaged[key] = nlohmann::ordered_json::parse(bad);
            expect_error(Exit::data, {"MANIFEST.json", "loss_scale." + key}, [&] { state_of(damaged); });
            damaged.erase(key);
            expect_error(Exit::data, {"loss_scale." + key, "missing"}, [&] { state_of(damaged); });
        }
    auto fraction = good;
    fraction["good_steps"] = 1.5;
    expect_error(Exit::data, {"loss_scale.good_steps", "1.5"}, [&] { state_of(fraction); });
    expect_error(Exit::data, {"loss_scale must be an object, is 3"}, [] { state_of(3); });
}

// Published for llm.c's convention: GPT-2 with T = 1024 and a vocabulary padded to 50304.
TEST_CASE("FLOPs per token equal llm.c's for the GPT-2 family", "[flops]") {
    struct Case {
        FlopsPerToken model;
        double giga;
    };
    for (const Case& c : {Case{{124475904, 12 * 768 * 512.0}, 0.8035}, Case{{354871296, 24 * 1024 * 512.0}, 2.2802},
                          Case{{774090240, 36 * 1280 * 512.0}, 4.9277}, Case{{1557686400, 48 * 1600 * 512.0}, 9.8180}})
        CHECK(std::abs(flops_per_token(c.model) / 1e9 - c.giga) < 1e-4);
    CHECK_FALSE(model_flops_utilization(1e9, 1000, 0).has_value());
    CHECK(model_flops_utilization(1e9, 1000, 2e12).value() == 0.5);
}

// The configuration that prepare suggests, for machines of any speed.
#include "commands/suggest_config.h"
#include "test/support/catch.h"
#include "training/models/model_io.h"

namespace {

SuggestionInputs shakespeare(double minutes = 3) {
    return {.directory = "datasets/mine",
            .vocab_size = 1024,
            .train_tokens = 435'503,
            .text_bytes = 1'059'636,
            .val_tokens = 24'700,
            .minutes = minutes};
}

// A machine whose time is spent in floating-point operations only.
StepTime machine(double flops_per_s) {
    return [=](const Config& config) {
        return flops_of_token(gpt_options(config), config.train.seq_len) * double(config.train.total_batch_tokens) /
               flops_per_s;
    };
}

Suggestion suggested(const SuggestionInputs& inputs, double flops_per_s) {
    const std::optional<Suggestion> suggestion = suggest_config(inputs, machine(flops_per_s));
    REQUIRE(suggestion);
    return *suggestion;
}

}  // namespace

TEST_CASE("every suggested configuration can be run", "[suggest]") {
    for (double flops_per_s : {1e7, 1e9, 1e11, 1e13, 1e15})
        for (double minutes : {0.1, 3.0, 60.0, 10000.0})
            for (uint64_t text_bytes : {uint64_t(2000), uint64_t(1'000'000), uint64_t(1) << 34}) {
                INFO(flops_per_s << " FLOP/s, " << minutes << " minutes, " << text_bytes << " bytes");
                SuggestionInputs inputs = shakespeare(minutes);
                inputs.text_bytes = text_bytes;
                inputs.train_tokens = text_bytes / 3;
                inputs.val_tokens = text_bytes / 60;
                const Suggestion suggestion = suggested(inputs, flops_per_s);
                CHECK_NOTHROW(check_config(suggestion.config, "suggested", 1));
                CHECK(suggestion.config.run.dir == "runs/mine");
                // The written file contains the same values.
                const std::string json = changed_config_json(suggestion.config);
                CHECK(config_json(parse_config(json, "json")) == config_json(suggestion.config));
                // The measured time, which is proportional to the batch.
                CHECK(std::abs(suggestion.step_s / machine(flops_per_s)(suggestion.config) - 1) < 1e-9);
            }
}

TEST_CASE("a faster machine or more time gives a larger model, and a short text limits the model's size", "[suggest]") {
    SuggestionInputs long_text = shakespeare();
    long_text.text_bytes = long_text.train_tokens = uint64_t(1) << 40;
    int64_t before = 0;
    for (double flops_per_s : {1e9, 1e12, 1e13, 1e15}) {
        const Suggestion suggestion = suggested(long_text, flops_per_s);
        CHECK(suggestion.parameters > before);
        before = suggestion.parameters;
        if (flops_per_s > 1e9) CHECK(suggestion.tokens() >= 1.5 * double(suggestion.parameters));
    }
    CHECK(suggested(shakespeare(), 1e15).parameters <= 1.5 * 1'059'636);
    long_text.minutes = 300;
    CHECK(suggested(long_text, 1e11).parameters > suggested(shakespeare(), 1e11).parameters);
}

TEST_CASE("beyond about ten thousand steps the batch grows instead", "[suggest]") {
    const Suggestion suggestion = suggested(shakespeare(30), 1e12);
    CHECK(suggestion.steps() < 50'000);
    CHECK(suggestion.config.train.total_batch_tokens > suggestion.config.train.batch_size * 128);
}

TEST_CASE("the suggestion uses no split or tokenizer that the data set lacks", "[suggest]") {
    SuggestionInputs inputs = shakespeare();
    inputs.val_tokens = 0;
    const Suggestion suggestion = suggested(inputs, 1e10);
    CHECK(suggestion.config.data.val.empty());
    CHECK(suggestion.config.eval.every_steps == 0);
    CHECK_FALSE(suggestion.config.checkpoint.keep_best);
    inputs.text_bytes = 0;
    inputs.has_tokenizer = false;
    CHECK(suggested(inputs, 1e12).parameters > suggestion.parameters);
    CHECK(suggested(inputs, 1e12).config.data.tokenizer.empty());
    CHECK(suggested(inputs, 1e12).config.sample.every_steps == 0);
    inputs.train_tokens = 512;
    CHECK_FALSE(suggest_config(inputs, machine(1e11)));
}

TEST_CASE("a step is measured on this machine", "[suggest]") {
    const Suggestion suggestion = suggested(shakespeare(), 1e7);  // the smallest model
    const double step_s = measured_step_s(suggestion.config);
    CHECK(step_s > 0);
    CHECK(step_s < 10);
}

TEST_CASE("more passes over the text give more weight decay, whatever the number of copies", "[suggest]") {
    for (int copies : {1, 40}) {
        SuggestionInputs inputs = shakespeare();
        inputs.train_tokens *= uint64_t(copies);
        inputs.copies = copies;
        for (auto [passes, decay] : {std::pair{1.9, 0.1}, {2.1, 0.3}, {4.9, 0.3}, {5.1, 0.5}}) {
            const Suggestion once = suggested(inputs, 1e7);
            const Suggestion suggestion = suggested(inputs, 1e7 * passes / once.passes);
            CAPTURE(copies, passes);
            CHECK(std::abs(suggestion.passes - passes) < 1e-6);
            CHECK(suggestion.config.optim.weight_decay == decay);
        }
    }
}

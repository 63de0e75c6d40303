// Log-likelihoods of texts, compared with the logits of one token at a time.
#include <cmath>

#include "model/evaluate.h"
#include "model/inference.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

TEST_CASE("log_likelihoods agrees with the logits of each token", "[model]") {
    GptOptions options = nano_options();
    options.seq_len = 20;  // sequences of 10 and 5 tokens too
    options.training = false;
    Gpt gpt(options, comm_single());
    gpt.initialize(3);
    const std::vector<int> tokens = nano_tokens(60, 131);
    struct Case {
        size_t context, predicted;
    };
    // The shortest possible, lengths around 5, 10 and 20, and texts longer than the model's context.
    const std::vector<Case> cases = {{1, 1},  {3, 2},  {3, 3},  {4, 2},  {8, 3},   {1, 10}, {10, 2},
                                     {1, 20}, {20, 1}, {19, 2}, {20, 2}, {39, 20}, {50, 1}, {2, 1}};
    std::vector<Continuation> texts;
    for (size_t i = 0; i < cases.size(); i++) {
        const std::span<const int> from(tokens.data() + i % 2, cases[i].context + cases[i].predicted);
        texts.push_back({from.first(cases[i].context), from.subspan(cases[i].context)});
    }
    const std::vector<double> scores = log_likelihoods(gpt, texts);
    std::vector<float> logits(131);
    for (size_t i = 0; i < texts.size(); i++) {
        const int* const text = texts[i].context.data();
        // The model reads the last 20 tokens before the last one.
        const size_t last = texts[i].tokens() - 1, begin = last > 20 ? last - 20 : 0;
        double expected = 0;
        for (size_t at = texts[i].context.size(); at <= last; at++) {
            next_token_logits(gpt, text + begin, int(at - begin), logits.data());
            double total = 0;
            for (const float logit : logits) total += std::exp(double(logit));
            expected += double(logits[size_t(text[at])]) - std::log(total);
        }
        INFO(cases[i].context << " and " << cases[i].predicted << " tokens");
        CHECK(std::abs(scores[i] - expected) < 1e-5 * double(cases[i].predicted));
    }
    CHECK(log_likelihoods(gpt, {}).empty());
}

TEST_CASE("evaluate averages over the targets that are not padding", "[model]") {
    Gpt gpt(nano_options(), comm_single());
    gpt.initialize(3);
    const std::vector<int> tokens = nano_tokens(43, 131);
    std::vector<int> targets(tokens.begin() + 1, tokens.end());
    targets[5] = targets[26] = targets[41] = -1;
    const auto next = [&] { return Batch{tokens.data(), targets.data()}; };
    const Validation result = evaluate(gpt, 3, next, [](int token) { return token % 2 + 1; });
    const double sum = batch_loss(gpt, tokens.data(), targets.data());
    CHECK(std::abs(result.loss - sum / 39) < 1e-6);
    double bytes = 0;
    for (const int target : targets)
        if (target >= 0) bytes += target % 2 + 1;
    CHECK(std::abs(result.bits_per_byte.value() - sum / std::log(2.0) / bytes) < 1e-6);
    CHECK(!evaluate(gpt, 1, next, nullptr).bits_per_byte);
}

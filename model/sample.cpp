#include "model/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "kernels/numeric.h"
#include "model/inference.h"

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Orders tokens by falling logits, ties by id.
struct Likelier {
    const std::vector<float>& logits;
    bool operator()(int a, int b) const {
        const float at_a = logits[size_t(a)], at_b = logits[size_t(b)];
        return at_a != at_b ? at_a > at_b : a < b;
    }
};

void keep_top_k(std::vector<float>& logits, int k) {
    if (k == 0 || size_t(k) >= logits.size()) return;
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + k, order.end(), Likelier{logits});
    for (auto id = order.begin() + k; id != order.end(); ++id) logits[size_t(*id)] = kExcluded;
}

// The weights are proportional to the probabilities.
void keep_top_p(std::vector<float>& logits, const std::vector<double>& weights, double p) {
    if (p >= 1) return;
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    // All tokens below this sum to less than (1 - p) total, so the others reach p and only they need sorting.
    const double least = (1 - p) * total / double(weights.size());
    std::vector<int> order;
    for (size_t id = 0; id < weights.size(); id++) {
        if (weights[id] >= least)
            order.push_back(int(id));
        else
            logits[id] = kExcluded;
    }
    std::sort(order.begin(), order.end(), Likelier{logits});
    double sum = 0;
    for (size_t i = 0; i < order.size(); i++) {
        if (i > 0 && sum >= p * total) logits[size_t(order[i])] = kExcluded;
        sum += weights[size_t(order[i])];
    }
}

}  // namespace

int pick_token(std::vector<float>& logits, const SampleOptions& options, float uniform) {
    const size_t best = size_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (options.temperature == 0) return int(best);
    const double largest = logits[best];
    std::vector<double> weights(logits.size());  // 1 for the most likely token
    auto weigh = [&] {
        for (size_t id = 0; id < logits.size(); id++)
            weights[id] = std::exp((logits[id] - largest) / options.temperature);
    };
    keep_top_k(logits, options.top_k);
    weigh();
    if (options.top_p < 1) keep_top_p(logits, weights, options.top_p), weigh();

    double total = 0;
    for (double& weight : weights) {
        if (weight < options.min_p) weight = 0;
        total += weight;
    }
    double left = double(uniform) * total;
    for (size_t id = 0; id < weights.size(); id++) {
        left -= weights[id];
        if (left < 0) return int(id);
    }
    // Rounding kept `left` from becoming negative: return the last possible token.
    const auto last = std::find_if(weights.rbegin(), weights.rend(), [](double weight) { return weight > 0; });
    return std::max(0, int(weights.rend() - last) - 1);  // 0: NaN
}

namespace {

// A growing text.
struct GrowingText {
    size_t prompt;            // the prompt's number
    std::vector<int> tokens;  // the prompt and the new tokens
    int made = 0;             // number of new tokens
    size_t visible_from = 0;  // index of the first visible token
};

// Returns the start of the visible part of a text. A text that is longer than the model's sequences loses half a
// sequence at a time. The positions of the rest change, so it has to be read again, but only once per half sequence.
size_t visible_begin(size_t length, size_t longest) {
    if (length <= longest) return 0;
    const size_t lost = std::max<size_t>(1, longest / 2);
    return (length - longest + lost - 1) / lost * lost;
}

}  // namespace

void sample(Gpt& gpt, const std::vector<std::vector<int>>& prompts, const SampleOptions& options,
            const std::function<bool(size_t prompt, int token)>& on_token,
            const std::function<void(size_t prompt)>& on_end) {
    const size_t longest = size_t(gpt.options().seq_len), vocab = size_t(gpt.options().shape.vocab_size);
    const bool is_cached = gpt.options().cached_sequences > 0;
    std::vector<std::optional<GrowingText>> texts(is_cached ? size_t(gpt.options().cached_sequences) : 1);
    std::vector<float> logits(texts.size() * vocab), row(vocab);
    size_t next_prompt = 0;

    // Adds the token that is picked from the logits `from` to the text, or ends the text.
    auto grow = [&](std::optional<GrowingText>& text, const float* from) {
        row.assign(from, from + vocab);
        const Philox random = philox(options.seed, uint64_t(RandomPurpose::sampling) << 32, uint64_t(text->made));
        const int token = pick_token(row, options, uniform_from_bits(random.word[0]));
        const bool goes_on = token != options.stop_token && on_token(text->prompt, token);
        text->tokens.push_back(token);
        if (goes_on && ++text->made < options.tokens) return;
        on_end(text->prompt);
        text.reset();
    };
    // Computes the logits that follow the visible part of a text.
    auto read = [&](size_t sequence, GrowingText& text) {
        text.visible_from = visible_begin(text.tokens.size(), longest);
        const int* from = text.tokens.data() + text.visible_from;
        const int count = int(text.tokens.size() - text.visible_from);
        if (is_cached)
            prefill(gpt, int(sequence), from, count, logits.data());
        else
            next_token_logits(gpt, from, count, logits.data());
    };

    std::vector<NextToken> next;
    do {
        next.clear();
        for (size_t i = 0; i < texts.size(); i++) {
            std::optional<GrowingText>& text = texts[i];
            // Read a new text, a text that has lost its beginning or, without a cache, any text.
            while (text || next_prompt < prompts.size()) {
                if (text && is_cached && visible_begin(text->tokens.size(), longest) == text->visible_from) break;
                if (!text) text = {.prompt = next_prompt, .tokens = prompts[next_prompt]}, next_prompt++;
                read(i, *text);
                grow(text, logits.data());
            }
            if (text) next.push_back({int(i), text->tokens.back()});
        }
        if (!next.empty()) decode(gpt, next, logits.data());
        for (size_t i = 0; i < next.size(); i++) grow(texts[size_t(next[i].sequence)], logits.data() + i * vocab);
    } while (!next.empty());
}

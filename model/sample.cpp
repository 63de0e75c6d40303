#include "model/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Whether a token goes before another one in the order of falling logits.
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
    // All tokens below this sum to less than (1 - p) total, so that the others reach p: only those need sorting.
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
    std::vector<double> weights(logits.size());  // the likeliest token's is 1
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
    // Rounding kept `left` from becoming negative: the last one that is possible.
    const auto last = std::find_if(weights.rbegin(), weights.rend(), [](double weight) { return weight > 0; });
    return std::max(0, int(weights.rend() - last) - 1);  // 0: NaN
}

void sample(Gpt& gpt, const std::vector<std::vector<int>>& prompts, const SampleOptions& options,
            const std::function<bool(size_t prompt, int token)>& on_token,
            const std::function<void(size_t prompt)>& on_end) {
    const size_t longest = size_t(gpt.options().seq_len);
    std::vector<float> logits(size_t(gpt.options().shape.vocab_size));
    for (size_t prompt = 0; prompt < prompts.size(); prompt++) {
        std::vector<int> text = prompts[prompt];
        for (int i = 0; i < options.tokens; i++) {
            const size_t count = std::min(text.size(), longest);
            gpt.next_token_logits(text.data() + (text.size() - count), int(count), logits.data());
            const Philox random = philox(options.seed, uint64_t(RandomPurpose::sampling) << 32, uint64_t(i));
            const int token = pick_token(logits, options, uniform_from_bits(random.word[0]));
            if (token == options.stop_token || !on_token(prompt, token)) break;
            text.push_back(token);
        }
        on_end(prompt);
    }
}

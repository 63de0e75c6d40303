#include "model/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

int pick_token(std::vector<float>& logits, double temperature, int top_k, float uniform) {
    const auto best = std::max_element(logits.begin(), logits.end());
    if (temperature == 0) return int(best - logits.begin());

    if (top_k > 0 && size_t(top_k) < logits.size()) {
        std::vector<int> order(logits.size());
        std::iota(order.begin(), order.end(), 0);
        auto likelier = [&](int a, int b) {
            return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
        };
        std::nth_element(order.begin(), order.begin() + top_k, order.end(), likelier);
        for (auto id = order.begin() + top_k; id != order.end(); ++id)
            logits[size_t(*id)] = -std::numeric_limits<float>::infinity();
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (float logit : logits) total += std::exp((logit - largest) / temperature);
    double left = double(uniform) * total;
    int last_possible = 0;
    for (size_t id = 0; id < logits.size(); id++) {
        const double weight = std::exp((logits[id] - largest) / temperature);
        if (weight > 0) last_possible = int(id);
        left -= weight;
        if (left < 0) return int(id);
    }
    return last_possible;  // rounding kept `left` from becoming negative
}

void sample(Gpt& gpt, std::vector<int> prompt, const SampleOptions& options, const std::function<void(int)>& on_token) {
    const size_t longest = size_t(gpt.options().seq_len);
    std::vector<float> logits(size_t(gpt.options().shape.vocab_size));
    for (int i = 0; i < options.tokens; i++) {
        const size_t count = std::min(prompt.size(), longest);
        gpt.next_token_logits(prompt.data() + (prompt.size() - count), int(count), logits.data());
        const Philox random = philox(options.seed, uint64_t(RandomPurpose::sampling) << 32, uint64_t(i));
        const int token = pick_token(logits, options.temperature, options.top_k, uniform_from_bits(random.word[0]));
        if (token == options.stop_token) return;
        on_token(token);
        prompt.push_back(token);
    }
}

#include "model/evaluate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kernels/base/check.h"
#include "kernels/ops.h"
#include "model/inference.h"

// Fills a row with the last T + 1 tokens of the text; `targets` is -1 for tokens of the context.
static void fill_row(const Continuation& text, size_t longest, int* tokens, int* targets) {
    auto token = [&](size_t i) {
        return i < text.context.size() ? text.context[i] : text.predicted[i - text.context.size()];
    };
    require(!text.context.empty() && !text.predicted.empty() && text.predicted.size() <= longest,
            "log_likelihoods: text of %zu + %zu tokens, seq_len %zu", text.context.size(), text.predicted.size(),
            longest);
    const size_t count = std::min(text.tokens() - 1, longest), first = text.tokens() - 1 - count;
    for (size_t i = 0; i < count; i++) {
        tokens[i] = token(first + i);
        if (first + i + 1 >= text.context.size()) targets[i] = token(first + i + 1);
    }
}

Validation evaluate(Gpt& gpt, uint64_t batches, const std::function<Batch()>& next,
                    const std::function<int(int token)>& token_bytes, const std::function<void()>& between) {
    const size_t rows = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
    const size_t ranks = size_t(gpt.options().ranks), rank = size_t(gpt.options().rank);
    std::vector<double> losses(size_t(batches) * ranks);  // in the order of the stream
    std::array<double, 2> counts{};
    auto& [targets, bytes] = counts;
    for (uint64_t i = 0; i < batches; i++) {
        between();
        const Batch batch = next();
        losses[size_t(i) * ranks + rank] = batch_loss(gpt, batch.inputs, batch.targets);
        for (size_t row = 0; row < rows; row++) {
            if (batch.targets[row] < 0 || gpt.options().context.rank > 0) continue;
            targets++;
            if (token_bytes) bytes += token_bytes(batch.targets[row]);
        }
    }
    gpt.take_from_last_stage(losses);
    gpt.sum_over_ranks(losses);
    // Adding them in the stream's order gives the bits of a single rank.
    const double loss_sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    gpt.sum_over_ranks(counts);
    return {.loss = loss_sum / targets,
            .bits_per_byte = bytes > 0 ? std::optional(loss_sum / std::log(2.0) / bytes) : std::nullopt};
}

std::vector<double> log_likelihoods(Gpt& gpt, const std::vector<Continuation>& texts,
                                    const std::function<void()>& between) {
    const size_t T = size_t(gpt.options().seq_len), rows = size_t(gpt.options().batch) * T;
    const ContextParallel& context = gpt.options().context;
    const size_t ranks = size_t(gpt.options().sample_ranks()), parts_of_text = size_t(context.size);
    std::vector<size_t> order(texts.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) { return texts[i].tokens(); });
    // The longest texts come first. For shorter texts T is halved as often as they allow, so that a micro-batch holds
    // more of them. The position of a text does not depend on the number of ranks.
    struct Part {
        size_t begin, end;  // in `order`
        size_t seq_len;
    };
    std::vector<Part> parts;
    for (size_t begin = 0; begin < texts.size(); begin = parts.back().end) {
        size_t seq_len = T;
        while (seq_len % 2 == 0 && seq_len / 2 >= texts[order[begin]].tokens() - 1 && context.divides(int(seq_len / 2)))
            seq_len /= 2;
        parts.push_back({begin, std::min(texts.size(), begin + rows / seq_len), seq_len});
    }
    std::vector<double> scores(texts.size()), sums;
    std::vector<int> tokens(rows), targets(rows);
    std::vector<float> losses(rows);
    for (size_t round = 0; round < parts.size(); round += ranks) {
        between();
        // If parameters are sharded, all ranks pass through the model together, in the last round possibly without a
        // text.
        const size_t number = round + size_t(gpt.options().sample_rank()),
                     last = std::min(parts.size(), round + ranks) - 1;
        const Part own = number < parts.size() ? parts[number] : Part{0, 0, T};
        std::ranges::fill(tokens, 0), std::ranges::fill(targets, -1);
        for (size_t i = own.begin, at = 0; i < own.end; i++, at += own.seq_len)
            fill_row(texts[order[i]], T, &tokens[at], &targets[at]);
        batch_loss(gpt, tokens.data(), targets.data(), losses.data(), int(own.seq_len));
        const size_t first = parts[round].begin;
        sums.assign((parts[last].end - first) * parts_of_text, 0.0);
        for (size_t i = own.begin, at = 0; i < own.end; i++)
            for (size_t k = 0; k < own.seq_len; k++)
                sums[(i - first) * parts_of_text + size_t(context.rank)] -= double(losses[at++]);
        gpt.take_from_last_stage(sums);
        gpt.sum_over_ranks(sums);
        for (size_t i = 0; i < sums.size(); i++) scores[order[first + i / parts_of_text]] += sums[i];
    }
    return scores;
}

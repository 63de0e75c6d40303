#include "model/evaluate.h"

#include <algorithm>
#include <cmath>

Validation evaluate(Gpt& gpt, uint64_t batches, const std::function<Batch()>& next,
                    const std::function<int(int token)>& token_bytes) {
    const size_t rows = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
    std::vector<double> losses(size_t(gpt.options().ranks));
    std::array<double, 2> counts{};
    auto& [targets, bytes] = counts;
    double loss_sum = 0;
    for (uint64_t i = 0; i < batches; i++) {
        const Batch batch = next();
        std::ranges::fill(losses, 0.0);
        losses[size_t(gpt.options().rank)] = gpt.evaluate(batch.inputs, batch.targets);
        for (size_t row = 0; row < rows; row++) {
            if (batch.targets[row] < 0) continue;
            targets++;
            if (token_bytes) bytes += token_bytes(batch.targets[row]);
        }
        // The ranks' batches follow each other in the stream: added in its order, the bits are one rank's.
        gpt.sum_over_ranks(losses);
        for (const double loss : losses) loss_sum += loss;
    }
    gpt.sum_over_ranks(counts);
    Validation result{loss_sum / targets, std::nullopt};
    if (bytes > 0) result.bits_per_byte = loss_sum / std::log(2.0) / bytes;
    return result;
}

#include "model/evaluate.h"

#include <cmath>

Validation evaluate(Gpt& gpt, uint64_t batches, const std::function<Batch()>& next,
                    const std::function<int(int token)>& token_bytes) {
    const size_t rows = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
    std::array<double, StepResult::kVotes> sums{};
    auto& [loss_sum, targets, bytes] = sums;
    for (uint64_t i = 0; i < batches; i++) {
        const Batch batch = next();
        loss_sum += gpt.evaluate(batch.inputs, batch.targets);
        for (size_t row = 0; row < rows; row++) {
            if (batch.targets[row] < 0) continue;
            targets++;
            if (token_bytes) bytes += token_bytes(batch.targets[row]);
        }
    }
    gpt.sum_over_ranks(sums);
    Validation result{loss_sum / targets, std::nullopt};
    if (bytes > 0) result.bits_per_byte = loss_sum / std::log(2.0) / bytes;
    return result;
}

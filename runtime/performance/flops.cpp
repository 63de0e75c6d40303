#include "runtime/performance/flops.h"

double flops_per_token(const FlopsPerToken& model) {
    return 6.0 * double(model.parameters) + 6.0 * model.n_layer * double(model.n_embd) * model.seq_len;
}

std::optional<double> model_flops_utilisation(double flops_per_token, double tokens_per_s, double peak_flops_per_s) {
    if (peak_flops_per_s <= 0) return std::nullopt;
    return flops_per_token * tokens_per_s / peak_flops_per_s;
}

// Arithmetic per token, for judging speed.
#pragma once

#include <cstdint>
#include <optional>

struct FlopsPerToken {
    int64_t parameters;  // all that are stored: position embedding and the vocabulary's padding rows included
    int n_layer, n_embd, seq_len;
};

// Floating-point operations of forward and backward per token: 6 parameters + 6 n_layer n_embd seq_len. Each weight
// takes part in three multiply-adds (Kaplan et al., arXiv 2001.08361, section 2.1); attention's two products take
// 2 * 2 n_embd seq_len each way forward, three times that with backward, of which causality needs half. This is llm.c's
// convention (gpt2_estimate_mfu). PaLM's (arXiv 2204.02311, appendix B) counts the whole square: twice the second term.
double flops_per_token(const FlopsPerToken& model);

// The share of the machine's peak that the model's arithmetic uses; nothing where the peak is unknown (0), as on a CPU.
std::optional<double> model_flops_utilisation(double flops_per_token, double tokens_per_s, double peak_flops_per_s);

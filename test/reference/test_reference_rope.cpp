// The reference of QK norm and RoPE checked by mathematics: the backward op is the derivative of the forward op.
#include "test/reference/reference.h"
#include "test/support/catch.h"
#include "test/support/random_values.h"

namespace {

constexpr int kBatch = 2, kSeqLen = 3, kHeads = 2, kKvHeads = 1, kHeadSize = 5, kRotary = 4;
constexpr double kStep = 0x1p-13;

// As in test_reference.cpp: a few dozen roundings to float on each side.
double tolerance(double gradient) { return 64 * 0x1p-24 * (1 + std::abs(gradient)); }

struct Inputs {
    std::vector<double> qkv = random_values(size_t(kBatch) * kSeqLen * (kHeads + 2 * kKvHeads) * kHeadSize, 1, 1, 0.5);
    std::vector<double> q_weight = random_values(kHeadSize, 2, 0.5, 1), k_weight = random_values(kHeadSize, 3, 0.5, 1);
    std::vector<double> dout = random_values(qkv.size(), 4);
};
struct Results {
    std::vector<double> qkv, raw = std::vector<double>(size_t(kBatch) * kSeqLen * (kHeads + kKvHeads) * kHeadSize);
    std::vector<float> rstd = std::vector<float>(size_t(kBatch) * kSeqLen * (kHeads + kKvHeads));
};

std::vector<float> table() {
    std::vector<float> entries;
    for (double angle : random_values(kSeqLen * kRotary / 2, 5, 4))
        entries.insert(entries.end(), {float(1.5 * std::cos(angle)), float(1.5 * std::sin(angle))});
    return entries;
}

Results forward(Inputs& inputs, bool rope, bool norm, bool weights) {
    static const std::vector<float> entries = table();
    Results results{inputs.qkv};
    ref::qk_norm_rope_forward({.qkv = results.qkv.data(),
                               .raw = weights ? View(results.raw.data()) : nullptr,
                               .rstd = norm ? results.rstd.data() : nullptr,
                               .q_weight = weights ? ConstView(inputs.q_weight.data()) : nullptr,
                               .k_weight = weights ? ConstView(inputs.k_weight.data()) : nullptr,
                               .table = rope ? entries.data() : nullptr,
                               .batch = kBatch,
                               .seq_len = kSeqLen,
                               .n_head = kHeads,
                               .n_kv_head = kKvHeads,
                               .head_size = kHeadSize,
                               .rotary = rope ? kRotary : 0,
                               .eps = 0x1p-10f});
    return results;
}

}  // namespace

TEST_CASE("ref::qk_norm_rope_backward is the derivative of ref::qk_norm_rope_forward", "[reference]") {
    for (bool rope : {false, true})
        for (bool norm : {false, true})
            for (bool weights : {false, true}) {
                if (weights && !norm) continue;
                INFO("rope " << rope << ", norm " << norm << ", weights " << weights);
                Inputs inputs;
                const Results results = forward(inputs, rope, norm, weights);
                const std::vector<float> entries = table();
                std::vector<double> dqkv = inputs.dout;
                std::vector<float> dq_weight(kHeadSize, 0.25f), dk_weight(kHeadSize, 0.5f);
                ref::qk_norm_rope_backward({.dqkv = dqkv.data(),
                                            .dq_weight = weights ? dq_weight.data() : nullptr,
                                            .dk_weight = weights ? dk_weight.data() : nullptr,
                                            .scratch = nullptr,
                                            .qkv = results.qkv.data(),
                                            .raw = weights ? ConstView(results.raw.data()) : nullptr,
                                            .rstd = norm ? results.rstd.data() : nullptr,
                                            .q_weight = weights ? ConstView(inputs.q_weight.data()) : nullptr,
                                            .k_weight = weights ? ConstView(inputs.k_weight.data()) : nullptr,
                                            .table = rope ? entries.data() : nullptr,
                                            .batch = kBatch,
                                            .seq_len = kSeqLen,
                                            .n_head = kHeads,
                                            .n_kv_head = kKvHeads,
                                            .head_size = kHeadSize,
                                            .rotary = rope ? kRotary : 0,
                                            .accumulate = true});
                auto check = [&](const char* name, std::vector<double>& input, const auto& gradient, double before) {
                    for (size_t i = 0; i < input.size(); i++) {
                        auto objective = [&](double change) {
                            const double centre = input[i];
                            input[i] += change;
                            const std::vector<double> out = forward(inputs, rope, norm, weights).qkv;
                            input[i] = centre;
                            return ref::dot(out.data(), inputs.dout.data(), int(out.size()));
                        };
                        const double expected = before + (objective(kStep) - objective(-kStep)) / (2 * kStep);
                        INFO(name << "[" << i << "] is " << gradient[i] << ", the difference quotient " << expected);
                        if (!(std::abs(gradient[i] - expected) <= tolerance(expected))) FAIL();
                    }
                };
                check("qkv", inputs.qkv, dqkv, 0);
                if (weights) check("q_weight", inputs.q_weight, dq_weight, 0.25);
                if (weights) check("k_weight", inputs.k_weight, dk_weight, 0.5);
                CHECK(!dqkv.empty());
            }
}

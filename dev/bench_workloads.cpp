#include "dev/bench_workloads.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "runtime/config/config.h"

namespace {

const GptShape kGpt2Small{12, 12, 12, 768, 1024, 50257}, kGpt2Medium{24, 16, 16, 1024, 1024, 50257},
    kGpt2Large{36, 20, 20, 1280, 1024, 50257}, kGpt2Xl{48, 25, 25, 1600, 1024, 50257};
const GptShape kSixLayers{6, 6, 6, 384, 256, 4096};

// A Llama model: grouped-query attention, SwiGLU, RMSNorm, RoPE, no biases, untied head.
GptShape llama(GptShape sizes, int hidden) {
    sizes.given_hidden = hidden;
    sizes.activation = ActivationFunction::silu, sizes.gated_mlp = true;
    sizes.norm = NormKind::rmsnorm, sizes.norm_bias = false;
    sizes.position = PositionKind::rope;
    sizes.attention_bias = AttentionBias::none, sizes.mlp_bias = false;
    sizes.tie_embeddings = false;
    return sizes;
}
const GptShape kSmallLlama = llama({6, 6, 2, 384, 256, 4096}, 1024);
const GptShape kTinyLlama = llama({22, 32, 4, 2048, 2048, 32000}, 5632);  // TinyLlama 1.1B

// For tests of the benchmarks, also on the simulated GPU.
const Workload kTiny{"tiny", "2 layers, 64 wide, vocabulary 256", {2, 1, 1, 64, 32, 256}, 2, 16};

}  // namespace

int Workload::rows_of_head() const {
    return head_rows ? std::min(head_rows, tokens()) : default_head_rows(batch, seq_len);
}

std::string Workload::title() const { return format("%s, B=%d, T=%d", name.c_str(), batch, seq_len); }

std::vector<Workload> default_workloads(bool on_gpu) {
    if (on_gpu)
        return {
            {"124M", "GPT-2 124M", kGpt2Small, 64, 1024},
            {"1558M", "GPT-2 1558M", kGpt2Xl, 16, 1024},
            {"350M", "GPT-2 350M", kGpt2Medium, 32, 1024},
            {"774M", "GPT-2 774M", kGpt2Large, 32, 1024},
            {"llama-1.1B", "Llama 1.1B, 4 of 32 heads for keys", kTinyLlama, 8, 2048},
        };
    return {
        {"124M", "GPT-2 124M", kGpt2Small, 4, 64},
        {"small-4", "6 layers, 384 wide, vocabulary 4096", kSixLayers, 4, 256},
        {"small-8", "6 layers, 384 wide, vocabulary 4096", kSixLayers, 8, 256},
        {"llama-small", "Llama, 6 layers, 384 wide, 2 of 6 heads for keys, vocabulary 4096", kSmallLlama, 4, 256},
    };
}

Workload find_workload(const std::string& key, bool on_gpu) {
    std::vector<Workload> all = default_workloads(on_gpu);
    all.push_back(kTiny);
    std::string keys;
    for (const Workload& work : all) {
        if (work.key == key) return work;
        keys += (keys.empty() ? "" : ", ") + work.key;
    }
    fail(Exit::usage, "unknown workload %s; choose from %s", key.c_str(), keys.c_str());
}

GptOptions options_of(const Workload& work, Dtype precision) {
    GptOptions options;
    options.shape = work.shape;
    options.batch = work.batch, options.seq_len = work.seq_len;
    options.precision = precision, options.fp8 = work.fp8;
    options.head_rows = work.rows_of_head();
    if (work.offload.empty()) return options;
    options.offload_optimizer = options.offload_activations = true;
    options.offload_weights = options.offload_gradients = work.offload == "all";
    options.offload_window_bytes = size_t(192) << 20;
    options.recompute = Recompute::block;
    return options;
}

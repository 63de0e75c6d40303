#include "model/huggingface.h"

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/base/check.h"

namespace {

// The rows of our tensor that a Hugging Face tensor holds.
enum class Part { whole, query, key, value, gate, up };

struct Name {
    std::string_view ours;  // in tensor_table()
    const char* theirs;     // after the layer's prefix if per layer
    Part part = Part::whole;
    bool transposed = false;  // stored as (in, out): GPT-2's Conv1D
};

struct Naming {
    const char* prefix;  // of every name except lm_head's
    const char* layers;  // after it, before the layer's number
    std::span<const Name> names;
};

constexpr Name kGpt2Names[] = {
    {"wte", "wte.weight"},
    {"wpe", "wpe.weight"},
    {"norm_f.weight", "ln_f.weight"},
    {"norm_f.bias", "ln_f.bias"},
    {"norm1.weight", "ln_1.weight"},
    {"norm1.bias", "ln_1.bias"},
    {"qkv.weight", "attn.c_attn.weight", Part::whole, true},
    {"qkv.bias", "attn.c_attn.bias"},
    {"attn_proj.weight", "attn.c_proj.weight", Part::whole, true},
    {"attn_proj.bias", "attn.c_proj.bias"},
    {"norm2.weight", "ln_2.weight"},
    {"norm2.bias", "ln_2.bias"},
    {"fc.weight", "mlp.c_fc.weight", Part::whole, true},
    {"fc.bias", "mlp.c_fc.bias"},
    {"fc_proj.weight", "mlp.c_proj.weight", Part::whole, true},
    {"fc_proj.bias", "mlp.c_proj.bias"},
    {"head.weight", "lm_head.weight"},
};
constexpr Naming kGpt2 = {"transformer.", "h.", kGpt2Names};

constexpr Name kLlamaNames[] = {
    {"wte", "embed_tokens.weight"},
    {"norm_f.weight", "norm.weight"},
    {"norm1.weight", "input_layernorm.weight"},
    {"qkv.weight", "self_attn.q_proj.weight", Part::query},
    {"qkv.weight", "self_attn.k_proj.weight", Part::key},
    {"qkv.weight", "self_attn.v_proj.weight", Part::value},
    {"qkv.bias", "self_attn.q_proj.bias", Part::query},
    {"qkv.bias", "self_attn.k_proj.bias", Part::key},
    {"qkv.bias", "self_attn.v_proj.bias", Part::value},
    {"q_norm.weight", "self_attn.q_norm.weight"},
    {"k_norm.weight", "self_attn.k_norm.weight"},
    {"attn_proj.weight", "self_attn.o_proj.weight"},
    {"attn_proj.bias", "self_attn.o_proj.bias"},
    {"norm2.weight", "post_attention_layernorm.weight"},
    {"fc.weight", "mlp.gate_proj.weight", Part::gate},
    {"fc.weight", "mlp.up_proj.weight", Part::up},
    {"fc.bias", "mlp.gate_proj.bias", Part::gate},
    {"fc.bias", "mlp.up_proj.bias", Part::up},
    {"fc_proj.weight", "mlp.down_proj.weight"},
    {"fc_proj.bias", "mlp.down_proj.bias"},
    {"head.weight", "lm_head.weight"},
};
constexpr Naming kLlama = {"model.", "layers.", kLlamaNames};

struct Rows {
    int first, count;
};

Rows rows_of(Part part, const GptShape& shape, int rows) {
    const int queries = shape.attention_channels(), keys = shape.kv_heads() * shape.head_size();
    switch (part) {
        case Part::whole: return {0, rows};
        case Part::query: return {0, queries};
        case Part::key: return {queries, keys};
        case Part::value: return {queries + keys, keys};
        case Part::gate: return {0, shape.hidden()};
        case Part::up: return {shape.hidden(), shape.hidden()};
    }
    return {0, rows};
}

// Returns rows of a tensor as a separate tensor: this rank's part of them.
NamedTensor select_rows(NamedTensor tensor, const Rows& rows) {
    const size_t row_elements = tensor.shape.size() == 1 ? 1 : tensor.shape[1];
    size_t begin = size_t(rows.first) * row_elements, end = begin + size_t(rows.count) * row_elements;
    if (!tensor.boxes.empty()) {
        size_t place = 0;
        for (const Box& box : std::exchange(tensor.boxes, {})) {
            if (size_t(rows.first) <= box.row && box.row < size_t(rows.first + rows.count)) {
                if (tensor.boxes.empty()) begin = place;
                end = place + box.count();
                tensor.boxes.push_back({box.row - size_t(rows.first), box.rows, box.col, box.cols});
            }
            place += box.count();
        }
    }
    const size_t first = std::clamp(tensor.first, begin, end);
    const size_t last = std::clamp(tensor.first + tensor.count, begin, end);
    tensor.values = tensor.values.from(first - std::min(first, tensor.first));
    tensor.first = first - begin;
    tensor.count = last - first;
    tensor.shape[0] = size_t(rows.count);
    return tensor;
}

std::string prefix_of(const Naming& naming, const GptShape& shape,
                      const std::function<bool(const std::string& name)>& has) {
    const bool is_gpt2 = &naming == &kGpt2;
    // GPT-2 with a tied head may be stored with or without the prefix; the first files had none.
    if (!has) return is_gpt2 && !shape.has_head() ? "" : naming.prefix;
    return has(std::string(naming.prefix) + naming.names[0].theirs) ? naming.prefix : "";
}

}  // namespace

std::vector<NamedTensor> hf_tensors(const Gpt& gpt, const std::function<bool(const std::string& name)>& has) {
    return hf_tensors(gpt.layout(), gpt.master_tensors(), has);
}

std::vector<NamedTensor> hf_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& ours,
                                    const std::function<bool(const std::string& name)>& has) {
    const GptShape& shape = layout.whole;
    const Naming& naming = shape.has_positions() ? kGpt2 : kLlama;
    const std::string prefix = prefix_of(naming, shape, has);
    std::vector<NamedTensor> tensors;
    for (size_t i = 0; i < ours.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const TensorRow& row = *tensor.row;
        const NamedTensor whole = row.is_padded() ? without_padding(ours[i], shape) : ours[i];
        const std::string layer = tensor.layer < 0 ? "" : naming.layers + std::to_string(tensor.layer) + ".";
        const size_t before = tensors.size();
        for (const Name& name : naming.names) {
            if (name.ours != row.name) continue;
            NamedTensor hf = select_rows(whole, rows_of(name.part, shape, int(whole.shape[0])));
            hf.name = name.ours == "head.weight" ? name.theirs : prefix + layer + name.theirs;
            hf.transposed = name.transposed;
            if (hf.transposed) std::swap(hf.shape[0], hf.shape[1]);
            tensors.push_back(std::move(hf));
        }
        require(tensors.size() > before, "%s has no Hugging Face name", tensor.name);
    }
    return tensors;
}

bool is_hf_buffer(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
           name.ends_with(".rotary_emb.inv_freq");
}

// Host code; no kernel. The checks of the attention kernels for sm_90a (arch_kernels.h).
#include <utility>

#include "kernels/base/check.h"
#include "kernels/cuda/arch_check.h"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace ops {

namespace {

// Positions in two tiles of keys. A query sees all, some or none of a tile.
constexpr int kBatch = 2, kSeqLen = 140;

struct Case {
    Dtype dtype;
    int head_size, n_head, n_kv_head, window, document;  // document: their length; 0: no documents
};
// Each instance of the kernel once.
constexpr Case kCases[] = {{Dtype::bf16, 64, 2, 2, 0, 0},
                           {Dtype::fp16, 64, 2, 1, 50, 0},
                           {Dtype::bf16, 128, 1, 1, 0, 100},
                           {Dtype::fp16, 128, 2, 1, 0, 0}};

std::string text_of(const Case& c) {
    return format("%s, %d heads of %d, %d key-value heads, window %d, documents of %d: ", name_of(c.dtype), c.n_head,
                  c.head_size, c.n_kv_head, c.window, c.document);
}

// The position of the first key that each query sees.
DeviceBuffer first_keys(int document) {
    std::vector<int> first;
    for (int i = 0; i < kBatch * kSeqLen; i++) first.push_back(i % kSeqLen / document * document);
    return device_ints(first);
}

// Inputs and outputs of both passes. Two of them for the same case have the same inputs.
struct Arrays {
    CheckArray qkv, dout, out, lse, dqkv;
    DeviceBuffer first_key;

    explicit Arrays(const Case& c)
        : qkv(random_array(c.dtype, kPositions * columns(c), 1)),
          dout(random_array(c.dtype, kPositions * c.n_head * c.head_size, 2)),
          out(c.dtype, dout.count),
          lse(Dtype::fp32, kPositions * c.n_head),
          dqkv(c.dtype, qkv.count),
          first_key(c.document ? first_keys(c.document) : DeviceBuffer()) {}

    AttentionForward forward(const Case& c) const {
        auto op = of_case<AttentionForward>(c);
        op.out = out.view(), op.lse = lse.view().as<float>();
        return op;
    }
    AttentionBackward backward(const Case& c) const {
        auto op = of_case<AttentionBackward>(c);
        op.dqkv = dqkv.view(), op.dout = dout.view(), op.out = out.view(), op.lse = lse.view().as<float>();
        return op;
    }

private:
    static constexpr float kScale = 0.5f;
    static constexpr size_t kPositions = size_t(kBatch) * kSeqLen;
    static size_t columns(const Case& c) { return size_t(c.n_head + 2 * c.n_kv_head) * c.head_size; }

    // An op with the arguments that both passes have in common.
    template <class Op> Op of_case(const Case& c) const {
        Op op{};
        op.qkv = qkv.view();
        op.batch = kBatch, op.seq_len = kSeqLen;
        op.n_head = c.n_head, op.n_kv_head = c.n_kv_head, op.head_size = c.head_size;
        op.scale = kScale;
        op.window = c.window;
        op.first_key = static_cast<const int*>(first_key.data());
        return op;
    }
};

// Both kernels round each weight, at most 1, relative to different maxima, and the results.
double rounding_of(const Case& c) { return c.dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11; }

std::string forward_difference(const Case& c) {
    const Arrays found(c), expected(c);
    if (!attention_forward_sm90(found.forward(c), {})) return "it rejects this op";
    attention_forward(expected.forward(c), {});
    const std::string text = difference("log-sum-exp", found.lse, expected.lse, 1e-5, 1e-5);
    return text.empty() ? difference("output", found.out, expected.out, rounding_of(c), rounding_of(c)) : text;
}

std::string backward_difference(const Case& c) {
    const Arrays found(c);
    const CheckArray expected(c.dtype, found.dqkv.count);
    attention_forward(found.forward(c), {});
    AttentionBackward op = found.backward(c), portable = op;
    portable.dqkv = expected.view();
    const DeviceBuffer scratch(attention_backward_sm90_scratch_bytes(op)),
        more(attention_backward_scratch_bytes(portable));
    op.scratch = scratch.data(), portable.scratch = more.data();
    if (!attention_backward_sm90(op, {})) return "it rejects this op";
    attention_backward(portable, {});
    // The gradients of the scores are a few times larger than the weights, and are rounded too.
    return difference("gradient", found.dqkv, expected, 2 * rounding_of(c), 4 * rounding_of(c));
}

// The first difference that a check finds in any case.
std::string first_difference(std::string (*check)(const Case& c)) {
    for (const Case& c : kCases)
        if (const std::string found = check(c); !found.empty()) return text_of(c) + found;
    return "";
}

}  // namespace

std::string attention_forward_sm90_difference() { return first_difference(forward_difference); }
std::string attention_backward_sm90_difference() { return first_difference(backward_difference); }

}  // namespace ops

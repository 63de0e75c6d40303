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
constexpr int kBatch = 2, kSeqLen = 200;

struct Case {
    Dtype dtype;
    int head_size, n_head, n_kv_head, window, document;  // document: their length; 0: no documents
};
// Each instance of the kernel once.
constexpr Case kCases[] = {{Dtype::bf16, 64, 2, 2, 0, 0},
                           {Dtype::fp16, 64, 2, 1, 50, 0},
                           {Dtype::bf16, 128, 1, 1, 0, 130},
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

struct Forward {
    CheckArray out, lse;

    explicit Forward(const Case& c)
        : out(c.dtype, size_t(kBatch) * kSeqLen * c.n_head * c.head_size),
          lse(Dtype::fp32, size_t(kBatch) * kSeqLen * c.n_head) {}
};

std::string forward_difference(const Case& c) {
    const size_t columns = size_t(c.n_head + 2 * c.n_kv_head) * c.head_size;
    const CheckArray qkv = random_array(c.dtype, kBatch * kSeqLen * columns, 1);
    const DeviceBuffer documents = c.document ? first_keys(c.document) : DeviceBuffer();
    const Forward found(c), expected(c);
    AttentionForward op{.out = found.out.view(),
                        .lse = found.lse.view().as<float>(),
                        .qkv = qkv.view(),
                        .batch = kBatch,
                        .seq_len = kSeqLen,
                        .n_head = c.n_head,
                        .n_kv_head = c.n_kv_head,
                        .head_size = c.head_size,
                        .scale = 0.5f,
                        .window = c.window,
                        .first_key = static_cast<const int*>(documents.data())};
    if (!attention_forward_sm90(op, {})) return "it rejects this op";
    op.out = expected.out.view(), op.lse = expected.lse.view().as<float>();
    attention_forward(op, {});
    // Both round each weight, at most 1, and the output; the weights relative to different maxima.
    const double rounding = c.dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11;
    const std::string difference = ::difference("log-sum-exp", found.lse, expected.lse, 1e-5, 1e-5);
    return difference.empty() ? ::difference("output", found.out, expected.out, rounding, rounding) : difference;
}

}  // namespace

std::string attention_forward_sm90_difference() {
    for (const Case& c : kCases)
        if (const std::string found = forward_difference(c); !found.empty()) return text_of(c) + found;
    return "";
}

}  // namespace ops

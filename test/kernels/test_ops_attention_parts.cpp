// attention_forward and attention_backward of a part of the heads, with dropout.
#include "test/support/attention.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"

namespace {

struct Shape {
    int batch, seq_len, n_head, n_kv_head, head_size, parts;

    int queries() const { return n_head * head_size; }
    int keys() const { return n_kv_head * head_size; }
    size_t rows() const { return size_t(batch) * seq_len; }
};
// Each kernel of the head sizes, groups of heads, sequences that end inside a tile.
constexpr Shape kShapes[] = {{2, 45, 4, 4, 64, 2},  {1, 140, 4, 2, 64, 2}, {2, 37, 6, 2, 128, 2}, {1, 50, 2, 2, 96, 2},
                             {1, 40, 2, 2, 256, 2}, {1, 50, 3, 3, 20, 3},  {1, 70, 8, 4, 16, 4}};

template <class T> struct Results {
    std::vector<T> out;
    std::vector<float> lse;
    std::vector<T> dqkv;
};

// Runs the heads of `s`. The first is head `first_head` of the model.
template <class T>
Results<T> run(const Shape& s, const std::vector<double>& qkvs, const std::vector<double>& douts, int first_head) {
    const OnDevice<T> device;
    std::vector<uint64_t> sample_keys;
    for (int b = 0; b < s.batch; b++) sample_keys.push_back(ops::dropout_key(3, uint64_t(b)));
    Array<uint64_t> keys("keys", Role::input, sample_keys);
    Stored<T> qkv("qkv", Role::input, qkvs), dout("dout", Role::input, douts);
    Stored<T> out("out", Role::output, nans(douts.size())), dqkv("dqkv", Role::output, nans(qkvs.size()));
    Array<float> lse("lse", Role::output, nans(s.rows() * s.n_head));
    const float scale = float(1 / std::sqrt(s.head_size));
    const ops::DropoutMask mask = {
        .keys = keys.on(device), .threshold = ops::dropout_threshold(0.3), .place = (4u << 16) + uint32_t(first_head)};
    ops::attention_forward({.out = out.on(device),
                            .lse = lse.on(device),
                            .qkv = qkv.on(device),
                            .batch = s.batch,
                            .seq_len = s.seq_len,
                            .n_head = s.n_head,
                            .n_kv_head = s.n_kv_head,
                            .head_size = s.head_size,
                            .scale = scale,
                            .dropout = mask},
                           Stream());
    ops::AttentionBackward backward{.dqkv = dqkv.on(device),
                                    .scratch = nullptr,
                                    .dout = dout.on(device),
                                    .qkv = qkv.on(device),
                                    .out = out.on(device),
                                    .lse = lse.on(device),
                                    .batch = s.batch,
                                    .seq_len = s.seq_len,
                                    .n_head = s.n_head,
                                    .n_kv_head = s.n_kv_head,
                                    .head_size = s.head_size,
                                    .scale = scale,
                                    .dropout = mask};
    auto scratch = scratch_of(ops::attention_backward_scratch_bytes(backward));
    backward.scratch = scratch.on(device);
    ops::attention_backward(backward, Stream());
    return {out.fetch(), lse.fetch(), dqkv.fetch()};
}

}  // namespace

TEMPLATE_TEST_CASE("attention of parts of the heads has the bits of all heads", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes) {
        const std::initializer_list<int> qkv_widths = {s.queries(), s.keys(), s.keys()};
        const std::vector<double> qkv = random_values(s.rows() * size_t(s.queries() + 2 * s.keys()), 1);
        const std::vector<double> dout = random_values(s.rows() * size_t(s.queries()), 2);
        const Results<TestType> whole = run<TestType>(s, qkv, dout, 0);
        for (int part = 0; part < s.parts; part++) {
            INFO("seq_len " << s.seq_len << ", heads " << s.n_head << " and " << s.n_kv_head << " of " << s.head_size
                            << ", part " << part << " of " << s.parts);
            Shape of_part = s;
            of_part.n_head /= s.parts;
            of_part.n_kv_head /= s.parts;
            auto of = [&](const auto& values, std::initializer_list<int> widths) {
                return attention::part_of(values, widths, part, s.parts);
            };
            const Results<TestType> got =
                run<TestType>(of_part, of(qkv, qkv_widths), of(dout, {s.queries()}), part * of_part.n_head);
            CHECK(have_same_bits(got.out, of(whole.out, {s.queries()})));
            CHECK(have_same_bits(got.lse, of(whole.lse, {s.n_head * s.seq_len})));
            CHECK(have_same_bits(got.dqkv, of(whole.dqkv, qkv_widths)));
        }
    }
}

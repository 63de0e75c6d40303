// attention_backward_sm90 against ref::, with the contracts of attention_backward.
#include "kernels/cuda/attention/attention_sm90.h"
#include "test/simt/options.h"
#include "test/simt/sanitizers.h"
#include "test/support/attention.h"
#include "test/support/catch.h"

namespace {

using namespace attention;

// Runs the kernel and returns dqkv. Scratch and outputs begin with NaN.
template <class T> std::vector<T> run(BackwardArrays<T>& arrays) {
    ops::AttentionBackward op = arrays.op(OnDevice<T>());
    auto scratch = scratch_of(ops::attention_backward_sm90_scratch_bytes(op));
    op.scratch = scratch.on(OnDevice<T>());
    REQUIRE(ops::attention_backward_sm90(op, Stream()));
    scratch.fetch();
    return arrays.dqkv.fetch();
}

template <class T> void check(const Shape& s) {
    INFO(describe(s));
    BackwardArrays<T> arrays(s);
    const std::vector<double> bounds = dqkv_bounds<T>(s, arrays.op(OnHost()));
    run(arrays);
    ref::attention_backward(arrays.op(OnHost()));
    check_close(arrays.dqkv, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.dqkv.host[i]); });
}

// Ends before, at and after the borders of runs, tiles and key blocks.
constexpr Shape kShapes64[] = {{1, 1, 1, 1, 64, 1},   {1, 15, 1, 1, 64, 1},  {2, 16, 1, 1, 64, 16},
                               {1, 17, 2, 2, 64, 1},  {1, 63, 1, 1, 64, 1},  {1, 64, 1, 1, 64, 1},
                               {1, 65, 1, 1, 64, 1},  {1, 127, 1, 1, 64, 1}, {1, 128, 2, 2, 64, 1},
                               {2, 129, 1, 1, 64, 1}, {1, 200, 1, 1, 64, 4}, {1, 257, 1, 1, 64, 1}};
constexpr Shape kShapes128[] = {{1, 1, 1, 1, 128, 1},   {1, 15, 1, 1, 128, 1},  {2, 16, 1, 1, 128, 1},
                                {1, 17, 1, 1, 128, 1},  {1, 63, 1, 1, 128, 1},  {1, 64, 2, 2, 128, 16},
                                {1, 65, 1, 1, 128, 1},  {1, 127, 1, 1, 128, 1}, {1, 128, 1, 1, 128, 1},
                                {2, 129, 1, 1, 128, 1}, {1, 200, 1, 1, 128, 4}, {1, 257, 1, 1, 128, 1}};

// Groups that do and do not divide a tile, and more heads than a tile has runs.
constexpr Shape kGroups[] = {{2, 45, 3, 1, 64, 1},  {1, 150, 4, 2, 64, 1}, {1, 140, 7, 1, 64, 1},
                             {1, 20, 19, 1, 64, 4}, {1, 90, 6, 2, 128, 1}, {1, 40, 5, 1, 128, 16},
                             {2, 140, 2, 1, 128, 1}};

// Windows shorter and longer than a tile, documents that begin inside tiles, both, with groups.
constexpr Shape kMasks[] = {
    {.batch = 2, .seq_len = 70, .n_head = 2, .n_kv_head = 2, .head_size = 64, .sharpness = 1, .window = 1},
    {.batch = 1, .seq_len = 200, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .window = 17},
    {.batch = 1, .seq_len = 400, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 16, .window = 64},
    {.batch = 1, .seq_len = 400, .n_head = 3, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .window = 200},
    {.batch = 1, .seq_len = 280, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .document = 64},
    {.batch = 3, .seq_len = 140, .n_head = 2, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .document = 37},
    {.batch = 1, .seq_len = 300, .n_head = 2, .n_kv_head = 1, .head_size = 128, .sharpness = 1, .window = 45},
    {.batch = 2, .seq_len = 290, .n_head = 1, .n_kv_head = 1, .head_size = 128, .sharpness = 4, .document = 133},
    {2, 170, 3, 1, 64, 4, 50, 0, 71},
    {2, 175, 6, 2, 128, 4, 130, 0, 141}};

// Key blocks in two and three parts: all parts have sums of a tile, or only some of them.
constexpr Shape kParts[] = {
    {1, 513, 6, 1, 128, 1},
    {.batch = 1, .seq_len = 1000, .n_head = 4, .n_kv_head = 1, .head_size = 128, .sharpness = 1, .window = 60},
    {.batch = 1, .seq_len = 770, .n_head = 12, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .document = 150}};

// Runs the op of one kv head of one sample alone.
template <class T> std::vector<T> run_head(const BackwardArrays<T>& whole, int b, int kv_head) {
    const Shape& s = whole.s;
    const OnDevice<T> device;
    const auto of = [&](const auto& samples, std::initializer_list<int> widths) {
        return of_head(samples, s, widths, b, kv_head);
    };
    const std::vector<double> qkvs = of(whole.forward.qkv.host, {s.queries(), s.keys(), s.keys()});
    Stored<T> dqkv("dqkv", Role::output, nans(qkvs.size())), qkv("qkv", Role::input, qkvs);
    Stored<T> dout("dout", Role::input, of(whole.dout.host, {s.queries()}));
    Stored<T> out("out", Role::input, of(whole.out.host, {s.queries()}));
    Array<float> lse("lse", Role::input, of(whole.lse.host, {s.n_head * s.seq_len}));
    ops::AttentionBackward op{.dqkv = dqkv.on(device),
                              .scratch = nullptr,
                              .dout = dout.on(device),
                              .qkv = qkv.on(device),
                              .out = out.on(device),
                              .lse = lse.on(device),
                              .batch = 1,
                              .seq_len = s.seq_len,
                              .n_head = s.n_head / s.n_kv_head,
                              .n_kv_head = 1,
                              .head_size = s.head_size,
                              .scale = s.scale()};
    auto scratch = scratch_of(ops::attention_backward_sm90_scratch_bytes(op));
    op.scratch = scratch.on(device);
    REQUIRE(ops::attention_backward_sm90(op, Stream()));
    return dqkv.fetch();
}

}  // namespace

TEMPLATE_TEST_CASE("attention_backward_sm90", "[arch]", bf16, fp16) {
    for (const Shape& s : kShapes64) check<TestType>(s);
    for (const Shape& s : kShapes128) check<TestType>(s);
}

TEMPLATE_TEST_CASE("attention_backward_sm90 of grouped heads", "[arch]", bf16, fp16) {
    for (const Shape& s : kGroups) check<TestType>(s);
}

TEMPLATE_TEST_CASE("attention_backward_sm90 with windows and documents", "[arch]", bf16, fp16) {
    for (const Shape& s : kMasks) check<TestType>(s);
}

TEST_CASE("attention_backward_sm90 in several parts", "[arch]") {
    const bool is_slow = simt::tsan() || simt::asan() || simt::options().strict_proxy;
    for (const Shape& s : kParts)
        if (!is_slow || s.window || s.document) check<bf16>(s);
}

TEMPLATE_TEST_CASE("attention_backward_sm90 with masks that mask nothing gives the same bits", "[arch]", bf16, fp16) {
    for (const Shape& s : {Shape{1, 150, 1, 1, 64, 1}, Shape{1, 140, 2, 1, 128, 1}}) {
        INFO(describe(s));
        Shape masked = s;
        masked.window = masked.document = s.seq_len;
        BackwardArrays<TestType> arrays(s), masked_arrays(masked);
        CHECK(have_same_bits(run(arrays), run(masked_arrays)));
    }
}

TEMPLATE_TEST_CASE("attention_backward_sm90 gives the same bits twice", "[arch]", bf16, fp16) {
    for (const Shape& s : {Shape{1, 300, 2, 1, 64, 1}, Shape{1, 270, 1, 1, 128, 1}}) {
        INFO(describe(s));
        BackwardArrays<TestType> arrays(s), again(s);
        CHECK(have_same_bits(run(arrays), run(again)));
    }
}

TEMPLATE_TEST_CASE("attention_backward_sm90 of one head has the bits of all heads and samples", "[arch]", bf16, fp16) {
    for (const Shape& s : {Shape{2, 150, 4, 2, 64, 1}, Shape{2, 70, 2, 2, 128, 1}}) {
        INFO(describe(s));
        BackwardArrays<TestType> arrays(s);
        const std::vector<TestType> whole = run(arrays);
        for (int b = 0; b < s.batch; b++)
            for (int kv_head = 0; kv_head < s.n_kv_head; kv_head++)
                CHECK(have_same_bits(run_head(arrays, b, kv_head),
                                     of_head(whole, s, {s.queries(), s.keys(), s.keys()}, b, kv_head)));
    }
}

TEST_CASE("attention_backward_sm90 declines what it has no kernel for", "[arch]") {
    const Shape s{1, 40, 2, 2, 64, 1};
    BackwardArrays<bf16> arrays(s);
    const ops::AttentionBackward taken = arrays.op(OnDevice<bf16>());
    CHECK(ops::attention_backward_sm90_scratch_bytes(taken) > 0);
    const auto check_declined = [&](auto change) {
        ops::AttentionBackward op = taken;
        change(op);
        CHECK(ops::attention_backward_sm90_scratch_bytes(op) == 0);
        CHECK(!ops::attention_backward_sm90(op, Stream()));
    };
    check_declined([](auto& op) { op.softcap = 5; });
    check_declined([](auto& op) { op.head_size = 32; });
    check_declined([&](auto& op) {
        op.dropout = AttentionArrays<bf16>{[&] {
                         Shape dropped = s;
                         dropped.dropout = 0.5;
                         return dropped;
                     }()}
                         .mask(OnDevice<bf16>());
    });
    check_declined([](auto& op) { op.chunk.kv = op.qkv; });
    check_declined([](auto& op) { op.qkv.dtype = op.dqkv.dtype = op.out.dtype = op.dout.dtype = Dtype::fp32; });
    check_declined([](auto& op) { op.dout = op.dout.from(1); });
}

// attention_forward_sm90 against ref::, and what its results must not depend on.
#include "kernels/cuda/attention/attention_sm90.h"
#include "test/simt/options.h"
#include "test/simt/sanitizers.h"
#include "test/support/attention.h"

namespace {

using namespace attention;

template <class T> void run(AttentionArrays<T>& arrays) {
    CHECK(ops::attention_forward_sm90(arrays.forward_op(OnDevice<T>()), Stream()));
}

template <class T> void check(const Shape& s) {
    INFO(describe(s));
    AttentionArrays<T> arrays{s};
    run(arrays);
    ref::attention_forward(arrays.forward_op(OnHost()));
    const std::vector<double> bounds = out_bounds<T>(s, arrays.qkv.host.data());
    check_close(arrays.out, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.out.host[i]); });
    check_close(arrays.lse, [&](size_t i) {
        const int t = int(i % s.seq_len), h = int(i / s.seq_len % s.n_head), b = int(i / s.seq_len / s.n_head);
        return row_error(s, arrays.qkv.host.data(), b, h, t).lse + stored_error_fp32(arrays.lse.host[i]);
    });
}

}  // namespace

// Sequences that end in and between a warp's, a warpgroup's and a tile's rows, and a key after half a tile.
TEMPLATE_TEST_CASE("attention_forward_sm90: lengths", "[arch]", bf16, fp16) {
    for (int length : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
        check<TestType>({2, length, 1, 1, 64, 1});
        check<TestType>({1, length, 2, 1, 128, 1});
    }
    check<TestType>({1, 192, 1, 1, 128, 1});
    check<TestType>({1, 193, 1, 1, 128, 1});
}

// More tasks than multiprocessors, tasks with fewer units than consumers, more tiles than stages; an odd number of
// heads, and heads with an odd and an even number of tasks that are processed in pairs.
TEMPLATE_TEST_CASE("attention_forward_sm90: tasks", "[arch]", bf16, fp16) {
    for (int size : {64, 128})
        for (const Shape& s :
             {Shape{1, 200, 5, 5, size, 1}, Shape{1, 257, 2, 2, size, 16}, Shape{1, 520, 1, 1, size, 1}})
            check<TestType>(s);
    if constexpr (std::is_same_v<TestType, bf16>) {
        check<TestType>({1, 400, 7, 7, 64, 1});
        check<TestType>({1, 270, 8, 8, 128, 1});
    }
}

TEMPLATE_TEST_CASE("attention_forward_sm90: groups of heads", "[arch]", bf16, fp16) {
    for (int size : {64, 128})
        for (const Shape& s :
             {Shape{2, 45, 3, 1, size, 1}, Shape{1, 150, 7, 1, size, 1}, Shape{1, 100, 4, 2, size, 16}})
            check<TestType>(s);
}

// Windows and documents, shorter and longer than tiles, that begin on and off their borders.
TEMPLATE_TEST_CASE("attention_forward_sm90: windows and documents", "[arch]", bf16, fp16) {
    for (int size : {64, 128})
        for (const Shape& s :
             {Shape{2, 70, 2, 2, size, 1, 1}, Shape{1, 261, 1, 1, size, 16, 64}, Shape{1, 300, 3, 1, size, 1, 17},
              Shape{1, 420, 1, 1, size, 1, 200}, Shape{2, 200, 1, 1, size, 1, 0, 0, 37},
              Shape{1, 420, 2, 1, size, 1, 0, 0, 128}, Shape{2, 300, 1, 1, size, 4, 150, 0, 190}})
            check<TestType>(s);
}

TEMPLATE_TEST_CASE("attention_forward_sm90: masks that mask nothing, and a second run, give the same bits", "[arch]",
                   bf16, fp16) {
    using T = TestType;
    for (const Shape& s : {Shape{2, 300, 1, 1, 64, 1}, Shape{1, 200, 2, 1, 128, 1}}) {
        INFO(describe(s));
        Shape masked = s;
        masked.window = masked.document = s.seq_len;
        masked.batch = 1;  // other samples begin in the middle of a document
        Shape first = s;
        first.batch = 1;
        AttentionArrays<T> arrays{first}, with_masks{masked}, again{first};
        run(arrays);
        run(with_masks);
        run(again);
        for (AttentionArrays<T>* other : {&with_masks, &again}) {
            check_same_bits(arrays.out, other->out.fetch());
            check_same_bits(arrays.lse, other->lse.fetch());
        }
    }
}

// Of a (sample, key-value head): its columns of qkv alone give the same bits as with the others.
TEMPLATE_TEST_CASE("attention_forward_sm90: the bits of a head do not depend on other heads and samples", "[arch]",
                   bf16, fp16) {
    using T = TestType;
    constexpr int kSample = 1, kHead = 2;
    for (int size : {64, 128}) {
        const Shape s{2, 200, 6, 3, size, 1};
        const auto of = [&](const auto& samples, std::initializer_list<int> widths) {
            return of_head(samples, s, widths, kSample, kHead);
        };
        AttentionArrays<T> all{s};
        const std::vector<double> columns = of(all.qkv.host, {s.queries(), s.keys(), s.keys()});
        AttentionArrays<T> part{{1, s.seq_len, s.n_head / s.n_kv_head, 1, size, 1},
                                Stored<T>("qkv", Role::input, columns)};
        run(all);
        run(part);
        CHECK(have_same_bits(part.out.fetch(), of(all.out.fetch(), {s.queries()})));
        CHECK(have_same_bits(part.lse.fetch(), of(all.lse.fetch(), {s.n_head * s.seq_len})));
    }
}

TEST_CASE("attention_forward_sm90 leaves ops to the portable kernel", "[arch]") {
    const auto takes = []<class T>(Shape s, T, auto change) {
        AttentionArrays<T> arrays{s};
        ops::AttentionForward op = arrays.forward_op(OnDevice<T>());
        change(op);
        return ops::attention_forward_sm90(op, Stream());
    };
    const Shape s{1, 20, 1, 1, 64, 1};
    const auto same = [](ops::AttentionForward&) {};
    CHECK(takes(s, bf16{}, same));
    CHECK_FALSE(takes(s, float{}, same));
    CHECK_FALSE(takes({1, 20, 1, 1, 96, 1}, bf16{}, same));
    CHECK_FALSE(takes({1, 20, 1, 1, 64, 1, 0, 2}, bf16{}, same));
    CHECK_FALSE(takes({1, 20, 1, 1, 64, 1, 0, 0, 0, 0.5}, bf16{}, same));
    CHECK_FALSE(takes(s, bf16{}, [](ops::AttentionForward& op) { op.qkv = op.qkv.from(1); }));
    CHECK_FALSE(takes(s, bf16{}, [](ops::AttentionForward& op) { op.out = op.out.from(1); }));
    CHECK_FALSE(takes(s, bf16{}, [](ops::AttentionForward& op) { op.chunk.kv = op.qkv; }));
}

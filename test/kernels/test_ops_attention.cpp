// attention_forward and attention_backward against ref::.
#include "test/support/arch_kernels.h"
#include "test/support/attention.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

using namespace attention;

constexpr Shape kShapes[] = {{1, 1, 1, 1, 16, 1},    {2, 5, 3, 3, 64, 1},    {1, 33, 4, 2, 80, 16},
                             {2, 64, 2, 1, 128, 1},  {1, 129, 2, 2, 64, 16}, {1, 129, 6, 2, 16, 1},
                             {3, 37, 1, 1, 128, 16}, {1, 200, 4, 2, 64, 1},  {2, 161, 2, 1, 128, 16},
                             {1, 261, 1, 1, 64, 1},  {1, 40, 2, 1, 200, 1},  {1, 70, 3, 1, 9, 1}};

// Every head size that has its own kernel, and others; shared keys; sequences that end inside a tile.
constexpr Shape kDropoutShapes[] = {
    {.batch = 2, .seq_len = 5, .n_head = 3, .n_kv_head = 3, .head_size = 64, .sharpness = 1, .dropout = 0.6},
    {.batch = 1, .seq_len = 70, .n_head = 2, .n_kv_head = 1, .head_size = 16, .sharpness = 1, .dropout = 0.2},
    {.batch = 1, .seq_len = 140, .n_head = 2, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .dropout = 0.2},
    {.batch = 1, .seq_len = 140, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .dropout = 0.2},
    {.batch = 2, .seq_len = 40, .n_head = 2, .n_kv_head = 1, .head_size = 128, .sharpness = 16, .dropout = 0.6},
    {.batch = 1, .seq_len = 131, .n_head = 1, .n_kv_head = 1, .head_size = 128, .sharpness = 1, .dropout = 0.2},
    {.batch = 1, .seq_len = 50, .n_head = 3, .n_kv_head = 1, .head_size = 96, .sharpness = 1, .dropout = 0.2},
    {.batch = 1, .seq_len = 40, .n_head = 1, .n_kv_head = 1, .head_size = 200, .sharpness = 1, .dropout = 0.2},
    {.batch = 1, .seq_len = 50, .n_head = 1, .n_kv_head = 1, .head_size = 256, .sharpness = 1, .dropout = 0.2}};

// Group sizes that do and do not divide a tile, more than 16 heads per tile, and head sizes of every kernel.
constexpr Shape kGroupShapes[] = {{2, 45, 3, 1, 64, 1},   {1, 75, 10, 2, 64, 1}, {1, 150, 7, 1, 64, 1},
                                  {1, 20, 19, 1, 64, 16}, {1, 90, 6, 2, 128, 1}, {1, 40, 5, 1, 128, 16},
                                  {1, 30, 6, 2, 16, 1}};

constexpr Shape kHeadSizeShapes[] = {
    {1, 150, 2, 2, 96, 1}, {2, 70, 3, 1, 96, 16}, {1, 1, 1, 1, 96, 1}, {1, 90, 2, 2, 256, 1}, {1, 35, 5, 1, 256, 16}};

// Windows of one key, smaller and larger than a tile, and as long as the sequence; documents that end on and off a
// tile's border; combinations of these.
constexpr Shape kMaskShapes[] = {
    {.batch = 2, .seq_len = 70, .n_head = 2, .n_kv_head = 2, .head_size = 64, .sharpness = 1, .window = 1},
    {.batch = 1, .seq_len = 200, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .window = 17},
    {.batch = 1, .seq_len = 261, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 16, .window = 64},
    {.batch = 1, .seq_len = 200, .n_head = 3, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .window = 100},
    {.batch = 1, .seq_len = 100, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .window = 100},
    {.batch = 1, .seq_len = 200, .n_head = 1, .n_kv_head = 1, .head_size = 64, .sharpness = 1, .document = 64},
    {.batch = 3, .seq_len = 140, .n_head = 2, .n_kv_head = 2, .head_size = 64, .sharpness = 1, .document = 37},
    {.batch = 1, .seq_len = 150, .n_head = 2, .n_kv_head = 1, .head_size = 128, .sharpness = 1, .window = 45},
    {.batch = 2, .seq_len = 90, .n_head = 1, .n_kv_head = 1, .head_size = 128, .sharpness = 16, .document = 33},
    {.batch = 2, .seq_len = 70, .n_head = 2, .n_kv_head = 1, .head_size = 96, .sharpness = 1, .window = 30},
    {.batch = 2, .seq_len = 90, .n_head = 2, .n_kv_head = 1, .head_size = 16, .sharpness = 1, .window = 21},
    {.batch = 2, .seq_len = 90, .n_head = 1, .n_kv_head = 1, .head_size = 24, .sharpness = 1, .document = 40},
    {.batch = 1, .seq_len = 80, .n_head = 2, .n_kv_head = 2, .head_size = 64, .sharpness = 8, .softcap = 3},
    {.batch = 1, .seq_len = 70, .n_head = 1, .n_kv_head = 1, .head_size = 128, .sharpness = 1, .softcap = 0.5f},
    {.batch = 1, .seq_len = 40, .n_head = 1, .n_kv_head = 1, .head_size = 256, .sharpness = 8, .softcap = 50},
    {.batch = 1, .seq_len = 40, .n_head = 2, .n_kv_head = 1, .head_size = 9, .sharpness = 8, .softcap = 3},
    {2, 170, 3, 1, 64, 4, 50, 3, 71, 0.2},
    {2, 75, 6, 2, 128, 4, 30, 3, 41, 0.2},
    {2, 75, 2, 1, 96, 4, 30, 3, 41, 0.2},
    {2, 75, 2, 1, 256, 4, 30, 3, 41, 0.2},
    {2, 75, 3, 1, 20, 4, 30, 3, 41, 0.2}};

template <class T> void check_forward(const Shape& s) {
    INFO(describe(s));
    AttentionArrays<T> arrays{s};
    ops::attention_forward(arrays.forward_op(OnDevice<T>()), Stream());
    ref::attention_forward(arrays.forward_op(OnHost()));
    std::vector<double> bounds = out_bounds<T>(s, arrays.qkv.host.data(), arrays.mask(OnHost()));
    check_close(arrays.out, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.out.host[i]); });
    check_close(arrays.lse, [&](size_t i) {
        int t = int(i % s.seq_len), h = int(i / s.seq_len % s.n_head), b = int(i / s.seq_len / s.n_head);
        return row_error(s, arrays.qkv.host.data(), b, h, t).lse + stored_error_fp32(arrays.lse.host[i]);
    });
}

// `s` describes the cache: sequences, capacity. The op's rows are all sequences except the first, in descending order.
// Elements that must not be read are NaN; afterwards only the rows' keys and values may have changed.
template <class T> void check_decode(const Shape& s) {
    INFO(describe(s));
    const ref::QkvLayout at = s.layout();
    const Stored<T> full{"full", Role::input, random_values(s.qkv_count(), 1)};
    std::vector<double> cached, rows;  // keys and values; queries, keys and values
    std::vector<ops::AttentionDecode::Place> places;
    for (int b = 0; b < s.batch; b++) {
        const int position = b == 0 ? 0 : b == 1 ? s.seq_len - 1 : 19 * b % s.seq_len;
        for (int t = 0; t < s.seq_len; t++) {
            const auto begin = full.host.begin() + ptrdiff_t(at.row(b, t)), end = begin + ptrdiff_t(at.row(0, 1));
            const auto keys = begin + s.n_head * s.head_size;
            if (t < position)
                cached.insert(cached.end(), keys, end);
            else
                cached.insert(cached.end(), size_t(end - keys), NAN);
            if (b > 0 && t == position) rows.insert(rows.begin(), begin, end);
        }
        if (b > 0) places.insert(places.begin(), {b, position, s.first_of_document(b, position)});
    }
    Stored<T> cache{"cache", Role::output, cached}, qkv{"qkv", Role::input, rows};
    Stored<T> out{"out", Role::output, nans(places.size() * size_t(s.n_head * s.head_size))};
    Array<ops::AttentionDecode::Place> place{"places", Role::input, places};
    const auto op = [&]<class Side>(Side side) {
        return ops::AttentionDecode{.out = out.on(side),
                                    .cache = cache.on(side),
                                    .qkv = qkv.on(side),
                                    .places = place.on(side),
                                    .scratch = nullptr,
                                    .rows = int(places.size()),
                                    .capacity = s.seq_len,
                                    .n_head = s.n_head,
                                    .n_kv_head = s.n_kv_head,
                                    .head_size = s.head_size,
                                    .scale = s.scale(),
                                    .window = s.window,
                                    .softcap = s.softcap};
    };
    ops::AttentionDecode device_op = op(OnDevice<T>());
    auto scratch = scratch_of(ops::attention_decode_scratch_bytes(device_op));
    device_op.scratch = scratch.on(OnDevice<T>());
    ops::attention_decode(device_op, Stream());
    ref::attention_decode(op(OnHost()));
    const std::vector<double> bounds = out_bounds<T>(s, full.host.data());
    const size_t width = size_t(s.n_head * s.head_size);
    check_close(out, [&](size_t i) {
        const auto& [sequence, position, first_key] = places[i / width];
        return bounds[at.out(sequence, 0, position) + i % width] + stored_error<T>(out.host[i]);
    });
    const std::vector<T> left = cache.fetch();
    for (size_t i = 0; i < left.size(); i++) {
        const double value = ref::load(left[i]), expected = cache.host[i];
        REQUIRE((value == expected || (std::isnan(value) && std::isnan(expected))));
    }
}

template <class T> void check_backward(const Shape& s) {
    INFO(describe(s));
    BackwardArrays<T> arrays(s);
    std::vector<double> bounds = dqkv_bounds<T>(s, arrays.op(OnHost()));
    arrays.run_on_device();
    ref::attention_backward(arrays.op(OnHost()));
    check_close(arrays.dqkv, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.dqkv.host[i]); });
}

}  // namespace

TEMPLATE_TEST_CASE("attention_forward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes) check_forward<TestType>(s);
}

TEMPLATE_TEST_CASE("attention_backward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes) check_backward<TestType>(s);
}

TEMPLATE_TEST_CASE("attention with dropout", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kDropoutShapes) {
        check_forward<TestType>(s);
        check_backward<TestType>(s);
    }
}

TEMPLATE_TEST_CASE("attention of grouped heads", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kGroupShapes) {
        check_forward<TestType>(s);
        check_backward<TestType>(s);
    }
}

TEMPLATE_TEST_CASE("attention with kernels for this GPU", "[arch]", bf16, fp16) {
    const WithArchKernels used(arch_kernels());
    for (const Shape& s : {Shape{2, 257, 2, 2, 64, 1}, Shape{1, 200, 3, 1, 128, 16}, Shape{1, 300, 2, 1, 64, 1, 70},
                           Shape{2, 160, 1, 1, 128, 1, 0, 0, 50}})
        check_forward<TestType>(s), check_backward<TestType>(s);
}

TEMPLATE_TEST_CASE("attention of heads of 96 and 256", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kHeadSizeShapes) {
        check_forward<TestType>(s);
        check_backward<TestType>(s);
    }
}

TEMPLATE_TEST_CASE("attention with windows, documents and soft caps", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kMaskShapes) {
        check_forward<TestType>(s);
        check_backward<TestType>(s);
    }
}

// Shared and separate keys, every kernel size, sequences of one key, of more than all warps process at a time, and of
// up to four parts. A window or a document hides the first part.
TEMPLATE_TEST_CASE("attention_decode", "[ops]", float, bf16, fp16) {
    for (const Shape& shape :
         {Shape{4, 37, 2, 2, 64, 1}, Shape{3, 9, 3, 1, 80, 16}, Shape{2, 1, 1, 1, 16, 1}, Shape{3, 50, 6, 2, 9, 1},
          Shape{2, 20, 2, 1, 128, 16}, Shape{2, 33, 2, 1, 256, 1}, Shape{4, 60, 3, 1, 20, 4, 13, 3, 21},
          Shape{4, 40, 2, 2, 64, 4, 1}, Shape{4, 40, 2, 1, 64, 8, 0, 2}, Shape{4, 70, 4, 2, 96, 1, 0, 0, 27},
          Shape{3, 300, 2, 1, 64, 1}, Shape{3, 385, 1, 1, 136, 16, 260}, Shape{2, 257, 1, 1, 32, 4, 0, 0, 200}})
        check_decode<TestType>(shape);
}

// A window over the whole sequence and a document of its length mask nothing: same bits as the kernels without masks.
TEMPLATE_TEST_CASE("attention with masks that mask nothing gives the same bits", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (Shape s : {Shape{1, 150, 1, 1, 64, 1}, Shape{1, 70, 2, 1, 128, 1}, Shape{1, 40, 2, 2, 24, 1}}) {
        INFO(describe(s));
        Shape masked = s;
        masked.window = masked.document = s.seq_len;
        AttentionArrays<T> forward{s}, masked_forward{masked};
        ops::attention_forward(forward.forward_op(OnDevice<T>()), Stream());
        ops::attention_forward(masked_forward.forward_op(OnDevice<T>()), Stream());
        check_same_bits(forward.out, masked_forward.out.fetch());
        check_same_bits(forward.lse, masked_forward.lse.fetch());
        BackwardArrays<T> backward(s), masked_backward(masked);
        backward.run_on_device();
        masked_backward.run_on_device();
        check_same_bits(backward.dqkv, masked_backward.dqkv.fetch());
    }
}

// The first op leaves shared memory, scratch and outputs in a different state for the second one.
TEMPLATE_TEST_CASE("attention gives the same bits twice", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : {Shape{1, 150, 2, 1, 64, 1}, Shape{1, 70, 2, 1, 128, 1}}) {
        INFO(describe(s));
        AttentionArrays<T> forward{s}, forward_again{s};
        ops::attention_forward(forward.forward_op(OnDevice<T>()), Stream());
        ops::attention_forward(forward_again.forward_op(OnDevice<T>()), Stream());
        check_same_bits(forward.out, forward_again.out.fetch());
        check_same_bits(forward.lse, forward_again.lse.fetch());
        BackwardArrays<T> backward(s), backward_again(s);
        backward.run_on_device();
        backward_again.run_on_device();
        check_same_bits(backward.dqkv, backward_again.dqkv.fetch());
    }
}

// Aligned only to its elements.
TEMPLATE_TEST_CASE("attention_forward of memory off 16-byte boundaries", "[ops]", bf16, fp16) {
    using T = TestType;
    const Shape s = {1, 40, 2, 1, 64, 1};
    AttentionArrays<T> arrays{s};
    std::vector<double> shifted(1, 0.0);
    shifted.insert(shifted.end(), arrays.qkv.host.begin(), arrays.qkv.host.end());
    Stored<T> qkv("qkv", Role::input, shifted), out("out", Role::output, nans(s.out_count() + 1));
    auto op = arrays.forward_op(OnDevice<T>());
    op.qkv = qkv.on(OnDevice<T>()) + 1;
    op.out = out.on(OnDevice<T>()) + 1;
    ops::attention_forward(op, Stream());
    ref::attention_forward(arrays.forward_op(OnHost()));
    std::vector<double> bounds = out_bounds<T>(s, arrays.qkv.host.data());
    std::vector<T> values = out.fetch();
    bool is_close = true;
    for (size_t i = 0; i < s.out_count(); i++) {
        double expected = arrays.out.host[i];
        is_close &= std::abs(ref::load(values[i + 1]) - expected) <= bounds[i] + stored_error<T>(expected);
    }
    CHECK(is_close);
}

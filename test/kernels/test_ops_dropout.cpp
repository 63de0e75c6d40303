// The elementwise op against ref::. test_dropout_masks.cpp tests the masks, test_ops_attention.cpp attention's dropout.
#include <tuple>

#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

// Keys of the samples of a batch.
Array<uint64_t> keys_of(int batch, uint64_t seed = 7) {
    std::vector<uint64_t> keys;
    for (int b = 0; b < batch; b++) keys.push_back(ops::dropout_key(seed, uint64_t(b)));
    return {"keys", Role::input, keys};
}

}  // namespace

TEMPLATE_TEST_CASE("dropout: parts of packs, odd addresses, in place", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (auto [batch, count, shift, start] : {std::tuple<int, size_t, int, size_t>{1, 1, 0, 0},
                                              {3, 8, 0, 0},
                                              {2, 37, 1, 8},
                                              {2, 4096, 0, size_t(1) << 36},
                                              {1, 5003, 0, 0},
                                              {3, 2056, 1, 4120},
                                              {2, 2052, 0, 0}}) {
        for (double rate : {0.1, 0.5, 0.9999}) {
            INFO("batch " << batch << ", count " << count << ", shift " << shift << ", start " << start << ", rate "
                          << rate);
            Array<uint64_t> keys = keys_of(batch);
            Stored<T> inp("inp", Role::input, random_values(size_t(batch) * count, 1), shift);
            Stored<T> out("out", Role::output, nans(inp.host.size()), shift);
            Stored<T> both("both", Role::output, inp.host, shift);
            auto op = [&](auto side, auto& from, auto& to) {
                const uint32_t threshold = ops::dropout_threshold(rate);
                return ops::Dropout{.out = to.on(side),
                                    .inp = from.on(side),
                                    .mask = {.keys = keys.on(side), .threshold = threshold, .place = 9 << 16},
                                    .count = count,
                                    .first = 0,
                                    .elements = size_t(batch) * count,
                                    .start = start};
            };
            ops::dropout(op(OnDevice<T>(), inp, out), Stream());
            ref::dropout(op(OnHost(), inp, out));
            // The factor and the product are rounded.
            check_close(out,
                        [&](size_t i) { return 2 * kRoundoff * std::abs(out.host[i]) + stored_error<T>(out.host[i]); });
            ops::dropout(op(OnDevice<T>(), both, both), Stream());
            check_same_bits(both, out.fetch());
        }
    }
}

// A rank's part of the elements begins in the middle of a sample and may span several.
TEMPLATE_TEST_CASE("dropout of parts of a batch has the bits of the whole", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (auto [batch, count] : {std::pair<int, size_t>{4, 2056}, {5, 40}, {3, 37}}) {
        Array<uint64_t> keys = keys_of(batch);
        Stored<T> inp("inp", Role::input, random_values(size_t(batch) * count, 1));
        auto dropped = [&](size_t first, size_t elements) {
            Stored<T> part("part", Role::input,
                           std::vector<double>(inp.host.begin() + ptrdiff_t(first),
                                               inp.host.begin() + ptrdiff_t(first + elements)));
            Stored<T> out("out", Role::output, nans(elements));
            auto op = [&](auto side) {
                return ops::Dropout{
                    .out = out.on(side),
                    .inp = part.on(side),
                    .mask = {.keys = keys.on(side), .threshold = ops::dropout_threshold(0.3), .place = 9 << 16},
                    .count = count,
                    .first = first,
                    .elements = elements};
            };
            ops::dropout(op(OnDevice<T>()), Stream());
            ref::dropout(op(OnHost()));
            check_close(out,
                        [&](size_t i) { return 2 * kRoundoff * std::abs(out.host[i]) + stored_error<T>(out.host[i]); });
            return out.fetch();
        };
        const size_t all = size_t(batch) * count;
        const std::vector<T> whole = dropped(0, all);
        for (auto [first, elements] : {std::pair<size_t, size_t>{count, count},
                                       {8, all - 8},
                                       {count + 24, all - count - 24},
                                       {16, count},
                                       {count + 8, 13},
                                       {0, 2 * count + 5},
                                       {2 * count, all - 2 * count},
                                       {all - count + 16, 8},
                                       {32, 0}}) {
            INFO("batch " << batch << ", count " << count << ", elements " << first << " + " << elements);
            const std::vector<T> part = dropped(first, elements);
            CHECK(std::equal(part.begin(), part.end(), whole.begin() + ptrdiff_t(first),
                             [](T a, T b) { return ref::load(a) == ref::load(b); }));
        }
    }
}

TEMPLATE_TEST_CASE("dropout: dropped elements are 0, also if they were not finite", "[ops]", float, bf16, fp16) {
    using T = TestType;
    constexpr size_t kCount = 264;
    Array<uint64_t> keys = keys_of(1);
    const ops::DropoutMask mask{.keys = keys.on(OnHost()), .threshold = ops::dropout_threshold(0.5), .place = 3 << 16};
    std::vector<double> values(kCount, 1.0);
    const double never[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < kCount; i++)
        if (!mask.is_kept(mask.keys[0], i)) values[i] = never[i % 3];
    Stored<T> inp("inp", Role::input, values), out("out", Role::output, nans(kCount));
    ops::DropoutMask on_device = mask;
    on_device.keys = keys.on(OnDevice<T>());
    ops::dropout({.out = out.on(OnDevice<T>()),
                  .inp = inp.on(OnDevice<T>()),
                  .mask = on_device,
                  .count = kCount,
                  .first = 0,
                  .elements = kCount},
                 Stream());
    std::vector<T> expected;
    for (size_t i = 0; i < kCount; i++) expected.push_back(ref::store<T>(values[i] == 1 ? 2 : 0));
    check_same_bits(out, expected);
}

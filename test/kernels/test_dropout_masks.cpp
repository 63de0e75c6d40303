// Dropout's masks: how often they keep an element, and that they are independent of each other. test_model_torch.cpp
// compares their values with another implementation.
#include <functional>
#include <set>
#include <tuple>

#include "kernels/base/dropout.h"
#include "test/support/catch.h"
#include "test/support/tolerance.h"

namespace {

constexpr size_t kSize = 1 << 15;  // decisions of a mask in the statistics below

// Two masks of kSize elements whose keys differ in one coordinate.
struct Pair {
    const char* differs_in;
    std::function<bool(size_t)> first, second;
};

std::vector<Pair> neighbouring_masks(uint32_t threshold) {
    auto mask = [=](uint64_t seed, uint64_t sample, uint32_t site) {
        return [=, key = ops::dropout_key(seed, sample)](size_t i) {
            return ops::DropoutMask{.threshold = threshold, .place = site << 16}.is_kept(key, i);
        };
    };
    auto attention = [=](uint64_t sample, uint32_t site, int head, int query, int key) {
        return [=, sample_key = ops::dropout_key(1, sample)](size_t i) {  // 181 x 181 queries and keys
            const ops::DropoutMask probabilities = {.threshold = threshold, .place = site << 16};
            return probabilities.is_kept(sample_key, head, int(i) / 181 + query, int(i) % 181 + key);
        };
    };
    auto shifted = [](const std::function<bool(size_t)>& other, size_t distance) {
        return [=](size_t i) { return other(i + distance); };
    };
    std::vector<Pair> pairs = {{"seed", mask(1, 5, 3), mask(2, 5, 3)},
                               {"sample", mask(1, 5, 3), mask(1, 6, 3)},
                               {"sample and seed", mask(1, 5, 3), mask(5, 1, 3)},
                               {"site", mask(1, 5, 3), mask(1, 5, 4)},
                               {"head", attention(5, 3, 0, 0, 0), attention(5, 3, 1, 0, 0)},
                               {"sample of attention", attention(5, 3, 0, 0, 0), attention(6, 3, 0, 0, 0)},
                               {"layer", attention(5, 1, 0, 0, 0), attention(5, 4, 0, 0, 0)},
                               {"site and head", attention(5, 1, 0, 0, 0), attention(5, 0, 1, 0, 0)},
                               {"elementwise and attention", mask(1, 5, 3), attention(5, 3, 0, 0, 0)}};
    for (int distance : {1, 2, 4, 8, 16})
        pairs.push_back({"element", mask(1, 5, 3), shifted(mask(1, 5, 3), size_t(distance))});
    for (int distance : {1, 2, 7, 8, 9, 16}) {
        pairs.push_back({"key", attention(5, 3, 0, 0, 0), attention(5, 3, 0, 0, distance)});
        pairs.push_back({"query", attention(5, 3, 0, 0, 0), attention(5, 3, 0, distance, 0)});
        pairs.push_back({"query and key", attention(5, 3, 0, 0, 0), attention(5, 3, 0, distance, distance)});
    }
    return pairs;
}

}  // namespace

TEST_CASE("dropout keeps elements at its rate", "[dropout]") {
    CHECK(ops::dropout_threshold(0.1) == 6554);
    CHECK(ops::dropout_threshold(ops::kMaxDropout) < ops::kDropoutRange);
    for (double rate : {0.0, 0.001, 0.1, 0.2, 0.5, 0.9, 0.9999}) {
        INFO("rate " << rate);
        const ops::DropoutMask mask = {.threshold = ops::dropout_threshold(rate), .place = 2 << 16};
        const uint64_t key = ops::dropout_key(1, 1);
        const double expected = 1 - mask.threshold / 65536.0, count = 1 << 18;
        const double deviation = std::sqrt(count * expected * (1 - expected));
        double kept = 0, kept_in_attention = 0;
        for (size_t i = 0; i < size_t(count); i++) {
            kept += mask.is_kept(key, i);
            kept_in_attention += mask.is_kept(key, int(i % 3), int(i / 512), int(i % 512));
        }
        CHECK(std::abs(kept - count * expected) <= 4 * deviation);
        CHECK(std::abs(kept_in_attention - count * expected) <= 4 * deviation);
        CHECK(std::abs(double(mask.factor) * expected - 1) <= 2 * kRoundoff);
    }
}

// Two independent masks of rate p agree in kSize (p^2 + (1 - p)^2) places; masks that differ in one coordinate must do
// the same. Equal masks would agree everywhere. The numbers are the same in every run.
TEST_CASE("dropout's masks of other samples, sites, heads and places are independent", "[dropout]") {
    for (double rate : {0.1, 0.5}) {
        for (const Pair& pair : neighbouring_masks(ops::dropout_threshold(rate))) {
            INFO("rate " << rate << ", masks that differ in " << pair.differs_in);
            double agreements = 0;
            for (size_t i = 0; i < kSize; i++) agreements += pair.first(i) == pair.second(i);
            const double expected = rate * rate + (1 - rate) * (1 - rate);
            // The agreements of a mask with a shifted copy are correlated: 5 standard deviations.
            CHECK(std::abs(agreements - kSize * expected) <= 5 * std::sqrt(kSize * expected * (1 - expected)));
        }
    }
}

// A part of the heads has the masks of these heads in the model.
TEST_CASE("dropout of a part of the heads", "[dropout]") {
    const uint64_t key = ops::dropout_key(1, 1);
    const ops::DropoutMask whole = {.threshold = ops::dropout_threshold(0.5), .place = 4 << 16};
    ops::DropoutMask part = whole;
    part.place += 3;
    for (int head = 0; head < 4; head++)
        for (int i = 0; i < 64; i++)
            CHECK(part.is_kept(key, head, i / 8, i % 8) == whole.is_kept(key, 3 + head, i / 8, i % 8));
}

// Each element of attention has its own decision: no two elements of a 48 x 48 corner share one. A fault in the layout
// of words and halves would make them share.
TEST_CASE("dropout uses each of attention's decisions once", "[dropout]") {
    std::set<std::tuple<uint32_t, uint32_t, int, int>> used;
    for (int query = 0; query < 48; query++)
        for (int key = 0; key < 48; key++)
            used.insert({ops::DropoutMask::query_call(query), ops::DropoutMask::key_call(key),
                         ops::DropoutMask::word_of(query, key), key % 2});
    CHECK(used.size() == 48 * 48);
}

#include <algorithm>
#include <set>
#include <vector>

#include "data/shards/permutation.h"
#include "test/support/catch.h"

static std::vector<uint64_t> images(uint64_t n, uint64_t seed, uint32_t epoch) {
    std::vector<uint64_t> values;
    for (uint64_t i = 0; i < n; i++) values.push_back(permuted(i, n, seed, epoch));
    return values;
}

TEST_CASE("permutation: every element once, for any size") {
    std::vector<uint64_t> sizes = {1023, 1024, 1025, 65535, 100'000};
    for (uint64_t n = 1; n <= 300; n++) sizes.push_back(n);
    for (uint64_t n : sizes) {
        std::vector<uint64_t> values = images(n, 42, 7);
        std::sort(values.begin(), values.end());
        bool is_bijection = true;
        for (uint64_t i = 0; i < n; i++) is_bijection &= values[i] == i;
        INFO("n = " << n);
        CHECK(is_bijection);
    }
}

TEST_CASE("permutation: large sizes stay in range and do not collide") {
    for (uint64_t n : {(uint64_t(1) << 32) - 5, uint64_t(1) << 40, (uint64_t(1) << 61) + 12345, uint64_t(1) << 62}) {
        std::set<uint64_t> seen;
        for (uint64_t i = 0; i < 20'000; i++) {
            uint64_t value = permuted(i * (n / 20'000), n, 3, 0);
            if (value >= n) FAIL("value " << value << " of " << n);
            seen.insert(value);
        }
        CHECK(seen.size() == 20'000);
        CHECK(*seen.rbegin() > n / 2);
    }
    CHECK_THROWS_AS(permuted(0, 0, 1, 1), Error);
    CHECK_THROWS_AS(permuted(0, (uint64_t(1) << 62) + 1, 1, 1), Error);
}

TEST_CASE("permutation: a pure function of seed and epoch that differs between them") {
    CHECK(images(1000, 1, 0) == images(1000, 1, 0));
    CHECK(images(1000, 1, 0) != images(1000, 1, 1));
    CHECK(images(1000, 1, 0) != images(1000, 2, 0));
    CHECK(images(1000, 1, 1) != images(1000, 2, 0));
    CHECK(images(1000, 1ull << 32, 0) != images(1000, 0, 0));
}

// Chi-square over `epochs` permutations of the position of element i: mean (n - 1), deviation sqrt(2 (n - 1)) per
// element.
TEST_CASE("permutation: every place is equally likely") {
    constexpr int kEpochs = 8000;
    for (uint64_t n : {2, 3, 5, 16, 17, 60}) {
        std::vector<int> counts(n * n);
        for (uint32_t epoch = 0; epoch < kEpochs; epoch++)
            for (uint64_t i = 0; i < n; i++) counts[i * n + permuted(i, n, 9, epoch)]++;
        double expected = double(kEpochs) / double(n);
        for (uint64_t i = 0; i < n; i++) {
            double chi_square = 0;
            for (uint64_t j = 0; j < n; j++) {
                double difference = counts[i * n + j] - expected;
                chi_square += difference * difference / expected;
            }
            INFO("n = " << n << ", element " << i << ", chi-square " << chi_square);
            double degrees = double(n - 1);
            CHECK(chi_square <= degrees + 5 * std::sqrt(2 * degrees) + 5);
        }
    }
}

// Neighbors must not stay neighbors: the mean distance of the images of i and i + 1 is n / 3 for random positions.
TEST_CASE("permutation: neighbors are separated") {
    for (uint64_t n : {100'000, 70'000}) {
        std::vector<uint64_t> values = images(n, 5, 5);
        double sum = 0;
        for (size_t i = 0; i + 1 < n; i++) sum += std::abs(double(values[i]) - double(values[i + 1]));
        double mean = sum / double(n - 1) / double(n);
        CHECK(mean > 0.32);
        CHECK(mean < 0.345);
    }
}

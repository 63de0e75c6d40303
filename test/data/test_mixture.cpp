// Mixtures of token streams: the stream of each sample, and each stream's own exact epochs.
#include <cmath>
#include <map>
#include <set>

#include "data/shards/loader.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

namespace {

// Streams of consecutive tokens: stream number i begins with token 10000 i.
class MixtureFixture {
protected:
    TokenStream stream(int number, int tokens) {
        ShardWriter writer(directory_.path(), format("part%d_%d", number, tokens), 60'000);
        std::vector<int32_t> ids;
        for (int i = 0; i < tokens; i++) ids.push_back(10'000 * number + i);
        writer.append(ids);
        writer.finish();
        return TokenStream({directory_ / writer.names().front()}, 60'000);
    }
    Mixture mixture() { return Mixture({stream(0, 103), stream(1, 42), stream(2, 7)}, {5, 3, 2}); }

    TemporaryDirectory directory_;
};

constexpr uint64_t kSeed = 17;

// The first token of each sample in [begin, end) as `world` ranks with `batch` rows read them.
std::vector<int> first_tokens(const Mixture& data, uint64_t begin, uint64_t end, int world, int batch) {
    std::vector<int> first(end - begin);
    for (int rank = 0; rank < world; rank++) {
        const LoaderOptions options = {.seq_len = 4, .batch = batch, .seed = kSeed, .rank = rank, .world = world};
        Loader loader(data, options, begin);
        while (loader.cursor() < end) {
            const uint64_t at = loader.cursor() - begin + uint64_t(rank) * uint64_t(batch);
            const Batch read = loader.next();
            for (int row = 0; row < batch; row++) {
                if (at + uint64_t(row) < first.size()) first[at + uint64_t(row)] = read.inputs[row * 4];
                for (int t = 0; t < 4; t++)
                    CHECKED_ELSE(read.targets[row * 4 + t] == read.inputs[row * 4] + t + 1) FAIL("wrong target");
            }
        }
    }
    return first;
}

}  // namespace

TEST_CASE_METHOD(MixtureFixture, "mixture: every stream's samples are counted without gaps, and each has its share",
                 "[data]") {
    constexpr uint64_t kBlock = 1 << 16, kBlocks = 3;
    const Mixture data({stream(0, 103), stream(1, 42), stream(2, 7)}, {0.7, 0.2995, 0.0011});
    std::map<size_t, std::set<uint64_t>> seen;
    for (uint64_t block = 0; block < kBlocks; block++) {
        std::map<size_t, uint64_t> counts;
        for (uint64_t sample = block * kBlock; sample < (block + 1) * kBlock; sample++) {
            const SampleSource source = data.source_of(sample, kSeed);
            counts[source.stream]++;
            REQUIRE(seen[source.stream].insert(source.index).second);
        }
        for (size_t i = 0; i < 3; i++) CHECK(std::abs(double(counts[i]) - data.share(i) * double(kBlock)) <= 1);
        // No stream runs ahead: after each block each stream has had its share, and no index is skipped.
        for (const auto& [stream, indices] : seen) CHECK(*indices.rbegin() + 1 == indices.size());
    }
    // Early in a block the shares also hold within chance: 1,000 draws have a standard deviation of 14.
    int first = 0;
    for (uint64_t sample = 0; sample < 1000; sample++) first += data.source_of(sample, kSeed).stream == 0;
    CHECK(std::abs(first - 700) < 80);
}

TEST_CASE_METHOD(MixtureFixture, "mixture: finding a sample far into a run is fast and depends on the seed", "[data]") {
    const Mixture data = mixture();
    const uint64_t far = uint64_t(1) << 40;
    const SampleSource source = data.source_of(far + 12345, kSeed);
    CHECK(std::abs(double(source.index) - data.share(source.stream) * double(far + 12345)) < 1 << 16);
    int same = 0;
    for (uint64_t sample = 0; sample < 1000; sample++)
        same += data.source_of(sample, kSeed).stream == data.source_of(sample, kSeed + 1).stream;
    CHECK(same < 600);  // 0.5^2 + 0.3^2 + 0.2^2 are equal by chance
}

TEST_CASE_METHOD(MixtureFixture, "mixture: each epoch of each stream has every window once, each in a different order",
                 "[data]") {
    constexpr uint64_t kBlock = 1 << 16;
    // The first two have 25 windows each.
    const Mixture data({stream(0, 103), stream(1, 103), stream(2, 7)}, {5, 3, 2});
    const std::vector<int> first = first_tokens(data, 0, kBlock, 1, 32);
    std::map<size_t, std::map<uint64_t, int>> windows;  // by stream and index of the sample in the stream
    for (uint64_t sample = 0; sample < kBlock; sample++) {
        const SampleSource source = data.source_of(sample, kSeed);
        windows[source.stream][source.index] = first[sample] % 10'000;
    }
    const auto epoch = [&](size_t number, uint64_t which, uint64_t length) {
        const auto begin = windows[number].lower_bound(which * length);
        std::vector<int> order;
        for (auto at = begin; order.size() < length; at++) order.push_back(at->second);
        return order;
    };
    for (const auto& [number, length] : {std::pair<size_t, uint64_t>{0, 25}, {1, 25}, {2, 1}}) {
        INFO("stream " << number);
        const uint64_t epochs = windows[number].size() / length;
        REQUIRE(epochs > 700);
        for (uint64_t i = 0; i < epochs; i++) {
            const std::vector<int> order = epoch(number, i, length);
            if (std::set(order.begin(), order.end()).size() != length) FAIL("epoch " << i << " repeats a window");
            const bool may_repeat = length == 1 || i == 0;
            if (!may_repeat && order == epoch(number, i - 1, length)) FAIL("epoch " << i << " repeats an order");
        }
    }
    for (uint64_t i = 0; i < 10; i++) CHECK(epoch(0, i, 25) != epoch(1, i, 25));
}

TEST_CASE_METHOD(MixtureFixture, "mixture: the samples are the same on any number of ranks, and from any cursor",
                 "[data]") {
    const Mixture data = mixture();
    const std::vector<int> whole = first_tokens(data, 0, 240, 1, 2);
    for (auto [world, batch] : {std::pair{2, 3}, {3, 4}, {4, 1}})
        CHECK(first_tokens(data, 0, 240, world, batch) == whole);
    const std::vector<int> rest = first_tokens(data, 96, 240, 2, 2);
    CHECK(rest == std::vector<int>(whole.begin() + 96, whole.end()));
}

TEST_CASE_METHOD(MixtureFixture, "mixture: a mixture of one stream equals the stream", "[data]") {
    const TokenStream stream = this->stream(0, 103);
    const Mixture data(stream);
    CHECK(data.digest() == stream.digest());
    CHECK(data.description() == stream.description());
    CHECK(data.stream_seed(0, kSeed) == kSeed);
    for (uint64_t sample : {uint64_t(0), uint64_t(99'999)}) CHECK(data.source_of(sample, kSeed).index == sample);
}

TEST_CASE_METHOD(MixtureFixture, "mixture: the digest depends on weights and order, but not on their scale", "[data]") {
    const TokenStream a = stream(0, 103), b = stream(1, 42);
    const std::string digest = Mixture({a, b}, {1, 3}).digest();
    CHECK(Mixture({a, b}, {0.25, 0.75}).digest() == digest);
    CHECK(Mixture({a, b}, {1, 2}).digest() != digest);
    CHECK(Mixture({b, a}, {1, 3}).digest() != digest);
    CHECK(Mixture({a, b}, {1, 3}).description() == "part0_103_000000.bin (25 %), part1_42_000000.bin (75 %)");
    CHECK(Mixture({a, b}, {1, 3}).token_count() == 145);
}

TEST_CASE_METHOD(MixtureFixture, "mixture: weights and streams that are too small are rejected", "[data]") {
    const TokenStream a = stream(0, 103), tiny = stream(1, 4);
    expect_error(Exit::config, {"the weight 1 of part0_103_000000.bin", "0.0999 %"}, [&] {
        Mixture({a, a}, {1, 1000});
    });
    expect_error(Exit::config, {"part1_4_000000.bin (4 tokens)", "seq_len 4"}, [&] {
        Loader(Mixture({a, tiny}, {1, 1}), {.seq_len = 4, .batch = 1});
    });
}

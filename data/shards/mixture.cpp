#include "data/shards/mixture.h"

#include <cmath>
#include <numeric>

#include "data/shards/permutation.h"
#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "runtime/io/digest.h"

static constexpr uint64_t kBlock = 1 << 16;  // samples; the smallest share has 65 of them, so rounding never gives 0

Mixture::Mixture(std::vector<TokenStream> streams, const std::vector<double>& weights)
    : streams_(std::move(streams)), bounds_{0} {
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (streams_.empty()) fail(Exit::config, "data.train: the mixture is empty");
    require(weights.size() == streams_.size(), "mixture: %zu weights of %zu streams", weights.size(), streams_.size());
    for (size_t i = 0; i < weights.size(); i++) {
        if (!(weights[i] / sum >= kMinShare))
            fail(Exit::config, "data.train: the weight %g of %s is a share of %.3g %%; the minimum share is %g %%",
                 weights[i], streams_[i].description(), 100 * weights[i] / sum, 100 * kMinShare);
        bounds_.push_back(bounds_.back() + weights[i] / sum);
    }
    bounds_.back() = 1;
}

uint64_t Mixture::token_count() const {
    uint64_t count = 0;
    for (const TokenStream& stream : streams_) count += stream.token_count();
    return count;
}

// Returns how many samples before `sample`, the start of a block, come from streams with an index below `stream`.
uint64_t Mixture::samples_before(size_t stream, uint64_t sample) const {
    return stream == streams_.size() ? sample : uint64_t(std::floor(bounds_[stream] * double(sample)));
}

SampleSource Mixture::source_of(uint64_t sample, uint64_t seed) const {
    if (streams_.size() == 1) return {0, sample};
    const uint64_t block = sample / kBlock, begin = block * kBlock, end = begin + kBlock;
    const uint64_t place = permuted(sample - begin, kBlock, stream_seed(streams_.size(), seed), uint32_t(block));
    // The places in a block are assigned to the streams in order.
    uint64_t places_before = 0;
    for (size_t i = 0;; i++) {
        const uint64_t places = samples_before(i + 1, end) - samples_before(i + 1, begin);
        if (place < places)
            return {i, samples_before(i + 1, begin) - samples_before(i, begin) + (place - places_before)};
        places_before = places;
    }
}

uint64_t Mixture::stream_seed(size_t stream, uint64_t seed) const {
    if (streams_.size() == 1) return seed;
    const auto random = philox(seed, uint64_t(RandomPurpose::permutation) << 32, ~uint64_t(stream));
    return uint64_t(random.word[0]) << 32 | random.word[1];
}

std::string Mixture::digest() const {
    if (streams_.size() == 1) return streams_[0].digest();
    Digest digest;
    for (size_t i = 0; i < streams_.size(); i++) digest.add(streams_[i].digest() + format(" %.17g\n", share(i)));
    return digest.hex();
}

std::string Mixture::description() const {
    if (streams_.size() == 1) return streams_[0].description();
    std::string text;
    for (size_t i = 0; i < streams_.size(); i++)
        text += (i ? ", " : "") + streams_[i].description() + format(" (%.3g %%)", 100 * share(i));
    return text;
}

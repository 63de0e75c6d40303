// Several token streams as one source of training samples.
#pragma once

#include "data/shards/shards.h"

// Sample `index` of stream `stream`; both count from 0.
struct SampleSource {
    size_t stream = 0;
    uint64_t index = 0;
};

// Draws samples from several streams in proportion to their weights.
//
// The stream of a sample is a pure function of (seed, sample). Samples form blocks of 65,536. At the end of each block,
// every stream has contributed its rounded share of all samples. Within a block, the places of the streams are permuted
// by (seed, block). The samples of a stream are numbered without gaps, so its epochs do not depend on the sizes of the
// other streams.
class Mixture {
public:
    // Requires positive, finite weights. A share is a weight divided by their sum. Fails with Exit::config if `streams`
    // is empty or a share is below kMinShare.
    Mixture(std::vector<TokenStream> streams, const std::vector<double>& weights);
    explicit Mixture(TokenStream stream) : Mixture(std::vector{std::move(stream)}, {1}) {}

    static constexpr double kMinShare = 0.001;

    const std::vector<TokenStream>& streams() const { return streams_; }
    double share(size_t stream) const { return bounds_[stream + 1] - bounds_[stream]; }
    uint64_t token_count() const;  // of all streams together

    SampleSource source_of(uint64_t sample, uint64_t seed) const;

    // Returns the seed for the window order of a stream. With a single stream, returns `seed`.
    uint64_t stream_seed(size_t stream, uint64_t seed) const;

    // Returns 32 hex digits: the digest of the streams' digests and shares. With a single stream, returns its digest.
    std::string digest() const;

    // Returns a description for messages, such as "a_000.bin and 2 more"; several streams are listed with their shares.
    std::string description() const;

private:
    uint64_t samples_before(size_t stream, uint64_t sample) const;

    std::vector<TokenStream> streams_;
    std::vector<double> bounds_;  // (streams + 1): cumulative shares, from 0 to 1
};

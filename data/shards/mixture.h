// Several token streams as one source of training samples.
#pragma once

#include "data/shards/shards.h"

// The `index`-th sample of stream number `stream`, both from 0.
struct SampleSource {
    size_t stream = 0;
    uint64_t index = 0;
};

// Streams from which samples are drawn in proportion to their weights.
//
// Which stream a sample comes from is a pure function of (seed, sample). Samples are taken in blocks of 65,536. Up to
// the end of each block every stream has given its share of all samples, rounded; within a block the places of the
// streams are permuted by (seed, block). So the samples of a stream are counted without gaps, and its own epochs follow
// from that count, whatever the other streams have.
class Mixture {
public:
    // Weights are positive and finite; shares are weights divided by their sum. Fails with Exit::config if there is no
    // stream, or if a share is below kSmallestShare.
    Mixture(std::vector<TokenStream> streams, const std::vector<double>& weights);
    explicit Mixture(TokenStream stream) : Mixture(std::vector{std::move(stream)}, {1}) {}

    static constexpr double kSmallestShare = 0.001;

    const std::vector<TokenStream>& streams() const { return streams_; }
    double share(size_t stream) const { return bounds_[stream + 1] - bounds_[stream]; }
    uint64_t token_count() const;  // of all streams together

    SampleSource source_of(uint64_t sample, uint64_t seed) const;

    // The seed for the order of a stream's windows: that of a run with one stream is the run's.
    uint64_t stream_seed(size_t stream, uint64_t seed) const;

    // 32 hex digits over the streams' digests, in order, and their shares; of a single stream its own.
    std::string digest() const;

    // "a_000.bin and 2 more", of several streams with their shares, for messages.
    std::string description() const;

private:
    uint64_t given_before(size_t stream, uint64_t sample) const;

    std::vector<TokenStream> streams_;
    std::vector<double> bounds_;  // (streams + 1): sums of the shares before each stream, and 1
};

// Generation with a KV cache: Gpt::prefill() and Gpt::decode().
#include <algorithm>

#include "kernels/base/check.h"
#include "model/state.h"

int Gpt::sequence_length(int sequence) const { return state_->cached[size_t(sequence)].position; }

// A forward pass that also stores keys and values in the sequence's part of the cache.
void Gpt::prefill(int sequence, const int* tokens, int count, float* logits) {
    GptState& s = *state_;
    const int batch = s.options.batch, longest = s.options.seq_len;
    require(sequence >= 0 && sequence < s.options.cached_sequences, "prefill: sequence %d of %d", sequence,
            s.options.cached_sequences);
    require(count >= 1 && count <= longest, "prefill: %d tokens, must be in [1, %d]", count, longest);
    s.prefilled = sequence;
    s.options.batch = 1, s.options.seq_len = count;
    forward(tokens);
    logits_of_rows(s, count - 1, 1, logits);
    s.options.batch = batch, s.options.seq_len = longest;
    s.prefilled = -1;
    s.cached[size_t(sequence)] = {sequence, count, s.first_key ? s.host_first_key[size_t(count) - 1] : 0};
}

void Gpt::decode(std::span<const NextToken> tokens, float* logits) {
    GptState& s = *state_;
    const HostSpan span(s.stream.trace, "decode");
    require(!tokens.empty() && int(tokens.size()) <= s.options.cached_sequences,
            "decode: %zu sequences, must be in [1, %d]", tokens.size(), s.options.cached_sequences);
    std::vector<ops::AttentionDecode::Place> places;
    std::vector<int> ids, positions;
    for (const NextToken& next : tokens) {
        ops::AttentionDecode::Place& place = s.cached[size_t(next.sequence)];
        require(place.position >= 1 && place.position < s.options.seq_len, "decode: sequence %d has %d of %d tokens",
                next.sequence, place.position, s.options.seq_len);
        if (s.first_key && next.token == s.options.document_token) place.first_key = place.position;
        places.push_back(place);
        positions.push_back(place.position);
        place.position++;
        ids.push_back(next.token);
    }
    copy_to_device(s.tokens, ids.data(), ids.size() * sizeof(int), s.stream);
    copy_to_device(s.places, places.data(), places.size() * sizeof(places[0]), s.stream);
    copy_to_device(s.positions, positions.data(), positions.size() * sizeof(int), s.stream);
    const DecodePass pass{.places = s.places, .positions = s.positions};
    LayerContext x = layer_context(s, false);
    x.rows = x.batch = int(tokens.size());
    x.seq_len = 1;
    x.decode = &pass;
    x.dropout = {};
    forward_pass(s, x);
    const int head_rows = s.options.head_rows;
    for (int row = 0; row < x.rows; row += head_rows)
        logits_of_rows(s, row, std::min(head_rows, x.rows - row),
                       logits + size_t(row) * size_t(s.options.shape.vocab_size));
}

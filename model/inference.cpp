#include "model/inference.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "kernels/trace.h"
#include "model/layers.h"
#include "model/sharding.h"
#include "model/stage.h"
#include "model/state.h"

namespace {

void forward_tokens(GptState& s, const LayerContext& x, const BatchSizes& whole, const int* tokens) {
    const HostSpan span(s.stream.trace, "forward");
    load_input(s, s.inputs[0], whole, tokens);
    forward_model(s, x);
}

// Adds tokens until ranks can divide the rows.
void pad_rows(const GptState& s, std::vector<int>& tokens) {
    tokens.resize(round_up(tokens.size(), size_t(s.group.comm.size)));
}

// Returns the row of this rank's part that has row `row` of the whole batch, or -1 if another rank has it.
int own_row(const GptState& s, int row) {
    const BatchSizes part = s.options.part();
    for (int b = 0; b < part.batch; b++)
        if (const int t = row - s.options.context.first_row(training_sizes(s), b); 0 <= t && t < part.seq_len)
            return b * part.seq_len + t;
    return -1;
}

// Computes this rank's part of the float logits that follow `count` rows of a forward pass: (count, V). At most
// options.head_rows rows.
void own_logits_of_rows(GptState& s, const BatchSizes& pass, int first, int count, float* logits) {
    LayerContext x = layer_context(s, pass);
    const ConstView all = gather_rows(x, s.acts[0].norm_f.out);
    x.rows = count;
    const ConstView inp = all.from(size_t(first) * size_t(s.options.shape.n_embd));
    wait_params(s, s.layout.bucket_of_head());
    linear_forward(x, head_weights(s), inp, s.acts[0].logits);
    const size_t padded = size_t(s.layout.shape.padded_vocab()), vocab = size_t(s.options.shape.vocab_size);
    std::vector<std::byte>& rows = s.host_logits;
    rows.resize(size_t(count) * padded * size_of(s.options.precision));
    copy_to_host(rows.data(), s.acts[0].logits.view.data, rows.size(), s.stream);
    synchronize(s.stream);
    const ConstView values(rows.data(), s.options.precision);
    const double cap = double(float(s.options.shape.final_softcap));
    const size_t first_token = std::min(size_t(s.group.comm.rank) * padded, vocab);
    const size_t end_token = std::min(first_token + padded, vocab);
    for (size_t row = 0; row < size_t(count); row++)
        for (size_t i = first_token; i < end_token; i++) {
            const double logit = element(values, row * padded + i - first_token);
            logits[row * vocab + i] = float(cap > 0 ? cap * std::tanh(logit / cap) : logit);
        }
}

// The same of all ranks; `first` is negative if another rank has the rows.
void logits_of_rows(GptState& s, const BatchSizes& pass, int first, int count, float* logits) {
    const size_t n = size_t(count) * size_t(s.options.shape.vocab_size);
    const bool is_divided = s.group.comm.size > 1 || s.comms.pipeline.size > 1 || s.ring.comm.size > 1;
    if (is_divided) std::fill_n(logits, n, 0.0f);
    if (s.layout.has_output() && first >= 0) own_logits_of_rows(s, pass, first, count, logits);
    if (!is_divided) return;
    std::vector<double> whole(logits, logits + n);
    for (const Comm& comm : {s.group.comm, s.comms.pipeline, s.ring.comm}) sum_over(s, comm, whole);
    std::ranges::transform(whole, logits, [](double logit) { return float(logit); });
}

}  // namespace

double batch_loss(Gpt& gpt, const int* tokens, const int* targets, float* losses, int seq_len) {
    GptState& s = gpt.state();
    BatchSizes sizes = training_sizes(s);
    if (seq_len > 0) {
        require(sizes.seq_len % seq_len == 0 && s.options.context.divides(seq_len),
                "batch_loss: sequence length %d must divide seq_len %d", seq_len, sizes.seq_len);
        sizes = {sizes.batch * (sizes.seq_len / seq_len), seq_len};
    }
    const LayerContext x = layer_context(s, sizes);
    forward_tokens(s, x, sizes, tokens);
    if (losses) std::fill_n(losses, sizes.rows(), 0.0f);
    if (!s.layout.has_output()) return 0;
    load_targets(s, s.inputs[0], sizes, targets);
    loss_forward_backward(s, stage_pass(s, x, s.options.pipeline.chunks - 1, 0), nullptr);
    double loss_sum = 0;
    copy_to_host(&loss_sum, s.loss_sum, sizeof(loss_sum), s.stream);
    for (int b = 0; losses && b < x.batch; b++)
        copy_to_host(losses + s.options.context.first_row(sizes, b),
                     s.acts[0].loss.view.as<float>() + size_t(b) * size_t(x.seq_len), size_t(x.seq_len) * sizeof(float),
                     s.stream);
    synchronize(s.stream);
    return loss_sum;
}

void next_token_logits(Gpt& gpt, const int* tokens, int count, float* logits) {
    GptState& s = gpt.state();
    const BatchSizes sizes = training_sizes(s);
    require(count >= 1 && count <= sizes.seq_len, "next_token_logits: %d tokens, must be in [1, %d]", count,
            sizes.seq_len);
    std::vector<int> padded(sizes.rows());  // attention is causal: later tokens have no effect
    std::copy_n(tokens, count, padded.begin());
    forward_tokens(s, layer_context(s, sizes), sizes, padded.data());
    logits_of_rows(s, sizes, own_row(s, count - 1), 1, logits);
}

void logits_of_row(Gpt& gpt, int row, float* logits) {
    const BatchSizes sizes = training_sizes(gpt.state());
    require(row >= 0 && row < int(sizes.rows()), "logits_of_row: row %d of %zu", row, sizes.rows());
    logits_of_rows(gpt.state(), sizes, own_row(gpt.state(), row), 1, logits);
}

int sequence_length(Gpt& gpt, int sequence) { return gpt.state().cached[size_t(sequence)].position; }

void prefill(Gpt& gpt, int sequence, const int* tokens, int count, float* logits) {
    GptState& s = gpt.state();
    require(sequence >= 0 && sequence < s.options.cached_sequences, "prefill: sequence %d of %d", sequence,
            s.options.cached_sequences);
    require(count >= 1 && count <= s.options.seq_len, "prefill: %d tokens, must be in [1, %d]", count,
            s.options.seq_len);
    std::vector<int> padded(tokens, tokens + count);  // attention is causal: later tokens have no effect
    pad_rows(s, padded);
    const BatchSizes sizes{1, int(padded.size())};
    LayerContext x = layer_context(s, sizes);
    x.prefilled = sequence;
    forward_tokens(s, x, sizes, padded.data());
    logits_of_rows(s, sizes, count - 1, 1, logits);
    s.cached[size_t(sequence)] = {sequence, count, s.inputs[0].first_key ? s.host_first_key[size_t(count) - 1] : 0};
}

void decode(Gpt& gpt, std::span<const NextToken> tokens, float* logits) {
    GptState& s = gpt.state();
    const HostSpan span(s.stream.trace, "decode");
    require(!tokens.empty() && int(tokens.size()) <= s.options.cached_sequences,
            "decode: %zu sequences, must be in [1, %d]", tokens.size(), s.options.cached_sequences);
    std::vector<ops::AttentionDecode::Place> places;
    std::vector<int> ids, positions;
    for (const NextToken& next : tokens) {
        ops::AttentionDecode::Place& place = s.cached[size_t(next.sequence)];
        require(place.position >= 1 && place.position < s.options.seq_len, "decode: sequence %d has %d of %d tokens",
                next.sequence, place.position, s.options.seq_len);
        if (s.inputs[0].first_key && next.token == s.options.document_token) place.first_key = place.position;
        places.push_back(place);
        positions.push_back(place.position);
        place.position++;
        ids.push_back(next.token);
    }
    pad_rows(s, ids);
    for (int other = s.options.cached_sequences; places.size() < ids.size(); other++)
        places.push_back({other, 0, 0}), positions.push_back(0);
    copy_to_device(s.inputs[0].tokens, ids.data(), ids.size() * sizeof(int), s.stream);
    copy_to_device(s.places, places.data(), places.size() * sizeof(places[0]), s.stream);
    copy_to_device(s.positions, positions.data(), positions.size() * sizeof(int), s.stream);
    const DecodePass pass{.places = s.places, .positions = s.positions};
    const BatchSizes sizes{int(ids.size()), 1};
    LayerContext x = layer_context(s, sizes);
    x.decode = &pass;
    forward_model(s, x);
    const int count = int(tokens.size()), head_rows = s.options.head_rows;
    for (int row = 0; row < count; row += head_rows)
        logits_of_rows(s, sizes, row, std::min(head_rows, count - row),
                       logits + size_t(row) * size_t(s.options.shape.vocab_size));
}

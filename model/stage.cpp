#include "model/stage.h"

#include <algorithm>

#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/block.h"
#include "model/measurements.h"
#include "model/offload.h"
#include "model/sharding.h"

LayerContext layer_context(const GptState& s, const BatchSizes& whole) {
    const BatchSizes part = s.options.context.part(whole);
    return {.shape = &s.layout.shape,
            .batch = part.batch,
            .seq_len = part.seq_len,
            .starts = s.options.context.starts(part.seq_len),
            .rows = int(part.rows()),
            .segments = s.options.context.own_segments(),
            .group = &s.group,
            .ring = &s.ring,
            .stream = s.stream,
            .scratch = s.scratch,
            .accumulate = false,
            .is_recomputing = false,
            .rope_table = s.rope_table,
            .cache = &s.cache};
}

StagePass stage_pass(const GptState& s, const LayerContext& x, int chunk, int micro_step) {
    const PipelineParallel& pipeline = s.options.pipeline;
    const size_t slot = size_t(micro_step % s.in_flight[size_t(chunk)]);
    StagePass pass{.x = x,
                   .chunk = chunk,
                   .micro_step = micro_step,
                   .layers = s.layers[size_t(chunk)],
                   .is_first = pipeline.is_first() && chunk == 0,
                   .is_last = pipeline.is_last() && chunk + 1 == pipeline.chunks,
                   .acts = s.acts[slot],
                   .input = s.inputs[size_t(micro_step) % s.inputs.size()]};
    pass.x.first_key = pass.input.first_key;
    return pass;
}

// Copies this rank's part of a batch, one number per token, to the device.
static void load_part(GptState& s, int* to, const BatchSizes& whole, const int* from) {
    const BatchSizes part = s.options.context.part(whole);
    if (s.options.context.is_divided()) {
        for (int b = 0; b < part.batch; b++)
            std::copy_n(from + s.options.context.first_row(whole, b), part.seq_len,
                        &s.host_part[size_t(b) * size_t(part.seq_len)]);
        from = s.host_part.data();
    }
    copy_to_device(to, from, part.rows() * sizeof(int), s.stream);
}

// A document starts at the last document_token so far in the token's sequence.
void load_input(GptState& s, MicroStepInput& input, const BatchSizes& whole, const int* tokens) {
    load_part(s, input.tokens, whole, tokens);
    if (!input.first_key) return;
    for (int row = 0, first = 0; row < int(whole.rows()); row++) {
        const int position = row % whole.seq_len;
        if (position == 0 || tokens[row] == s.options.document_token) first = position;
        s.host_first_key[size_t(row)] = first;
    }
    load_part(s, input.first_key, whole, s.host_first_key.data());
}

void load_targets(GptState& s, MicroStepInput& input, const BatchSizes& whole, const int* targets) {
    load_part(s, input.targets, whole, targets);
}

namespace {

constexpr int other_rank(const Comm& pair) { return 1 - pair.rank; }

size_t message_elements(const LayerContext& x) { return size_t(x.own_rows()) * size_t(x.shape->n_embd); }

void expect_message(GptState& s, StageChannel& channel, size_t elements) {
    if (channel.is_expected) return;
    const size_t bytes = elements * size_of(channel.received.dtype);
    channel.receiving =
        exchange({{}, {{other_rank(channel.from), channel.received.data, bytes}}}, channel.from, s.stream);
    channel.is_expected = true;
}

void receive(GptState& s, StageChannel& channel, View to, size_t elements) {
    expect_message(s, channel, elements);
    wait(channel.receiving, channel.from, s.stream);
    copy_on_device(to.data, channel.received.data, elements * size_of(to.dtype), s.stream);
    channel.is_expected = false;
}

// Sends a + b, or `a` if `b` is null.
void send(GptState& s, StageChannel& channel, ConstView a, ConstView b, size_t elements) {
    const size_t bytes = elements * size_of(a.dtype), i = channel.next_sent++ % kBuffers;
    const View message = channel.sent[i];
    wait(channel.sending[i], channel.to, s.stream);
    copy_on_device(message.data, a.data, bytes, s.stream);
    if (b) run(s.stream, ops::add, {.out = message, .inp = b, .count = elements});
    channel.sending[i] = exchange({{{other_rank(channel.to), message.data, bytes}}, {}}, channel.to, s.stream);
}

// Returns the input of a block: the output of the previous block, or, in the first of a part, the embedding or the
// previous stage's output without a branch. The final norm follows the last block.
ResidualSum block_input(const StagePass& pass, int layer) {
    const std::vector<BlockActivations>& block = pass.acts.block;
    if (layer == pass.layers.first) return {.residual = block[size_t(layer)].residual, .branch = nullptr};
    const BlockActivations& before = block[size_t(layer) - 1];
    return {.residual = before.residual_mid, .branch = before.mlp.out};
}

void embed(const GptState& s, const StagePass& pass) {
    const LayerContext& x = pass.x;
    const GptActivations& acts = pass.acts;
    const Activation& input = acts.block[0].residual;
    const bool is_normed = s.options.shape.embedding_norm;
    embedding_forward(x, s.weights.wte, s.weights.wpe, pass.input.tokens, is_normed ? acts.embedding : input);
    if (is_normed) {
        NormActivations norm = acts.norm_e;
        norm.out = input;
        residual_norm_forward(x, s.weights.norm_e, {.residual = acts.embedding, .branch = nullptr}, acts.embedding,
                              norm);
    }
    dropout_forward(x, DropoutSite::embedding, input);
}

void wait_for_params(GptState& s, const std::vector<int>& buckets) {
    for (const int bucket : buckets) wait_params(s, bucket);
}

}  // namespace

void expect(GptState& s, const Pass& pass) {
    if (pass.kind == Pass::weights) return;
    const LayerContext x = layer_context(s, step_sizes(s));
    const StagePass place = stage_pass(s, x, pass.chunk, pass.micro_step);
    if (pass.kind == Pass::forward ? place.is_first : place.is_last) return;
    expect_message(s, pass.kind == Pass::forward ? s.activations : s.gradients, message_elements(x));
}

void forward_part(GptState& s, const StagePass& pass, const Pass* next, bool is_measured) {
    const LayerContext& x = pass.x;
    const GptActivations& acts = pass.acts;
    const int first = pass.layers.first, end = pass.layers.end();
    if (pass.is_training) hold_input(s, acts.block[size_t(first)].residual);
    if (!pass.is_first) receive(s, s.activations, acts.block[size_t(first)].residual.view, message_elements(x));
    if (next) expect(s, *next);
    if (pass.is_first) {
        wait_for_params(s, s.layout.input_buckets);
        embed(s, pass);
    }
    for (int layer = first; layer < end; layer++) {
        const int bucket = s.layout.bucket_of_layer(layer);
        wait_params(s, bucket);
        prefetch_params(s, bucket + 1);
        const BlockActivations& block = acts.block[size_t(layer)];
        if (pass.is_training && layer > first) hold_input(s, block.residual);
        block_forward(x.of_block(size_t(layer)), s.weights.block[size_t(layer)], block_input(pass, layer), block);
        if (pass.is_training) send_input(s, block.residual);
        if (!is_measured) continue;
        measure_residual(s, block.norm1, 2 * size_t(layer));
        measure_residual(s, block.norm2, 2 * size_t(layer) + 1);
    }
    const ResidualSum output = block_input(pass, end);
    if (!pass.is_last) return send(s, s.activations, output.residual, output.branch, message_elements(x));
    wait_params(s, s.layout.output_buckets.front());
    residual_norm_forward(x, s.weights.norm_f, output, acts.residual_f, acts.norm_f);
    if (is_measured) measure_residual(s, acts.norm_f, 2 * size_t(end));
}

void loss_forward_backward(GptState& s, const StagePass& pass, View dinp) {
    const GptActivations& acts = pass.acts;
    wait_params(s, s.layout.bucket_of_head());
    head_forward_backward(pass.x, head_weights(s), acts.norm_f.out, s.options.head_rows,
                          {.logits = acts.logits.view,
                           .loss = acts.loss.view.as<float>(),
                           .targets = pass.input.targets,
                           .loss_scale = s.loss_scale,
                           .grad_scale = s.step.grad_scale,
                           .z_loss = s.options.z_loss,
                           .dinp = dinp});
    run(s.stream, ops::loss_sum,
        {.out = s.loss_sum, .loss = acts.loss.view.as<float>(), .rows = pass.x.rows, .accumulate = false});
}

namespace {

bool is_in(const std::vector<int>& buckets, int bucket) { return std::ranges::find(buckets, bucket) != buckets.end(); }

// The head and the final norm. Writes the gradient of the last block's output.
void backward_output(GptState& s, const StagePass& pass, const MicroStep& micro, View dresidual) {
    const GptActivations& acts = pass.acts;
    const View dnorm = acts.dbranch.view;
    const std::vector<int>& buckets = s.layout.output_buckets;
    for (const int bucket : buckets) begin_grads(s, bucket, micro);
    loss_forward_backward(s, pass, dnorm);
    residual_norm_backward(pass.x, s.weights.norm_f, acts.residual_f, acts.norm_f, dnorm, dresidual, false);
    for (const int bucket : buckets)
        if (!is_in(s.layout.input_buckets, bucket)) end_grads(s, bucket, micro);
}

void backward_input(GptState& s, const StagePass& pass, const MicroStep& micro, View dresidual) {
    const GptActivations& acts = pass.acts;
    const std::vector<int>& buckets = s.layout.input_buckets;
    wait_for_params(s, buckets);
    for (const int bucket : buckets)
        if (!is_in(s.layout.output_buckets, bucket)) begin_grads(s, bucket, micro);
    dropout_backward(pass.x, DropoutSite::embedding, dresidual, dresidual);
    View dembedding = dresidual;
    if (s.options.shape.embedding_norm) {
        dembedding = acts.dbranch.view;
        residual_norm_backward(pass.x, s.weights.norm_e, acts.embedding, acts.norm_e, dresidual, dembedding, false);
    }
    const bool has_head_part = s.layout.tied_bucket < 0 && s.options.shape.tie_embeddings;
    embedding_backward(pass.x, s.weights.wte, s.weights.wpe, pass.input.tokens, dembedding, has_head_part);
    for (const int bucket : buckets) end_grads(s, bucket, micro);
}

}  // namespace

// The buffers of a layer's backward pass.
static BlockGradients gradients_of(const GptState& s, const StagePass& pass, size_t layer) {
    const View dresidual = pass.acts.dresidual.view, dbranch = pass.acts.dbranch.view, dwide = pass.acts.dwide.view;
    View dfc = dwide;
    if (!s.options.shape.gated_mlp) dfc.amax = nullptr;  // a GEMM computes it
    if (s.deferred == 0)  // the gate's gradient replaces its output, which is no longer needed
        return {.dresidual = dresidual,
                .dbranch = dbranch,
                .dmlp = dbranch,
                .dact = pass.acts.block[layer].mlp.act.view,
                .dfc = dfc,
                .dattn = dwide,
                .dqkv = dwide};
    const BlockActivations& kept = s.acts[size_t(pass.micro_step % s.deferred)].block[layer];
    return {.dresidual = dresidual,
            .dbranch = dbranch,
            .dmlp = kept.dmlp.view,
            .dact = dwide,
            .dfc = kept.dfc.view,
            .dattn = kept.dattn.view,
            .dqkv = kept.dqkv.view};
}

void backward_part(GptState& s, const StagePass& pass, const Pass* next) {
    const GptActivations& acts = pass.acts;
    const View dresidual = acts.dresidual.view;
    const bool defers = s.options.pipeline.defers_weights();
    const MicroStep micro = begin_micro_step(s, Pass::backward, pass.chunk);
    StagePass place = pass;
    place.x.accumulate = micro.accumulate;
    LayerContext x = place.x, again = place.x;
    x.defers_weights = defers, again.is_recomputing = true;
    if (!pass.is_last) receive(s, s.gradients, dresidual, message_elements(x));
    if (next) expect(s, *next);
    const auto fetch_ahead = [&](int layer) {
        if (layer >= pass.layers.first) fetch_input(s, acts.block[size_t(layer)].residual);
    };
    for (const int ahead : {1, 2}) fetch_ahead(pass.layers.end() - ahead);
    if (pass.is_last) backward_output(s, place, micro, dresidual);
    for (int layer = pass.layers.end() - 1; layer >= pass.layers.first; layer--) {
        const int index = s.layout.bucket_of_layer(layer);
        const Bucket& bucket = s.layout.buckets[size_t(index)];
        wait_params(s, index);
        prefetch_params(s, index - 1);
        if (layer + 1 == bucket.first_layer + bucket.n_layers) begin_grads(s, index, micro);
        prefetch_grads(s, index - 1, micro);
        const BlockWeights& weights = s.weights.block[size_t(layer)];
        const BlockActivations& block = acts.block[size_t(layer)];
        hold_input(s, block.residual);
        block_forward(again.of_block(size_t(layer)), weights, block_input(place, layer), block);
        block_backward(x.of_block(size_t(layer)), weights, block, gradients_of(s, place, size_t(layer)));
        fetch_ahead(layer - 2);
        if (layer == bucket.first_layer && !defers) end_grads(s, index, micro);
    }
    if (pass.is_first)
        backward_input(s, place, micro, dresidual);
    else
        send(s, s.gradients, dresidual, nullptr, message_elements(x));
    end_micro_step(s, Pass::backward, pass.chunk);
}

void weights_part(GptState& s, const StagePass& pass, const Pass* next) {
    if (next) expect(s, *next);
    const MicroStep micro = begin_micro_step(s, Pass::weights, pass.chunk);
    LayerContext x = pass.x;
    x.accumulate = micro.accumulate;
    for (int layer = pass.layers.end() - 1; layer >= pass.layers.first; layer--) {
        const int index = s.layout.bucket_of_layer(layer);
        block_backward_weights(x.of_block(size_t(layer)), s.weights.block[size_t(layer)],
                               pass.acts.block[size_t(layer)], gradients_of(s, pass, size_t(layer)));
        if (layer == s.layout.buckets[size_t(index)].first_layer) end_grads(s, index, micro);
    }
    end_micro_step(s, Pass::weights, pass.chunk);
}

void forward_model(GptState& s, const LayerContext& x) {
    for (int chunk = 0; chunk < s.options.pipeline.chunks; chunk++)
        forward_part(s, stage_pass(s, x, chunk, 0), nullptr, false);
}

void sum_over(GptState& s, const Comm& comm, std::span<double> values) {
    const size_t most = step_sums(s).count();
    for (; comm.size > 1 && !values.empty(); values = values.subspan(std::min(most, values.size()))) {
        const std::span<double> some = values.first(std::min(most, values.size()));
        copy_to_device(s.sums, some.data(), some.size_bytes(), s.stream);
        wait(all_reduce_sum(s.sums, some.size(), comm, s.stream), comm, s.stream);
        copy_to_host(some.data(), s.sums, some.size_bytes(), s.stream);
        synchronize(s.stream);
    }
}

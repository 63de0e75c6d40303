// Attention over whole sequences and over a KV cache.
#include "model/layers.h"

static ops::DropoutMask attention_mask(const LayerContext& x) {
    ops::DropoutMask mask = x.dropout_at(DropoutSite::attention);
    mask.place += uint32_t(x.group->comm.rank * x.shape->n_head);
    return mask;
}

// The ops over the sequences of this rank's part of the batch, as if they were whole.
static ops::AttentionForward forward_op(const LayerContext& x, ConstView qkv, const AttentionActivations& attn) {
    return {.out = attn.out.view,
            .lse = attn.lse.view.as<float>(),
            .qkv = qkv,
            .batch = x.batch,
            .seq_len = x.seq_len,
            .n_head = x.shape->n_head,
            .n_kv_head = x.shape->kv_heads(),
            .head_size = x.shape->head_size(),
            .scale = float(x.shape->attention_scale()),
            .window = x.shape->window(x.stream.layer),
            .softcap = float(x.shape->attention_softcap),
            .first_key = x.first_key,
            .dropout = attention_mask(x)};
}
static ops::AttentionBackward backward_op(const LayerContext& x, ConstView qkv, const AttentionActivations& attn,
                                          ConstView dout, View dqkv) {
    return {.dqkv = dqkv,
            .scratch = x.scratch,
            .dout = dout,
            .qkv = qkv,
            .out = attn.out,
            .lse = attn.lse.view.as<float>(),
            .batch = x.batch,
            .seq_len = x.seq_len,
            .n_head = x.shape->n_head,
            .n_kv_head = x.shape->kv_heads(),
            .head_size = x.shape->head_size(),
            .scale = float(x.shape->attention_scale()),
            .window = x.shape->window(x.stream.layer),
            .softcap = float(x.shape->attention_softcap),
            .first_key = x.first_key,
            .dropout = attention_mask(x)};
}

// Copies the keys and values of all rows from qkv: (rows, KV channels).
static void copy_keys_and_values(const LayerContext& x, View to, ConstView qkv) {
    const size_t element = size_of(qkv.dtype), channels = size_t(x.shape->qkv_channels());
    const size_t kept = size_t(x.shape->kv_channels());
    gather_on_device(to.data, qkv.from(channels - kept).data, channels * element, kept * element, size_t(x.rows),
                     x.stream);
}

void attention_forward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn) {
    if (x.decode)
        return run(x.stream, ops::attention_decode,
                   {.out = attn.out.view,
                    .cache = x.cache->layer(x.stream.layer),
                    .qkv = qkv,
                    .places = x.decode->places,
                    .rows = x.rows,
                    .capacity = x.cache->capacity,
                    .n_head = x.shape->n_head,
                    .n_kv_head = x.shape->kv_heads(),
                    .head_size = x.shape->head_size(),
                    .scale = float(x.shape->attention_scale()),
                    .window = x.shape->window(x.stream.layer),
                    .softcap = float(x.shape->attention_softcap)});
    if (x.has(attn.out)) return;
    const ops::AttentionForward op = forward_op(x, qkv, attn);
    run(x.stream, ops::attention_forward, op);
    if (x.prefilled >= 0) copy_keys_and_values(x, x.cache->sequence(x.stream.layer, x.prefilled), qkv);
}

void attention_backward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn, ConstView dout,
                        View dqkv) {
    const ops::AttentionBackward op = backward_op(x, qkv, attn, dout, dqkv);
    run(x.stream, ops::attention_backward, op);
}

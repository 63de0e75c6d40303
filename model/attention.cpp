// Attention over whole sequences, over a KV cache, and over sequences that the ranks of x.ring divide.
#include <algorithm>
#include <span>

#include "kernels/comm.h"
#include "kernels/op_stream.h"
#include "model/activations.h"
#include "model/fp8.h"
#include "model/layers.h"
#include "model/options.h"

static ops::DropoutMask attention_mask(const LayerContext& x) {
    ops::DropoutMask mask = x.dropout_at(DropoutSite::attention);
    mask.place += uint32_t(x.group->comm.rank * x.shape->n_head);
    return mask;
}

// Sets what the forward and the backward op have in common: the sequences of this rank's part of the batch, as if they
// were whole, and the layer's settings.
static void set_sequences(auto& op, const LayerContext& x, ConstView qkv, const AttentionActivations& attn) {
    op.qkv = qkv;
    op.lse = attn.lse.view.as<float>();
    op.batch = x.batch;
    op.seq_len = x.seq_len;
    op.n_head = x.shape->n_head;
    op.n_kv_head = x.shape->kv_heads();
    op.head_size = x.shape->head_size();
    op.scale = float(x.shape->attention_scale());
    op.window = x.shape->window(x.stream.layer);
    op.softcap = float(x.shape->attention_softcap);
    op.first_key = x.first_key;
    op.dropout = attention_mask(x);
}

// Copies the keys and values of all rows from qkv: (rows, KV channels).
static void copy_keys_and_values(const LayerContext& x, View to, ConstView qkv) {
    const size_t element = size_of(qkv.dtype), channels = size_t(x.shape->qkv_channels());
    const size_t kept = size_t(x.shape->kv_channels());
    copy_rows_on_device(to.data, kept * element, qkv.from(channels - kept).data, channels * element, kept * element,
                        size_t(x.rows), x.stream);
}

// ---- ring attention -------------------------------------------------------------------------------------------------

namespace {

// A chunk of queries of this rank and a chunk of keys of another or the same one; 0: the first, 1: the second.
struct ChunkPair {
    int queries, keys;
};

// Returns the pairs with keys of rank `owner` that a query sees. The chunks of rank r are r and 2 ranks - 1 - r, so an
// earlier rank's first chunk precedes both chunks of a later rank, whose second chunk precedes the earlier rank's.
std::span<const ChunkPair> pairs_with(int rank, int owner) {
    static constexpr ChunkPair kOwn[] = {{0, 0}, {1, 0}, {1, 1}};
    static constexpr ChunkPair kEarlier[] = {{0, 0}, {1, 0}};
    static constexpr ChunkPair kLater[] = {{1, 0}, {1, 1}};
    if (owner == rank) return kOwn;
    return owner < rank ? std::span(kEarlier) : kLater;
}

// Returns the rank `places` before this one in the ring.
int rank_before(const Comm& comm, int places) { return (comm.rank - places + comm.size) % comm.size; }

size_t chunk_kv(const LayerContext& x) { return size_t(x.chunk_rows()) * size_t(x.shape->kv_channels()); }

// Step s of the ring uses the keys and values of the rank s places before this one, in ring.kv[s % 2], and passes them
// to the next rank meanwhile.
Ticket pass_on(const LayerContext& x, int step) {
    const AttentionRing& ring = *x.ring;
    if (step + 1 == ring.comm.size) return {};
    const View own = ring.kv[step % 2], next = ring.kv[(step + 1) % 2];
    const size_t bytes = 2 * chunk_kv(x) * size_of(own.dtype);
    return exchange({.send = {{(ring.comm.rank + 1) % ring.comm.size, own.data, bytes}},
                     .receive = {{rank_before(ring.comm, 1), next.data, bytes}}},
                    ring.comm, x.stream);
}

// The keys of a pair. The first chunk of queries sees keys of the ranks from this one down to 0, the second chunk those
// of all ranks.
ops::KeyChunk keys_of(const LayerContext& x, int step, const ChunkPair& pair) {
    const Comm& comm = x.ring->comm;
    const int owner = rank_before(comm, step);
    const int start = ContextParallel{owner, comm.size}.starts(x.seq_len).start(pair.keys, 2);
    const bool is_last = pair.queries == 0 ? owner == 0 : step + 1 == comm.size && pair.keys == int(owner > comm.rank);
    return {.kv = x.ring->kv[step % 2].from(size_t(pair.keys) * chunk_kv(x)),
            .start = start,
            .distance = x.starts.start(pair.queries, 2) - start,
            .is_first = step == 0 && pair.keys == 0,
            .is_last = is_last};
}

// Makes an op compute this rank's chunk `queries` and a chunk of keys. Returns the chunk's first row.
size_t select_pair(const LayerContext& x, auto& op, int queries, const ops::KeyChunk& keys) {
    const size_t row = size_t(queries) * size_t(x.chunk_rows());
    op.batch /= 2 * x.segments;
    op.qkv = op.qkv.from(row * size_t(x.shape->qkv_channels()));
    op.out = op.out.from(row * size_t(x.shape->attention_channels())), op.lse += row * size_t(op.n_head);
    if (op.first_key) op.first_key += row;
    if (op.dropout) op.dropout.keys += queries * op.batch;
    op.chunk = keys;
    return row;
}

// Computes the attention of this rank's chunk `queries` to a chunk of keys.
void forward_pair(const LayerContext& x, ops::AttentionForward op, int queries, const ops::KeyChunk& keys) {
    const size_t row = select_pair(x, op, queries, keys), head_row = row * size_t(op.n_head);
    const ops::RunningAttention& running = x.ring->running;
    op.running = {running.out + row * size_t(x.shape->attention_channels()), running.max + head_row,
                  running.sum + head_row};
    run(x.stream, ops::attention_forward, op);
}

void ring_forward(const LayerContext& x, const ops::AttentionForward& op) {
    copy_keys_and_values(x, x.ring->kv[0], op.qkv);
    const Comm& comm = x.ring->comm;
    for (int step = 0; step < comm.size; step++) {
        const Ticket passed = pass_on(x, step);
        for (const ChunkPair& pair : pairs_with(comm.rank, rank_before(comm, step)))
            forward_pair(x, op, pair.queries, keys_of(x, step, pair));
        wait(passed, comm, x.stream);
    }
}

// Computes the gradients of this rank's chunk `queries` and, in op.dkv, the gradients of a chunk of keys.
void backward_pair(const LayerContext& x, ops::AttentionBackward op, int queries, const ops::KeyChunk& keys) {
    const size_t row = select_pair(x, op, queries, keys), attended = row * size_t(x.shape->attention_channels());
    op.dqkv = op.dqkv.from(row * size_t(x.shape->qkv_channels()));
    op.dout = op.dout.from(attended);
    op.dquery = x.ring->running.out + attended;
    run(x.stream, ops::attention_backward, op);
}

// The chunks of keys of an earlier rank, or of this rank for a later one, that have gradients.
int chunks_with_gradients(int rank_of_queries, int owner) { return owner < rank_of_queries ? 1 : 2; }

// Sends the gradients of step `step` to the keys' owner, and receives the gradients of this rank's keys from
// the rank that has them in the same step.
Ticket return_gradients(const LayerContext& x, int step) {
    const AttentionRing& ring = *x.ring;
    const int rank = ring.comm.rank, owner = rank_before(ring.comm, step), other = (rank + step) % ring.comm.size;
    const size_t bytes = chunk_kv(x) * sizeof(float);
    return exchange({.send = {{owner, ring.sent[step % 2], size_t(chunks_with_gradients(rank, owner)) * bytes}},
                     .receive = {{other, ring.received, size_t(chunks_with_gradients(other, rank)) * bytes}}},
                    ring.comm, x.stream);
}

// Rounds the gradients of this rank's keys and values.
void store_gradients(const LayerContext& x, View dqkv, const float* dkv) {
    const size_t channels = size_t(x.shape->qkv_channels()), kv = size_t(x.shape->kv_channels());
    run(x.stream, ops::cast_columns,
        {.out = dqkv.from(channels - kv),
         .inp = dkv,
         .rows = size_t(x.rows),
         .cols = kv,
         .out_step = channels,
         .inp_step = kv});
}

void ring_backward(const LayerContext& x, ops::AttentionBackward op) {
    const AttentionRing& ring = *x.ring;
    const int rank = ring.comm.rank, ranks = ring.comm.size;
    copy_keys_and_values(x, ring.kv[0], op.qkv);
    Ticket returned;
    for (int step = 0; step <= ranks; step++) {
        if (step < ranks) {
            const Ticket passed = pass_on(x, step);
            float* const dkv = step == 0 ? ring.dkv : ring.sent[step % 2];
            const int owner = rank_before(ring.comm, step);
            for (const ChunkPair& pair : pairs_with(rank, owner)) {
                op.dkv = dkv + size_t(pair.keys) * chunk_kv(x);
                op.accumulate_dkv = pair.queries == 1 && pair.keys == 0 && owner <= rank;
                backward_pair(x, op, pair.queries, keys_of(x, step, pair));
            }
            wait(passed, ring.comm, x.stream);
        }
        if (step > 1) {
            wait(returned, ring.comm, x.stream);
            const int other = (rank + step - 1) % ranks;
            run(x.stream, ops::add,
                {.out = ring.dkv,
                 .inp = ring.received,
                 .count = size_t(chunks_with_gradients(other, rank)) * chunk_kv(x)});
        }
        if (0 < step && step < ranks) returned = return_gradients(x, step);
    }
    store_gradients(x, op.dqkv, ring.dkv);
}

// ---- attention in terms ---------------------------------------------------------------------------------------------

// Gathers the keys and values of all ranks.
void gather_keys(const LayerContext& x, ConstView qkv) {
    const Comm& comm = x.ring->comm;
    const View all = x.ring->terms.kv, own = all.from(size_t(comm.rank * 2 * x.segments) * chunk_kv(x));
    copy_keys_and_values(x, own, qkv);
    const size_t bytes = size_t(2 * x.segments) * chunk_kv(x) * size_of(all.dtype);
    wait(all_gather(all.data, own.data, bytes, comm, x.stream), comm, x.stream);
}

// Calls use(queries, place, keys) for the chunks of queries of a segment and the chunks of keys that they see, in the
// order of the positions. `place` is the first element of a chunk of keys in the arrays of all ranks.
void for_each_pair(const LayerContext& x, int segment, const auto& use) {
    const ops::ChunkStarts starts = x.of_segment(segment).starts;
    const int last = 2 * x.segments * x.ring->comm.size - 1;
    for (int half : {0, 1}) {
        const int own = starts.start(half, 2) / x.seq_len;
        for (int number = 0; number <= own; number++) {
            const size_t place = size_t(std::min(2 * number, 2 * (last - number) + 1)) * chunk_kv(x);
            use(2 * segment + half, place,
                ops::KeyChunk{.kv = x.ring->terms.kv.from(place),
                              .start = number * x.seq_len,
                              .distance = (own - number) * x.seq_len,
                              .is_first = number == 0,
                              .is_last = number == own});
        }
    }
}

void gathered_forward(const LayerContext& x, const ops::AttentionForward& op) {
    gather_keys(x, op.qkv);
    for (int segment = 0; segment < x.segments; segment++)
        for_each_pair(x, segment,
                      [&](int queries, size_t, const ops::KeyChunk& keys) { forward_pair(x, op, queries, keys); });
}

// The gradients of keys and values have a term for each segment of queries.
void gathered_backward(const LayerContext& x, ops::AttentionBackward op) {
    gather_keys(x, op.qkv);
    const AttentionRing& ring = *x.ring;
    const size_t own = size_t(2 * x.segments) * chunk_kv(x), all = own * size_t(ring.comm.size);
    op.accumulate_dkv = true;
    for (int segment = 0; segment < x.segments; segment++) {
        float* const term = term_of(x, ring.terms.dkv, segment);
        run(x.stream, ops::fill, {.out = term, .count = all, .value = 0});
        for_each_pair(x, segment, [&](int queries, size_t place, const ops::KeyChunk& keys) {
            op.dkv = term + place;
            backward_pair(x, op, queries, keys);
        });
        add_term(x, ring.terms.dkv, segment, all);
    }
    float* const mine = ring.terms.dkv + size_t(ring.comm.rank) * own;
    const ReduceScatter sum{mine, ring.terms.scratch, ring.terms.dkv, own};
    wait(reduce_scatter_sum(sum, ring.comm, x.stream), ring.comm, x.stream);
    store_gradients(x, op.dqkv, mine);
}

}  // namespace

void attention_forward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn) {
    if (x.decode)
        return run(x.stream, ops::attention_decode,
                   {.out = attn.out.view,
                    .cache = x.cache->layer(x.stream.layer),
                    .qkv = qkv,
                    .places = x.decode->places,
                    .scratch = x.cache->scratch,
                    .rows = x.rows,
                    .capacity = x.cache->capacity,
                    .n_head = x.shape->n_head,
                    .n_kv_head = x.shape->kv_heads(),
                    .head_size = x.shape->head_size(),
                    .scale = float(x.shape->attention_scale()),
                    .window = x.shape->window(x.stream.layer),
                    .softcap = float(x.shape->attention_softcap)});
    if (x.has(attn.out)) return;
    ops::AttentionForward op{};
    set_sequences(op, x, qkv, attn);
    op.out = attn.out.view;
    if (x.ring->terms.kv) return gathered_forward(x, op);
    if (x.ring->comm.size > 1) return ring_forward(x, op);
    run(x.stream, ops::attention_forward, op);
    if (x.prefilled >= 0) copy_keys_and_values(x, x.cache->sequence(x.stream.layer, x.prefilled), qkv);
}

void attention_backward(const LayerContext& x, ConstView qkv, const AttentionActivations& attn, ConstView dout,
                        View dqkv) {
    ops::AttentionBackward op{};
    set_sequences(op, x, qkv, attn);
    op.dqkv = dqkv;
    if (x.shape->changes_heads()) op.dqkv.amax = nullptr;  // heads_backward() gives it
    op.scratch = x.scratch;
    op.dout = dout;
    op.out = attn.out;
    if (x.ring->terms.kv) return gathered_backward(x, op);
    if (x.ring->comm.size > 1) return ring_backward(x, op);
    run(x.stream, ops::attention_backward, op);
}

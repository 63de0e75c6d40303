// The memory layout of attention heads, the same in every backend.
#pragma once

#include <limits>

#include "kernels/base/check.h"
#include "kernels/ops.h"

namespace ops {

// Element offsets into qkv and dqkv, out and dout, lse, and into keys and values outside of qkv.
struct AttentionLayout {
    int seq_len, n_head, n_kv_head, head_size;

    template <class Op>
    HOST_DEVICE explicit AttentionLayout(const Op& op)
        : seq_len(op.seq_len), n_head(op.n_head), n_kv_head(op.n_kv_head), head_size(op.head_size) {}

    HOST_DEVICE int group() const { return n_head / n_kv_head; }  // query heads that share a key-value head
    HOST_DEVICE size_t qkv_step() const { return size_t(n_head + 2 * n_kv_head) * head_size; }
    HOST_DEVICE size_t out_step() const { return size_t(n_head) * head_size; }
    HOST_DEVICE size_t query(int b, int head, int t) const {
        return (size_t(b) * seq_len + t) * qkv_step() + size_t(head) * head_size;
    }
    HOST_DEVICE size_t key(int b, int kv_head, int t) const { return query(b, n_head + kv_head, t); }
    HOST_DEVICE size_t value(int b, int kv_head, int t) const { return query(b, n_head + n_kv_head + kv_head, t); }
    HOST_DEVICE size_t out(int b, int head, int t) const {
        return (size_t(b) * seq_len + t) * out_step() + size_t(head) * head_size;
    }
    HOST_DEVICE size_t lse(int b, int head, int t) const { return (size_t(b) * n_head + head) * seq_len + t; }
    HOST_DEVICE size_t kv_step() const { return size_t(2 * n_kv_head) * head_size; }
    HOST_DEVICE size_t chunk_key(int b, int kv_head, int t) const {
        return (size_t(b) * seq_len + t) * kv_step() + size_t(kv_head) * head_size;
    }
    HOST_DEVICE size_t chunk_value(int b, int kv_head, int t) const { return chunk_key(b, n_kv_head + kv_head, t); }
};

// The keys and values of one head, from position `first` on.
template <class T> struct KeyRows {
    const T *keys, *values;
    size_t step;  // elements from one position to the next

    template <class Op> HOST_DEVICE static KeyRows of_qkv(const Op& op, int b, int kv_head, int first) {
        const AttentionLayout at(op);
        const T* qkv = op.qkv.template as<T>();
        return {qkv + at.key(b, kv_head, first), qkv + at.value(b, kv_head, first), at.qkv_step()};
    }
    template <class Op> HOST_DEVICE static KeyRows of_chunk(const Op& op, int b, int kv_head, int first) {
        const AttentionLayout at(op);
        const T* kv = op.chunk.kv.template as<T>();
        return {kv + at.chunk_key(b, kv_head, first), kv + at.chunk_value(b, kv_head, first), at.kv_step()};
    }
    template <class Op> HOST_DEVICE static KeyRows of(const Op& op, int b, int kv_head) {
        return op.chunk ? of_chunk(op, b, kv_head, 0) : of_qkv(op, b, kv_head, 0);
    }
};

// The keys that a query sees: rows [first(query), end(query)) of the keys; none if the first one is not below the end.
// Neither decreases with the query, so the queries that see a key are contiguous too.
struct VisibleKeys {
    const int* first_key = nullptr;  // (seq_len), positions; or null
    int window = 0;                  // 0: no window
    int start = 0, distance = 0;     // of a chunk's keys: their first position, and from there to the first query
    int count = std::numeric_limits<int>::max();  // of a chunk's keys; without a chunk, the queries end with the keys

    VisibleKeys() = default;
    // The keys of qkv.
    template <class Op>
    HOST_DEVICE VisibleKeys(const Op& op, int b)
        : first_key(op.first_key ? op.first_key + size_t(b) * op.seq_len : nullptr), window(op.window) {}
    // The keys of the op's chunk, if it has one.
    template <class Op> HOST_DEVICE static VisibleKeys of(const Op& op, int b) {
        VisibleKeys visible(op, b);
        visible.start = op.chunk.start;
        visible.distance = op.chunk.distance;
        visible.count = op.seq_len;
        return visible;
    }

    // Positions in the whole sequence, which dropout depends on.
    HOST_DEVICE int query_position(int query) const { return start + distance + query; }
    HOST_DEVICE int key_position(int key) const { return start + key; }

    HOST_DEVICE int first(int query) const {
        const int row = query + distance;  // of a key at the query's position
        const int of_window = window > 0 && row >= window ? row - window + 1 : 0;
        const int of_document = first_key ? first_key[query] - start : 0;
        return of_window > of_document ? of_window : of_document;
    }
    HOST_DEVICE int end(int query) const {
        const int causal = query + distance + 1;
        return causal < count ? causal : count;
    }
    // The first query that may see the key.
    HOST_DEVICE int first_query(int key) const { return distance > 0 ? 0 : key; }
    // The first query in [first_query(key), end) that no longer sees the key, or `end`.
    HOST_DEVICE int end_of_queries(int key, int end) const {
        int seeing = distance > 0 ? -1 : key;
        while (seeing + 1 < end) {
            const int middle = seeing + (end - seeing) / 2;
            (first(middle) <= key ? seeing : end) = middle;
        }
        return end;
    }
};

template <class Op> void require_attention_sizes(const Op& op) {
    require(op.batch > 0 && op.seq_len > 0 && op.head_size > 0, "attention: batch %d, seq_len %d, head_size %d",
            op.batch, op.seq_len, op.head_size);
    require(op.n_kv_head > 0 && op.n_head > 0 && op.n_head % op.n_kv_head == 0,
            "attention: n_head %d is not a multiple of n_kv_head %d", op.n_head, op.n_kv_head);
    require(op.scale > 0, "attention: scale %g is not positive", double(op.scale));
    require(op.window >= 0 && op.softcap >= 0, "attention: window %d and softcap %g must not be negative", op.window,
            double(op.softcap));
}

// Checks the arguments of a chunk. `has_sums`: whether the op has the memory for sums over several chunks.
inline void require_chunk(const KeyChunk& chunk, int seq_len, bool has_sums) {
    if (!chunk) return;
    require(
        chunk.start >= 0 && chunk.start % 16 == 0 && chunk.distance % 16 == 0 &&
            (chunk.distance == 0 || chunk.distance >= seq_len),
        "attention: keys from %d, queries %d later; both must be multiples of 16, and the distance 0 or at least %d",
        chunk.start, chunk.distance, seq_len);
    require(has_sums || (chunk.is_first && chunk.is_last), "attention: no memory for the sums over several chunks");
}

// Check the arguments, for both backends. Fail with Exit::internal.
inline void require_valid(const AttentionForward& op) {
    require_attention_sizes(op);
    require_chunk(op.chunk, op.seq_len, op.running.out && op.running.max && op.running.sum);
}
inline void require_valid(const AttentionBackward& op) {
    require_attention_sizes(op);
    require_chunk(op.chunk, op.seq_len, op.dquery);
    require(!op.chunk || (op.dkv && !op.dqkv.amax), "attention_backward: a chunk without dkv, or with an amax");
    require(reinterpret_cast<uintptr_t>(op.scratch) % 64 == 0, "attention_backward: scratch %p is not 64-byte aligned",
            op.scratch);
}

}  // namespace ops

// The memory layout of attention heads, the same in every backend.
#pragma once

namespace ops {

// Element offsets into qkv and dqkv, out and dout, lse.
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
};

// The keys that a query sees: [first(query), query]. first() never decreases with the query, so the queries that see a
// key are contiguous too.
struct VisibleKeys {
    const int* first_key = nullptr;  // (seq_len), or null
    int window = 0;                  // 0: no window

    VisibleKeys() = default;
    template <class Op>
    HOST_DEVICE VisibleKeys(const Op& op, int b)
        : first_key(op.first_key ? op.first_key + size_t(b) * op.seq_len : nullptr), window(op.window) {}

    HOST_DEVICE int first(int query) const {
        const int of_window = window > 0 && query >= window ? query - window + 1 : 0;
        const int of_document = first_key ? first_key[query] : 0;
        return of_window > of_document ? of_window : of_document;
    }
    // The first query in [key, end) that no longer sees the key, or `end`.
    HOST_DEVICE int end_of_queries(int key, int end) const {
        int seeing = key;
        while (seeing + 1 < end) {
            const int middle = seeing + (end - seeing) / 2;
            (first(middle) <= key ? seeing : end) = middle;
        }
        return end;
    }
};

}  // namespace ops

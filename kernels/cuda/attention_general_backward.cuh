// attention_backward for any head size up to 256, any storage type and any alignment, in plain FP32.
//
// Two kernels like the tensor-core ones: over blocks of queries (dquery, and QueryStatistics into scratch), then over
// blocks of keys (dkey, dvalue), which reads them. Eight lanes work on one row.
#pragma once

#include "kernels/cuda/attention_general.cuh"

namespace ops {

template <int kMaxHeadSize> struct GeneralBackwardShared {
    typename GeneralTile<kMaxHeadSize>::Rows query, dout, key, value;
    typename GeneralTile<kMaxHeadSize>::Scores p, dscore;  // by the row that the lanes work on, then by the other
    QueryStatistics statistics[GeneralTile<kMaxHeadSize>::kRows];
};

// dscore before it is multiplied with scale.
struct ProbabilityGradient {
    float p, dscore;
};

__device__ inline ProbabilityGradient probability_gradient(float score, float dp, const QueryStatistics& query,
                                                           float scale_log2, bool seen) {
    const float p = seen ? exp2f(fmaf(score, scale_log2, -query.lse_log2)) : 0.0f;
    return {p, p * (dp - query.dout_out)};
}

template <class T, int kMaxHeadSize>
__global__ void __launch_bounds__(GeneralTile<kMaxHeadSize>::kThreads, 2)
    attention_backward_query_general_kernel(AttentionBackward op) {
    using Tile = GeneralTile<kMaxHeadSize>;
    auto& s = shared_memory<GeneralBackwardShared<kMaxHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, head, begin] = attention_task(Tile::kRows, LongestBlock::last);
    const auto [row, lane] = RowLane();
    const T* __restrict__ qkv = op.qkv.as<T>();
    const int kv_head = head / at.group();
    const float scale_log2 = op.scale * kLog2E;

    Tile::load_rows(s.query, qkv + at.query(b, head, begin), at.qkv_step(), at.seq_len - begin, at.head_size);
    Tile::load_rows(s.dout, op.dout.as<T>() + at.out(b, head, begin), at.out_step(), at.seq_len - begin, at.head_size);
    __syncwarp();  // a row is read by the lanes that loaded it
    QueryStatistics query = {0, 0};
    const bool exists = begin + row < at.seq_len;
    if (exists) {
        query.lse_log2 = op.lse[at.lse(b, head, begin + row)] * kLog2E;
        const T* out = op.out.as<T>() + at.out(b, head, begin + row);
        for (int column = lane; column < at.head_size; column += kRowLanes)
            query.dout_out += s.dout[row][column] * to_float(out[column]);
    }
    query.dout_out = sum_over_row_lanes(query.dout_out);
    if (exists && lane == 0) static_cast<QueryStatistics*>(op.scratch)[at.lse(b, head, begin + row)] = query;

    float dquery[Tile::kColumns] = {};
    for (int key_begin = 0; key_begin <= begin; key_begin += Tile::kRows) {
        __syncthreads();  // the tiles before are no longer read
        const int count = at.seq_len - key_begin;
        Tile::load_rows(s.key, qkv + at.key(b, kv_head, key_begin), at.qkv_step(), count, at.head_size);
        Tile::load_rows(s.value, qkv + at.value(b, kv_head, key_begin), at.qkv_step(), count, at.head_size);
        __syncthreads();

        float scores[Tile::kScores], dp[Tile::kScores];
        Tile::dot_products(scores, s.query, s.key, at.head_size);
        Tile::dot_products(dp, s.dout, s.value, at.head_size);
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const int key = lane + kRowLanes * i;
            const bool seen = key_begin + key <= begin + row;
            dp[i] *= dropout_factor(op.dropout, b, head, begin + row, key_begin + key);
            s.dscore[row][key] = probability_gradient(scores[i], dp[i], query, scale_log2, seen).dscore;
        }
        __syncwarp();  // the other lanes of the row read dscore
        Tile::add_weighted_rows(dquery, s.dscore, s.key, at.head_size);
    }
    if (exists) store_row(op.dqkv.as<T>() + at.query(b, head, begin + row), dquery, op.scale, at.head_size);
}

template <class T, int kMaxHeadSize>
__global__ void __launch_bounds__(GeneralTile<kMaxHeadSize>::kThreads, 2)
    attention_backward_key_general_kernel(AttentionBackward op) {
    using Tile = GeneralTile<kMaxHeadSize>;
    auto& s = shared_memory<GeneralBackwardShared<kMaxHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(Tile::kRows, LongestBlock::first);
    const auto [row, lane] = RowLane();
    const T* __restrict__ qkv = op.qkv.as<T>();
    const T* __restrict__ dout = op.dout.as<T>();
    const float scale_log2 = op.scale * kLog2E;

    const int n_keys = at.seq_len - begin;
    Tile::load_rows(s.key, qkv + at.key(b, kv_head, begin), at.qkv_step(), n_keys, at.head_size);
    Tile::load_rows(s.value, qkv + at.value(b, kv_head, begin), at.qkv_step(), n_keys, at.head_size);
    float dkey[Tile::kColumns] = {}, dvalue[Tile::kColumns] = {};
    for (int head = kv_head * at.group(); head < (kv_head + 1) * at.group(); head++)
        for (int query_begin = begin; query_begin < at.seq_len; query_begin += Tile::kRows) {
            __syncthreads();  // the tiles before are no longer read
            const int count = at.seq_len - query_begin;
            Tile::load_rows(s.query, qkv + at.query(b, head, query_begin), at.qkv_step(), count, at.head_size);
            Tile::load_rows(s.dout, dout + at.out(b, head, query_begin), at.out_step(), count, at.head_size);
            if (lane == 0)
                s.statistics[row] =
                    row < count ? static_cast<const QueryStatistics*>(op.scratch)[at.lse(b, head, query_begin + row)]
                                : QueryStatistics{0, 0};
            __syncthreads();

            float scores[Tile::kScores], dp[Tile::kScores];
            Tile::dot_products(scores, s.key, s.query, at.head_size);
            Tile::dot_products(dp, s.value, s.dout, at.head_size);
#pragma unroll
            for (int i = 0; i < Tile::kScores; i++) {
                const int query = lane + kRowLanes * i;
                const bool seen = begin + row <= query_begin + query;
                const float factor = dropout_factor(op.dropout, b, head, query_begin + query, begin + row);
                const auto gradient =
                    probability_gradient(scores[i], dp[i] * factor, s.statistics[query], scale_log2, seen);
                s.p[row][query] = gradient.p * factor;
                s.dscore[row][query] = gradient.dscore;
            }
            __syncwarp();  // the other lanes of the row read both
            Tile::add_weighted_rows(dvalue, s.p, s.dout, at.head_size);
            Tile::add_weighted_rows(dkey, s.dscore, s.query, at.head_size);
        }
    if (row >= n_keys) return;
    store_row(op.dqkv.as<T>() + at.key(b, kv_head, begin + row), dkey, op.scale, at.head_size);
    store_row(op.dqkv.as<T>() + at.value(b, kv_head, begin + row), dvalue, 1.0f, at.head_size);
}

template <class T> void attention_backward_general(const AttentionBackward& op, Stream stream) {
    for_head_size(op.head_size, [&]<int kMaxHeadSize>() {
        using Tile = GeneralTile<kMaxHeadSize>;
        auto start = [&](auto kernel, const char* name, int heads) {
            launch(kernel,
                   {name, attention_grid(op, heads, Tile::kRows), Tile::kThreads,
                    sizeof(GeneralBackwardShared<kMaxHeadSize>)},
                   stream, op);
        };
        start(attention_backward_query_general_kernel<T, kMaxHeadSize>, "attention_backward_query", op.n_head);
        start(attention_backward_key_general_kernel<T, kMaxHeadSize>, "attention_backward_key", op.n_kv_head);
    });
}

}  // namespace ops

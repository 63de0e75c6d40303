// attention_backward for any head size up to 256, any storage type and any alignment, in plain FP32.
//
// Two kernels, like the tensor-core ones. The first processes blocks of queries: dquery, and QueryStatistics to
// scratch. The second reads them and processes blocks of keys: dkey and dvalue. Eight lanes process one row.
#pragma once

#include "kernels/cuda/attention/attention_general.cuh"
#include "kernels/cuda/attention/attention_layout.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/device.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/attention_layout.h"

namespace ops {

template <int kMaxHeadSize> struct GeneralBackwardShared {
    typename GeneralTile<kMaxHeadSize>::Rows query, dout, key, value;
    typename GeneralTile<kMaxHeadSize>::Scores p, dscore;  // indexed by the lanes' row, then by the other row
    QueryStatistics statistics[GeneralTile<kMaxHeadSize>::kRows];
};

// dscore before the multiplication by scale.
struct ProbabilityGradient {
    float p, dscore;
};

__device__ inline ProbabilityGradient probability_gradient(float product, float dp, const QueryStatistics& query,
                                                           const AttentionBackward& op, bool seen) {
    if (!seen) return {0, 0};
    if (!(op.softcap > 0)) {
        const float p = exp2f(fmaf(product, op.scale * kLog2E, -query.lse_log2));
        return {p, p * (dp - query.dout_out)};
    }
    const CappedScore capped = capped_score(product * op.scale, op.softcap);
    const float p = exp2f(fmaf(capped.score, kLog2E, -query.lse_log2));
    return {p, p * (dp - query.dout_out) * capped.derivative};
}

template <class T, int kMaxHeadSize>
__global__ void __launch_bounds__(GeneralTile<kMaxHeadSize>::kThreads, 2)
    attention_backward_query_general_kernel(AttentionBackward op) {
    using Tile = GeneralTile<kMaxHeadSize>;
    auto& s = shared_memory<GeneralBackwardShared<kMaxHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(Tile::kRows, LongestBlock::last);
    const auto [row, lane] = RowLane();
    const T* __restrict__ qkv = op.qkv.as<T>();
    const QueryRows<1, true> rows(at, kv_head, begin);
    const VisibleKeys visible = VisibleKeys::of(op, b);
    const KeyRows<T> keys = KeyRows<T>::of(op, b, kv_head);
    const int head = rows.head(row), position = rows.position(row);
    const bool exists = position < at.seq_len;
    const int first_key = visible.first(min(position, at.seq_len - 1)), key_end = visible.end(position);
    const int last_end = visible.end(rows.position(Tile::kRows - 1));

    Tile::load_row(s.query, qkv + at.query(b, head, position), exists, at.head_size);
    Tile::load_row(s.dout, op.dout.as<T>() + at.out(b, head, position), exists, at.head_size);
    __syncwarp();  // the lanes that loaded a row read it
    QueryStatistics query = {0, 0};
    if (exists) {
        query.lse_log2 = op.lse[at.lse(b, head, position)] * kLog2E;
        const T* out = op.out.as<T>() + at.out(b, head, position);
        for (int column = lane; column < at.head_size; column += kRowLanes)
            query.dout_out += s.dout[row][column] * to_float(out[column]);
    }
    query.dout_out = lanes_reduce<kRowLanes>(query.dout_out, Sum());
    if (exists && lane == 0) static_cast<QueryStatistics*>(op.scratch)[at.lse(b, head, position)] = query;

    float dquery[Tile::kColumns] = {};
    if (op.chunk && !op.chunk.is_first && exists)
        load_sums(dquery, op.dquery + at.out(b, head, position), at.head_size);
    for (int key_begin = first_tile_begin<Tile::kRows>(rows, visible); key_begin < last_end; key_begin += Tile::kRows) {
        __syncthreads();  // the previous tiles have been read
        const int count = at.seq_len - key_begin;
        Tile::load_rows(s.key, keys.keys + key_begin * keys.step, keys.step, count, at.head_size);
        Tile::load_rows(s.value, keys.values + key_begin * keys.step, keys.step, count, at.head_size);
        __syncthreads();

        float scores[Tile::kScores], dp[Tile::kScores];
        Tile::dot_products(scores, s.query, s.key, at.head_size);
        Tile::dot_products(dp, s.dout, s.value, at.head_size);
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const int column = lane + kRowLanes * i, key = key_begin + column;
            const bool seen = first_key <= key && key < key_end;
            dp[i] *= dropout_factor(op.dropout, b, head, visible, position, key);
            s.dscore[row][column] = probability_gradient(scores[i], dp[i], query, op, seen).dscore;
        }
        __syncwarp();  // the other lanes of the row read dscore
        Tile::add_weighted_rows(dquery, s.dscore, s.key, at.head_size);
    }
    if (!exists) return;
    if (op.chunk && !op.chunk.is_last)
        store_row(op.dquery + at.out(b, head, position), dquery, 1.0f, at.head_size);
    else
        store_row(op.dqkv.as<T>() + at.query(b, head, position), dquery, op.scale, at.head_size);
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
    const VisibleKeys visible = VisibleKeys::of(op, b);
    const KeyRows<T> keys = KeyRows<T>::of(op, b, kv_head);
    const int query_end = visible.end_of_queries(min(begin + Tile::kRows, at.seq_len) - 1, at.seq_len);

    const int n_keys = at.seq_len - begin;
    Tile::load_rows(s.key, keys.keys + begin * keys.step, keys.step, n_keys, at.head_size);
    Tile::load_rows(s.value, keys.values + begin * keys.step, keys.step, n_keys, at.head_size);
    float dkey[Tile::kColumns] = {}, dvalue[Tile::kColumns] = {};
    for (int head = kv_head * at.group(); head < (kv_head + 1) * at.group(); head++)
        for (int query_begin = visible.first_query(begin); query_begin < query_end; query_begin += Tile::kRows) {
            __syncthreads();  // the previous tiles have been read
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
                const int column = lane + kRowLanes * i, query = query_begin + column, key = begin + row;
                const bool seen = key < visible.end(query) && visible.first(min(query, at.seq_len - 1)) <= key;
                const float factor = dropout_factor(op.dropout, b, head, visible, query, key);
                const auto gradient = probability_gradient(scores[i], dp[i] * factor, s.statistics[column], op, seen);
                s.p[row][column] = gradient.p * factor;
                s.dscore[row][column] = gradient.dscore;
            }
            __syncwarp();  // the other lanes of the row read both
            Tile::add_weighted_rows(dvalue, s.p, s.dout, at.head_size);
            Tile::add_weighted_rows(dkey, s.dscore, s.query, at.head_size);
        }
    if (row >= n_keys) return;
    if (op.chunk) {
        float* to = op.dkv + at.chunk_key(b, kv_head, begin + row);
        add_row(to, dkey, op.scale, op.accumulate_dkv, at.head_size);
        add_row(to + op.n_kv_head * op.head_size, dvalue, 1.0f, op.accumulate_dkv, at.head_size);
        return;
    }
    store_row(op.dqkv.as<T>() + at.key(b, kv_head, begin + row), dkey, op.scale, at.head_size);
    store_row(op.dqkv.as<T>() + at.value(b, kv_head, begin + row), dvalue, 1.0f, at.head_size);
}

template <class T> void attention_backward_general(const AttentionBackward& op, Stream stream) {
    for_head_size(op.head_size, [&]<int kMaxHeadSize>() {
        using Tile = GeneralTile<kMaxHeadSize>;
        auto start = [&](auto kernel, const char* name, int rows) {
            launch(kernel,
                   {name, attention_grid(op, rows, Tile::kRows), Tile::kThreads,
                    sizeof(GeneralBackwardShared<kMaxHeadSize>)},
                   stream, op);
        };
        const int query_rows = QueryRows<1, true>::count(AttentionLayout(op));
        start(attention_backward_query_general_kernel<T, kMaxHeadSize>, "attention_backward_query", query_rows);
        start(attention_backward_key_general_kernel<T, kMaxHeadSize>, "attention_backward_key", op.seq_len);
    });
    set_amax(op.dqkv, size_t(op.batch) * op.seq_len * AttentionLayout(op).qkv_step(), stream);
}

}  // namespace ops

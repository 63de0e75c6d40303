// attention_forward for any head size up to 256, any storage type and any alignment, in plain FP32.
//
// Grid: kRows queries of one head a block, eight lanes a query; kRows keys and values at a time in shared memory.
#pragma once

#include "kernels/cuda/attention_general.cuh"

namespace ops {

template <int kMaxHeadSize> struct GeneralForwardShared {
    typename GeneralTile<kMaxHeadSize>::Rows query, key, value;
    typename GeneralTile<kMaxHeadSize>::Scores p;
};

template <class T, int kMaxHeadSize>
__global__ void __launch_bounds__(GeneralTile<kMaxHeadSize>::kThreads, 2)
    attention_forward_general_kernel(AttentionForward op) {
    using Tile = GeneralTile<kMaxHeadSize>;
    auto& s = shared_memory<GeneralForwardShared<kMaxHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, head, begin] = attention_task(Tile::kRows, LongestBlock::last);
    const auto [row, lane] = RowLane();
    const T* __restrict__ qkv = op.qkv.as<T>();
    const int kv_head = head / at.group();

    Tile::load_rows(s.query, qkv + at.query(b, head, begin), at.qkv_step(), at.seq_len - begin, at.head_size);
    float out[Tile::kColumns] = {};
    float largest = std::numeric_limits<float>::lowest(), sum = 0;  // of scaled scores; the sum is this lane's part
    for (int key_begin = 0; key_begin <= begin; key_begin += Tile::kRows) {
        __syncthreads();  // the tiles before are no longer read
        const int count = at.seq_len - key_begin;
        Tile::load_rows(s.key, qkv + at.key(b, kv_head, key_begin), at.qkv_step(), count, at.head_size);
        Tile::load_rows(s.value, qkv + at.value(b, kv_head, key_begin), at.qkv_step(), count, at.head_size);
        __syncthreads();

        float scores[Tile::kScores];
        Tile::dot_products(scores, s.query, s.key, at.head_size);
        const float before = largest;
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const bool seen = key_begin + lane + kRowLanes * i <= begin + row;
            scores[i] = seen ? scores[i] * op.scale : -std::numeric_limits<float>::infinity();
            largest = fmaxf(largest, scores[i]);
        }
        largest = max_over_row_lanes(largest);
        const float rescale = expf(before - largest);
        sum *= rescale;
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const float p = expf(scores[i] - largest);
            const int key = lane + kRowLanes * i;
            s.p[row][key] = p * dropout_factor(op.dropout, b, head, begin + row, key_begin + key);
            sum += p;
        }
        __syncwarp();  // the other lanes of the row read p
#pragma unroll
        for (int i = 0; i < Tile::kColumns; i++) out[i] *= rescale;
        Tile::add_weighted_rows(out, s.p, s.value, at.head_size);
    }
    sum = sum_over_row_lanes(sum);
    if (begin + row >= at.seq_len) return;
    store_row(op.out.as<T>() + at.out(b, head, begin + row), out, 1.0f / sum, at.head_size);
    if (lane == 0) op.lse[at.lse(b, head, begin + row)] = largest + logf(sum);
}

template <class T> void attention_forward_general(const AttentionForward& op, Stream stream) {
    for_head_size(op.head_size, [&]<int kMaxHeadSize>() {
        launch(attention_forward_general_kernel<T, kMaxHeadSize>,
               {"attention_forward", attention_grid(op, op.n_head, GeneralTile<kMaxHeadSize>::kRows),
                GeneralTile<kMaxHeadSize>::kThreads, sizeof(GeneralForwardShared<kMaxHeadSize>)},
               stream, op);
    });
}

}  // namespace ops

// attention_forward for any head size up to 256, any storage type and any alignment, in plain FP32.
//
// Grid: a block has kRows pairs of a position and a head of the group, with eight lanes per pair. Shared memory holds
// kRows keys and values at a time.
#pragma once

#include "kernels/cuda/attention/attention_general.cuh"
#include "kernels/cuda/attention/attention_layout.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/attention_layout.h"

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
    const auto [b, kv_head, begin] = attention_task(Tile::kRows, LongestBlock::last);
    const auto [row, lane] = RowLane();
    const T* __restrict__ qkv = op.qkv.as<T>();
    const KeyRows<T> keys = KeyRows<T>::of(op, b, kv_head);
    const QueryRows<1, true> rows(at, kv_head, begin);
    const VisibleKeys visible = VisibleKeys::of(op, b);
    const int head = rows.head(row), position = rows.position(row);
    const bool exists = position < at.seq_len;
    const int first_key = visible.first(min(position, at.seq_len - 1)), key_end = visible.end(position);
    const int last_end = visible.end(rows.position(Tile::kRows - 1));

    Tile::load_row(s.query, qkv + at.query(b, head, position), exists, at.head_size);
    float out[Tile::kColumns] = {};
    float largest = std::numeric_limits<float>::lowest(), sum = 0;  // of scaled scores; `sum` is this lane's part
    const size_t row_of_out = at.out(b, head, position), row_of_lse = at.lse(b, head, position);
    if (op.chunk && !op.chunk.is_first && exists) {
        load_sums(out, op.running.out + row_of_out, at.head_size);
        largest = op.running.max[row_of_lse];
        sum = lane == 0 ? op.running.sum[row_of_lse] : 0.0f;
    }
    for (int key_begin = first_tile_begin<Tile::kRows>(rows, visible); key_begin < last_end; key_begin += Tile::kRows) {
        __syncthreads();  // the previous tiles have been read
        const int count = at.seq_len - key_begin;
        Tile::load_rows(s.key, keys.keys + key_begin * keys.step, keys.step, count, at.head_size);
        Tile::load_rows(s.value, keys.values + key_begin * keys.step, keys.step, count, at.head_size);
        __syncthreads();

        float scores[Tile::kScores];
        Tile::dot_products(scores, s.query, s.key, at.head_size);
        const float before = largest;
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const int key = key_begin + lane + kRowLanes * i;
            const bool seen = first_key <= key && key < key_end;
            const float score = capped_score(scores[i] * op.scale, op.softcap).score;
            scores[i] = seen ? score : -std::numeric_limits<float>::infinity();
            largest = fmaxf(largest, scores[i]);
        }
        largest = lanes_reduce<kRowLanes>(largest, Max());
        const float rescale = expf(before - largest);
        sum *= rescale;
#pragma unroll
        for (int i = 0; i < Tile::kScores; i++) {
            const float p = expf(scores[i] - largest);
            const int key = lane + kRowLanes * i;
            s.p[row][key] = p * dropout_factor(op.dropout, b, head, visible, position, key_begin + key);
            sum += p;
        }
        __syncwarp();  // the other lanes of the row read p
#pragma unroll
        for (int i = 0; i < Tile::kColumns; i++) out[i] *= rescale;
        Tile::add_weighted_rows(out, s.p, s.value, at.head_size);
    }
    sum = lanes_reduce<kRowLanes>(sum, Sum());
    __syncwarp();  // all lanes of the row have read the running maximum
    if (!exists) return;
    if (op.chunk && !op.chunk.is_last) {
        store_row(op.running.out + row_of_out, out, 1.0f, at.head_size);
        if (lane == 0) op.running.max[row_of_lse] = largest, op.running.sum[row_of_lse] = sum;
        return;
    }
    store_row(op.out.as<T>() + row_of_out, out, 1.0f / sum, at.head_size);
    if (lane == 0) op.lse[row_of_lse] = largest + logf(sum);
}

template <class T> void attention_forward_general(const AttentionForward& op, Stream stream) {
    for_head_size(op.head_size, [&]<int kMaxHeadSize>() {
        const int rows = QueryRows<1, true>::count(AttentionLayout(op));
        launch(attention_forward_general_kernel<T, kMaxHeadSize>,
               {"attention_forward", attention_grid(op, rows, GeneralTile<kMaxHeadSize>::kRows),
                GeneralTile<kMaxHeadSize>::kThreads, sizeof(GeneralForwardShared<kMaxHeadSize>)},
               stream, op);
    });
    set_amax(op.out, size_t(op.batch) * op.seq_len * op.n_head * op.head_size, stream);
}

}  // namespace ops

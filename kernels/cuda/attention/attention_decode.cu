// Attention of one query per sequence with a KV cache.
//
// Grid (query heads, rows): one block per query of a head. A warp processes every kWarps-th key; its lanes hold the
// columns lane + 32 i of the query, the key and the sum of values. It loads kKeysAtOnce keys and their values before it
// uses the first, so that the loads overlap. Each warp has an online softmax, and the block adds the warps' sums in
// order. The queries of a group read the same keys, all but the first from the L2 cache.
// Bytes: the visible keys and values, 4 head_size per key and key-value head in 16 bits. FLOPs: 4 head_size per key and
// query head, so the op is memory-bound. Numerics: all arithmetic is float; the order of sums depends only on the
// position. The block of a group's first head writes the row's key and value to the cache; all blocks read them from
// qkv, so that no block waits for another.
#include "kernels/cuda/attention/attention_layout.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = kDecodeWarps * kWarpSize;
constexpr int kKeysAtOnce = 4;  // per warp
// 0: the compiler chooses. For heads of 256 columns, its choice spills registers on compute capability 10.0 and 12.0.
template <int kMaxHeadSize> constexpr int kMinDecodeBlocks = kMaxHeadSize > 128 ? 1 : 0;

template <int kMaxHeadSize> struct DecodeShared {
    float largest[kDecodeWarps], sum[kDecodeWarps];
    float out[kDecodeWarps][kMaxHeadSize];
};

// The columns of a head in one lane.
template <int kMaxHeadSize> struct LaneColumns {
    static constexpr int kCount = kMaxHeadSize / kWarpSize;
    float value[kCount];

    template <class T> __device__ void load(const T* __restrict__ from, int head_size) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int column = int(threadIdx.x) % kWarpSize + kWarpSize * i;
            value[i] = column < head_size ? to_float(from[column]) : 0.0f;
        }
    }
};

template <class T, int kMaxHeadSize>
__global__ void __launch_bounds__(kDecodeThreads, kMinDecodeBlocks<kMaxHeadSize>)
    attention_decode_kernel(AttentionDecode op) {
    using Columns = LaneColumns<kMaxHeadSize>;
    auto& s = shared_memory<DecodeShared<kMaxHeadSize>>();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int head = blockIdx.x, row = blockIdx.y, size = op.head_size, group = op.n_head / op.n_kv_head;
    const int kv_head = head / group;
    const size_t queries = size_t(op.n_head) * size, step = 2 * size_t(op.n_kv_head) * size;
    const size_t key_begin = size_t(kv_head) * size, value_begin = key_begin + step / 2;
    const AttentionDecode::Place place = op.places[row];
    const T* __restrict__ heads = op.qkv.as<T>() + row * (queries + step);
    const T* __restrict__ own = heads + queries;
    T* sequence = op.cache.as<T>() + size_t(place.sequence) * op.capacity * step;
    if (head % group == 0)
        for (int c = threadIdx.x; c < size; c += kDecodeThreads) {
            sequence[place.position * step + key_begin + c] = own[key_begin + c];
            sequence[place.position * step + value_begin + c] = own[value_begin + c];
        }

    Columns query, out{};
    query.load(heads + size_t(head) * size, size);
    float largest = std::numeric_limits<float>::lowest(), sum = 0;
    const int first = op.window > 0 ? max(place.first_key, place.position + 1 - op.window) : place.first_key;
    for (int begin = first + warp; begin <= place.position; begin += kKeysAtOnce * kDecodeWarps) {
        Columns keys[kKeysAtOnce], values[kKeysAtOnce];
#pragma unroll
        for (int j = 0; j < kKeysAtOnce; j++) {
            const int key = min(begin + j * kDecodeWarps, place.position);
            const T* from = key == place.position ? own : sequence + key * step;
            keys[j].load(from + key_begin, size);
            values[j].load(from + value_begin, size);
        }
#pragma unroll
        for (int j = 0; j < kKeysAtOnce; j++) {
            if (begin + j * kDecodeWarps > place.position) break;
            float product = 0;
#pragma unroll
            for (int i = 0; i < Columns::kCount; i++) product = fmaf(query.value[i], keys[j].value[i], product);
            float score = warp_sum(product) * op.scale;
            if (op.softcap > 0) score = op.softcap * tanhf(score / op.softcap);
            const float before = largest;
            largest = fmaxf(largest, score);
            const float rescale = expf(before - largest), p = expf(score - largest);
            sum = sum * rescale + p;
#pragma unroll
            for (int i = 0; i < Columns::kCount; i++)
                out.value[i] = fmaf(p, values[j].value[i], out.value[i] * rescale);
        }
    }
    if (lane == 0) s.largest[warp] = largest, s.sum[warp] = sum;
#pragma unroll
    for (int i = 0; i < Columns::kCount; i++) s.out[warp][lane + kWarpSize * i] = out.value[i];
    __syncthreads();  // every warp reads the sums of all warps

    // A warp without a key has the lowest maximum and sums of 0.
    float total = 0;
    for (int w = 0; w < kDecodeWarps; w++) largest = fmaxf(largest, s.largest[w]);
    for (int w = 0; w < kDecodeWarps; w++) total += s.sum[w] * expf(s.largest[w] - largest);
    T* __restrict__ to = op.out.as<T>() + (size_t(row) * op.n_head + head) * size;
    for (int c = threadIdx.x; c < size; c += kDecodeThreads) {
        float column = 0;
        for (int w = 0; w < kDecodeWarps; w++) column = fmaf(s.out[w][c], expf(s.largest[w] - largest), column);
        to[c] = from_float<T>(column / total);
    }
}

}  // namespace

void attention_decode(const AttentionDecode& op, Stream stream) {
    constexpr int kMaxGrid = 65535;
    require(op.n_kv_head > 0 && op.n_head % op.n_kv_head == 0,
            "attention_decode: n_head %d is not a multiple of n_kv_head %d", op.n_head, op.n_kv_head);
    require(op.head_size <= 256 && op.rows <= kMaxGrid,
            "attention_decode: head_size is %d, at most 256; rows is %d, at most %d", op.head_size, op.rows, kMaxGrid);
    dispatch("attention_decode", {op.out, op.cache, op.qkv}, [&]<class T>() {
        auto start = [&]<int kMaxHeadSize>() {
            launch(attention_decode_kernel<T, kMaxHeadSize>,
                   {"attention_decode", dim3(unsigned(op.n_head), unsigned(op.rows)), kDecodeThreads,
                    sizeof(DecodeShared<kMaxHeadSize>)},
                   stream, op);
        };
        for_head_size(op.head_size, start);
    });
}

}  // namespace ops

// Attention of one query per sequence with a KV cache.
//
// Grid (query heads, rows, parts): a block processes a part of kPartKeys keys for a query of a head; blocks without a
// visible key return at once. With 12 heads and 1,000 keys, one sequence occupies 96 multiprocessors instead of 12. A
// warp processes every kWarps-th key of the part; its lanes hold the columns lane + 32 i of the query, the key and the
// sum of values. It loads kKeysAtOnce keys and their values before it uses the first, so that the loads overlap. Each
// warp has an online softmax, and the block adds the warps' sums in order. If the cache has several parts, the sums go
// to scratch, and combine_parts_kernel, grid (query heads, rows), adds a query's sums in order. The queries of a
// group read the same keys, all but the first from the L2 cache. Bytes: the visible keys and values, 4 head_size per
// key and key-value head in 16 bits, and for each part and query head 8 head_size for its sums. FLOPs: 4 head_size per
// key and query head, so the op is memory-bound. Numerics: all arithmetic is float; the order of sums depends only on
// the position and the first visible key. The block of a group's first head and the last part writes the row's key and
// value to the cache; all blocks read them from qkv, so that no block waits for another.
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
constexpr int kPartKeys = 128;  // four rounds of every warp
// 0: the compiler chooses. For heads of 256 columns, its choice spills registers on compute capability 10.0 and 12.0.
template <int kMaxHeadSize> constexpr int kMinDecodeBlocks = kMaxHeadSize > 128 ? 1 : 0;

template <int kMaxHeadSize> struct DecodeShared {
    float largest[kDecodeWarps], sum[kDecodeWarps];
    float out[kDecodeWarps][kMaxHeadSize];
};

__host__ __device__ constexpr int parts_of(int keys) { return (keys + kPartKeys - 1) / kPartKeys; }

// The sums of one part of a query's keys, in scratch: (rows, n_head, parts, 2 + head_size).
struct PartSums {
    float *softmax, *out;  // {maximum, sum of exponentials}; the values' sum

    __device__ PartSums(const AttentionDecode& op, int row, int head, int part) {
        const size_t index = (size_t(row) * op.n_head + head) * parts_of(op.capacity) + part;
        softmax = static_cast<float*>(op.scratch) + index * (2 + op.head_size);
        out = softmax + 2;
    }
};

// The visible keys of a row: [first, position].
__device__ int first_key(const AttentionDecode& op, const AttentionDecode::Place& place) {
    return op.window > 0 ? max(place.first_key, place.position + 1 - op.window) : place.first_key;
}

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
    const int head = blockIdx.x, row = blockIdx.y, part = blockIdx.z, size = op.head_size;
    const int group = op.n_head / op.n_kv_head, kv_head = head / group;
    const size_t queries = size_t(op.n_head) * size, step = 2 * size_t(op.n_kv_head) * size;
    const size_t key_begin = size_t(kv_head) * size, value_begin = key_begin + step / 2;
    const AttentionDecode::Place place = op.places[row];
    const int first = max(first_key(op, place), part * kPartKeys),
              end = min(place.position + 1, (part + 1) * kPartKeys);
    if (first >= end) return;
    const T* __restrict__ heads = op.qkv.as<T>() + row * (queries + step);
    const T* __restrict__ own = heads + queries;
    T* sequence = op.cache.as<T>() + size_t(place.sequence) * op.capacity * step;
    if (head % group == 0 && end == place.position + 1)
        for (int c = threadIdx.x; c < size; c += kDecodeThreads) {
            sequence[place.position * step + key_begin + c] = own[key_begin + c];
            sequence[place.position * step + value_begin + c] = own[value_begin + c];
        }

    Columns query, out{};
    query.load(heads + size_t(head) * size, size);
    float largest = std::numeric_limits<float>::lowest(), sum = 0;
    for (int begin = first + warp; begin < end; begin += kKeysAtOnce * kDecodeWarps) {
        Columns keys[kKeysAtOnce], values[kKeysAtOnce];
#pragma unroll
        for (int j = 0; j < kKeysAtOnce; j++) {
            const int key = min(begin + j * kDecodeWarps, end - 1);
            const T* from = key == place.position ? own : sequence + key * step;
            keys[j].load(from + key_begin, size);
            values[j].load(from + value_begin, size);
        }
#pragma unroll
        for (int j = 0; j < kKeysAtOnce; j++) {
            if (begin + j * kDecodeWarps >= end) break;
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
    const bool is_whole = gridDim.z == 1;
    T* __restrict__ to = op.out.as<T>() + (size_t(row) * op.n_head + head) * size;
    for (int c = threadIdx.x; c < size; c += kDecodeThreads) {
        float column = 0;
        for (int w = 0; w < kDecodeWarps; w++) column = fmaf(s.out[w][c], expf(s.largest[w] - largest), column);
        if (is_whole)
            to[c] = from_float<T>(column / total);
        else
            PartSums(op, row, head, part).out[c] = column;
    }
    if (is_whole || threadIdx.x != 0) return;
    float* const softmax = PartSums(op, row, head, part).softmax;
    softmax[0] = largest, softmax[1] = total;
}

constexpr int kCombineThreads = 128;

// A thread combines the parts of every kCombineThreads-th column.
template <class T> __global__ void __launch_bounds__(kCombineThreads) combine_parts_kernel(AttentionDecode op) {
    const int head = blockIdx.x, row = blockIdx.y, size = op.head_size;
    const AttentionDecode::Place place = op.places[row];
    const int first = first_key(op, place) / kPartKeys, end = parts_of(place.position + 1);
    float largest = std::numeric_limits<float>::lowest();
    for (int part = first; part < end; part++) largest = fmaxf(largest, PartSums(op, row, head, part).softmax[0]);
    T* __restrict__ to = op.out.as<T>() + (size_t(row) * op.n_head + head) * size;
    for (int c = threadIdx.x; c < size; c += kCombineThreads) {
        float total = 0, column = 0;
        for (int part = first; part < end; part++) {
            const PartSums sums(op, row, head, part);
            const float factor = expf(sums.softmax[0] - largest);
            total = fmaf(sums.softmax[1], factor, total);
            column = fmaf(sums.out[c], factor, column);
        }
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
    require(parts_of(op.capacity) <= kMaxGrid, "attention_decode: capacity is %d, at most %d", op.capacity,
            kMaxGrid * kPartKeys);
    const unsigned heads = unsigned(op.n_head), rows = unsigned(op.rows), parts = unsigned(parts_of(op.capacity));
    dispatch("attention_decode", {op.out, op.cache, op.qkv}, [&]<class T>() {
        auto start = [&]<int kMaxHeadSize>() {
            launch(attention_decode_kernel<T, kMaxHeadSize>,
                   {"attention_decode", dim3(heads, rows, parts), kDecodeThreads, sizeof(DecodeShared<kMaxHeadSize>)},
                   stream, op);
        };
        for_head_size(op.head_size, start);
        if (parts > 1)
            launch(combine_parts_kernel<T>, {"attention_decode", dim3(heads, rows), kCombineThreads}, stream, op);
    });
}

size_t attention_decode_scratch_bytes(const AttentionDecode& op) {
    const size_t parts = size_t(parts_of(op.capacity)), queries = size_t(op.rows) * size_t(op.n_head);
    return parts > 1 ? queries * parts * size_t(2 + op.head_size) * sizeof(float) : 0;
}

}  // namespace ops

// attention_forward: out = softmax(scale Q K^T, causal) V with the online softmax (FlashAttention-2, algorithm 1).
//
// Grid: 128 queries of one head a block. Four warps, 32 queries each, whose output stays in registers; 64 keys and
// values (heads of 128: 32) at a time pass through two stages of shared memory (cp.async). Tiles right of the diagonal
// are never loaded, a warp skips those that lie right of its own rows, only tiles on the diagonal are masked. Bytes:
// qkv once from memory (a head's keys again from the L2 cache), out and lse once. FLOPs: 2 batch n_head head_size
// seq_len^2. Expected of an H200, not measured: 250 TFLOP/s at 1024 positions and heads of 64, where mma.sync peaks at
// about 620 and cuDNN reaches 290. 32 rows a warp, so that a B fragment read from shared memory (128 bytes a product,
// 256 with 16 rows) does not limit. Numerics: scores, maxima, sums and out are float; exp(score - max), at most 1, is
// rounded to T before it multiplies the values; lse comes from the unrounded ones. Other head sizes, float and
// unaligned memory: attention_general_forward.cuh.
#include "kernels/cuda/attention_general_forward.cuh"
#include "kernels/cuda/attention_layout.cuh"
#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/dispatch.h"

namespace ops {

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kM = 2;  // sixteens of queries of a warp
constexpr int kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
constexpr int kBlocksPerMultiprocessor = 2;

// Keys of a tile. With 64 the scores of heads of 128 would spill beside 128 registers of out.
template <int kHeadSize> inline constexpr int kKeysOf = kHeadSize == 64 ? 64 : 32;

// 48 KiB for heads of 64, 64 KiB for heads of 128.
template <class T, int kHeadSize> struct Shared {
    static constexpr int kKeys = kKeysOf<kHeadSize>;
    alignas(256) T query[kQueries][kHeadSize];  // in the end out
    T key[2][kKeys][kHeadSize];
    T value[2][kKeys][kHeadSize];
};

// The running softmax of the rows of a warp, in units of scores before scaling. A lane has rows 16 m + 8 half + g; the
// four lanes of a row hold the same maximum, but each its own part of the sum.
struct OnlineSoftmax {
    float max[kM][2], sum[kM][2];

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) max[m][half] = std::numeric_limits<float>::lowest(), sum[m][half] = 0;
    }
};

__device__ __forceinline__ float max_over_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum_over_row(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Scores of keys after the query become -infinity; `distance` is the first query's place minus the first key's.
template <int kKeys> __device__ __forceinline__ void mask_future(float (&scores)[kM][kKeys / 8][4], int distance) {
    for_each_element<kM, kKeys / 8>([&](int m, int n, int i, int query, int key) {
        if (key > query + distance) scores[m][n][i] = -std::numeric_limits<float>::infinity();
    });
}

// Adds a tile of scores to maxima and sums and replaces it with exp(scale (score - max)); what was summed into out with
// the maximum before is rescaled. Key 0 comes first and every query sees it, so the maximum is always finite.
template <int kHeadSize, int kKeys>
__device__ __forceinline__ void add_to_softmax(OnlineSoftmax& softmax, float (&out)[kM][kHeadSize / 8][4],
                                               float (&scores)[kM][kKeys / 8][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = softmax.max[m][half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++)
                largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            largest = max_over_row(largest);
            const float rescale = ptx::exp2_approx((softmax.max[m][half] - largest) * scale_log2);
            const float shift = largest * scale_log2;
            float sum = softmax.sum[m][half] * rescale;
            softmax.max[m][half] = largest;
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[m][n][i] = ptx::exp2_approx(fmaf(scores[m][n][i], scale_log2, -shift));
                    sum += scores[m][n][i];
                }
            softmax.sum[m][half] = sum;
#pragma unroll
            for (int n = 0; n < kHeadSize / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) out[m][n][i] *= rescale;
        }
}

template <class T, int kHeadSize, bool kDrops>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) attention_forward_kernel(AttentionForward op) {
    constexpr int kKeys = kKeysOf<kHeadSize>;
    Shared<T, kHeadSize>& s = shared_memory<Shared<T, kHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, head, begin] = attention_task(kQueries, LongestBlock::last);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kWarpQueries;
    const T* __restrict__ qkv = op.qkv.as<T>();
    const T* keys = qkv + at.key(b, head / at.group(), 0);
    const T* values = qkv + at.value(b, head / at.group(), 0);
    const float scale_log2 = op.scale * kLog2E;

    load_tile_async<kHeadSize, kQueries, kThreads>(s.query[0], qkv + at.query(b, head, begin), at.qkv_step(),
                                                   at.seq_len - begin);
    ptx::cp_async_commit();
    auto load_keys = [&](int tile) {
        load_keys_async<kHeadSize, kKeys, kThreads>(s.key[tile % 2][0], s.value[tile % 2][0], tile, keys, values, at);
    };
    load_keys(0);
    ptx::cp_async_wait<1>();
    __syncthreads();  // the queries are there
    // Heads of 128 would need 64 registers for them beside 128 for out and 64 for scores.
    const StationaryRows<kHeadSize, kM, kHeadSize == 64 ? 4 : 0> queries(ptx::shared_address(s.query), warp_row);

    float out[kM][kHeadSize / 8][4] = {};
    OnlineSoftmax softmax;
    const int n_tiles = (min(begin + kQueries, at.seq_len) + kKeys - 1) / kKeys;
    for (int tile = 0; tile < n_tiles; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and all warps have finished reading the other stage
        if (tile + 1 < n_tiles) load_keys(tile + 1);
        const int distance = begin + warp_row - tile * kKeys;
        if (distance + kWarpQueries <= 0) continue;  // all keys of the tile come after the warp's queries

        float scores[kM][kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadSize / 16; k++)
            add_dot_products<T>(scores, queries, ptx::shared_address(s.key[tile % 2]), 0, k);
        if (distance < kKeys - 1) mask_future<kKeys>(scores, distance);
        add_to_softmax<kHeadSize, kKeys>(softmax, out, scores, scale_log2);
        if constexpr (kDrops)
            for_each_decision<kM, kKeys / 8>(op.dropout, op.dropout.keys[b], head, begin + warp_row, tile * kKeys,
                                             [&](int m, int n, int i, bool kept) { if (!kept) scores[m][n][i] = 0; });
        add_weighted_rows<T, kHeadSize>(out, scores, ptx::shared_address(s.value[tile % 2]), 0);
    }

    const int row_begin = begin + warp_row;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_begin + 16 * m + 8 * half + lane / 4;
            softmax.sum[m][half] = sum_over_row(softmax.sum[m][half]);
            if (lane % 4 == 0 && row < at.seq_len)
                op.lse[at.lse(b, head, row)] = softmax.max[m][half] * op.scale + logf(softmax.sum[m][half]);
        }
    const float factor = kDrops ? op.dropout.factor : 1.0f;
    store_rows<T, kHeadSize>(op.out.as<T>() + at.out(b, head, row_begin), at.out_step(), at.seq_len - row_begin,
                             s.query[0], warp_row, out, [&](int m, int half) { return factor / softmax.sum[m][half]; });
}

template <class T, int kHeadSize> void launch_forward(const AttentionForward& op, Stream stream) {
    launch(op.dropout ? attention_forward_kernel<T, kHeadSize, true> : attention_forward_kernel<T, kHeadSize, false>,
           {"attention_forward", attention_grid(op, op.n_head, kQueries), kThreads, sizeof(Shared<T, kHeadSize>)},
           stream, op);
}

}  // namespace

void attention_forward(const AttentionForward& op, Stream stream) {
    dispatch("attention_forward", {op.out, op.qkv}, [&]<class T>() {
        require_attention_sizes(op);
        if constexpr (sizeof(T) == 2)
            if (are_aligned(16, {op.qkv, op.out})) {
                if (op.head_size == 64) return launch_forward<T, 64>(op, stream);
                if (op.head_size == 128) return launch_forward<T, 128>(op, stream);
            }
        attention_forward_general<T>(op, stream);
    });
}

}  // namespace ops

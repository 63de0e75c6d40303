// attention_forward: out = softmax(scale Q K^T, causal) V with the online softmax (FlashAttention-2, algorithm 1).
//
// Grid: 128 queries of one key-value head a block (heads of 256: 64). Four warps, 32 queries each (16), whose output
// stays in registers; 64 keys and values (other heads than of 64: 32) at a time pass through two stages of shared
// memory (cp.async). Tiles right of the diagonal are never loaded, nor those left of the window and the document of the
// block's first query; a warp skips those that its own rows do not see; only tiles that some row sees in part are
// masked. With grouped heads a block's rows are sixteens of positions of the group's heads in turn (QueryRows), so that
// a key tile is read once for the heads of the group and the rows see nearly the same keys. Bytes: qkv once from memory
// (a head's keys again from the L2 cache), out and lse once. FLOPs: 2 batch n_head head_size seq_len^2. Expected of an
// H200, not measured: 250 TFLOP/s at 1024 positions and heads of 64, where mma.sync peaks at about 620 and cuDNN
// reaches 290. 32 rows a warp, so that a B fragment read from shared memory (128 bytes a product, 256 with 16 rows)
// does not limit. Numerics: scores, maxima, sums and out are float; exp(score - max), at most 1, is rounded to T before
// it multiplies the values; lse comes from the unrounded ones. A soft cap's tanh is float, within 2^-21. Other head
// sizes, float and unaligned memory: attention_general_forward.cuh.
#include "kernels/cuda/attention/attention_general_forward.cuh"
#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// How the work is cut. A warp has 16 kM queries; kHeld of their fragments, 16 columns each, stay in registers, as far
// as out and the scores leave room.
template <int kHeadSize, AttentionKind kKind> struct Shape {
    static constexpr int kM = kHeadSize == 256 ? 1 : 2;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kBlocksPerMultiprocessor = 2;
    static constexpr int kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
    static constexpr int kKeys = kHeadSize == 64 ? 64 : 32;  // of a tile
    static constexpr int kHeld = kHeadSize == 64 ? 4 : 0;
};

// 48 KiB for heads of 64 and 96, 64 KiB for heads of 128, 96 KiB for heads of 256.
template <class T, int kHeadSize, class S> struct Shared {
    alignas(kTileAlignment<kHeadSize>) T query[S::kQueries][kHeadSize];  // in the end out
    T key[2][S::kKeys][kHeadSize];
    T value[2][S::kKeys][kHeadSize];
    uint64_t sample_key;  // of dropout, where no register is left for it
};

// The running softmax of the rows of a warp, in units of scores before scaling. A lane has rows 16 m + 8 half + g; the
// four lanes of a row hold the same maximum, but each its own part of the sum.
template <int kM> struct OnlineSoftmax {
    float max[kM][2], sum[kM][2];

    __device__ __forceinline__ explicit OnlineSoftmax(float lowest) {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) max[m][half] = lowest, sum[m][half] = 0;
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
template <int kM, int kN> __device__ __forceinline__ void mask_future(float (&scores)[kM][kN][4], int distance) {
    for_each_element<kM, kN>([&](int m, int n, int i, int query, int key) {
        if (key > query + distance) scores[m][n][i] = kMasked;
    });
}

// Adds a tile of scores to maxima and sums and replaces it with exp(scale (score - max)); what was summed into out with
// the maximum before is rescaled. As long as a query has seen no key its maximum is the finite number that it began
// with, so that its masked scores give 0.
template <int kHeadSize, int kKeys, int kM>
__device__ __forceinline__ void add_to_softmax(OnlineSoftmax<kM>& softmax, float (&out)[kM][kHeadSize / 8][4],
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

template <class T, int kHeadSize, AttentionKind kKind>
__global__ void __launch_bounds__(Shape<kHeadSize, kKind>::kThreads, Shape<kHeadSize, kKind>::kBlocksPerMultiprocessor)
    attention_forward_kernel(AttentionForward op) {
    using S = Shape<kHeadSize, kKind>;
    constexpr int kKeys = S::kKeys, kM = S::kM;
    constexpr bool kAny = kKind == AttentionKind::any;
    auto& s = shared_memory<Shared<T, kHeadSize, S>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(S::kQueries, LongestBlock::last);
    const QueryRows<16, kAny> rows(at, kv_head, begin);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * S::kWarpQueries;
    const T* __restrict__ qkv = op.qkv.as<T>();
    const T* keys = qkv + at.key(b, kv_head, 0);
    const T* values = qkv + at.value(b, kv_head, 0);
    const bool has_cap = kAny && op.softcap > 0, drops = kAny ? bool(op.dropout) : kKind == AttentionKind::dropout;
    const float scale = has_cap ? op.softcap : op.scale, scale_log2 = scale * kLog2E;

    if constexpr (kAny)
        gather_tile_async<kHeadSize, S::kQueries, S::kThreads>(s.query[0], qkv, [&](int row) {
            const int position = rows.position(row);
            return position < at.seq_len ? int64_t(at.query(b, rows.head(row), position)) : -1;
        });
    else
        load_tile_async<kHeadSize, S::kQueries, S::kThreads>(s.query[0], qkv + at.query(b, kv_head, begin),
                                                             at.qkv_step(), at.seq_len - begin);
    ptx::cp_async_commit();
    if (kAny && op.dropout && threadIdx.x == 0) s.sample_key = op.dropout.keys[b];
    auto load_keys = [&](int tile) {
        load_keys_async<kHeadSize, kKeys, S::kThreads>(s.key[tile % 2][0], s.value[tile % 2][0], tile, keys, values,
                                                       at);
    };
    const VisibleKeys visible(op, b);
    const KeyTiles tiles = tiles_of_block<kAny>(rows, S::kQueries, kKeys, visible, at.seq_len);
    load_keys(tiles.begin);
    ptx::cp_async_wait<1>();
    __syncthreads();  // the queries are there
    const StationaryRows<kHeadSize, kM, S::kHeld> queries(ptx::shared_address(s.query), warp_row);
    const WarpKeys<kAny, S::kWarpQueries, QueryRows<16, kAny>> warp(rows, warp_row, visible, at.seq_len);

    float out[kM][kHeadSize / 8][4] = {};
    // lowest() is too low where a query sees nothing of its first tiles: scaled, it could become infinite.
    OnlineSoftmax<kM> softmax(kAny ? -0x1p100f : std::numeric_limits<float>::lowest());
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and all warps have finished reading the other stage
        if (tile + 1 < tiles.end) load_keys(tile + 1);
        if (warp.is_before(tile * kKeys) || warp.is_past(tile * kKeys, kKeys)) continue;

        float scores[kM][kKeys / 8][4] = {};
#pragma unroll(kHeadSize == 256 ? 4 : kHeadSize / 16)
        for (int k = 0; k < kHeadSize / 16; k++)
            add_dot_products<T>(scores, queries, ptx::shared_address(s.key[tile % 2]), 0, k);
        if (has_cap) cap_scores(scores, op.scale / op.softcap);
        if (!warp.see_all(tile * kKeys, kKeys)) {
            if constexpr (kAny)
                mask_unseen(scores, rows, warp_row, tile * kKeys, visible, at.seq_len);
            else
                mask_future(scores, warp.distance(tile * kKeys));
        }
        add_to_softmax<kHeadSize, kKeys>(softmax, out, scores, scale_log2);
        if (drops)
            for_each_decision<kM, kKeys / 8>(op.dropout, kAny ? s.sample_key : op.dropout.keys[b], rows, warp_row,
                                             tile * kKeys, [&](int m, int n, int i, bool kept) {
                                                 if (!kept) scores[m][n][i] = 0;
                                             });
        add_weighted_rows<T, kHeadSize>(out, scores, ptx::shared_address(s.value[tile % 2]), 0);
    }

#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp_row + 16 * m + 8 * half + lane / 4, position = rows.position(row);
            softmax.sum[m][half] = sum_over_row(softmax.sum[m][half]);
            if (lane % 4 == 0 && position < at.seq_len)
                op.lse[at.lse(b, rows.head(row), position)] = softmax.max[m][half] * scale + logf(softmax.sum[m][half]);
        }
    const float factor = drops ? op.dropout.factor : 1.0f;
    const auto factor_of_row = [&](int m, int half) { return factor / softmax.sum[m][half]; };
    if constexpr (kAny)
        scatter_rows<T, kHeadSize>(
            op.out.as<T>(), s.query[0], warp_row, out,
            [&](int r) {
                const int position = rows.position(warp_row + r);
                return position < at.seq_len ? int64_t(at.out(b, rows.head(warp_row + r), position)) : -1;
            },
            factor_of_row);
    else
        store_rows<T, kHeadSize>(op.out.as<T>() + at.out(b, kv_head, begin + warp_row), at.out_step(),
                                 at.seq_len - begin - warp_row, s.query[0], warp_row, out, factor_of_row);
}

template <class T, int kHeadSize, AttentionKind kKind> void launch_forward(const AttentionForward& op, Stream stream) {
    using S = Shape<kHeadSize, kKind>;
    const int rows = QueryRows<16, kKind == AttentionKind::any>::count(AttentionLayout(op));
    launch(attention_forward_kernel<T, kHeadSize, kKind>,
           {"attention_forward", attention_grid(op, rows, S::kQueries), S::kThreads, sizeof(Shared<T, kHeadSize, S>)},
           stream, op);
}

}  // namespace

void attention_forward(const AttentionForward& op, Stream stream) {
    dispatch("attention_forward", {op.out, op.qkv}, [&]<class T>() {
        require_attention_sizes(op);
        if constexpr (sizeof(T) == 2) {
            const auto start = [&]<int kHeadSize, AttentionKind kKind>() {
                launch_forward<T, kHeadSize, kKind>(op, stream);
                return true;
            };
            if (are_aligned(16, {op.qkv, op.out}) && for_attention_kernel(op, start)) return;
        }
        attention_forward_general<T>(op, stream);
    });
}

}  // namespace ops

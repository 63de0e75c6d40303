// attention_forward: out = softmax(scale Q K^T, causal) V with the online softmax (FlashAttention-2, algorithm 1).
//
// Grid: blocks of 128 queries of one key-value head (heads of 256: 64). A block has four warps of 32 queries (16),
// whose output stays in registers. Tiles of 64 keys and values (heads of other sizes than 64: 32) pass through two
// stages of shared memory (cp.async). The kernel never loads tiles right of the diagonal, or left of the window and the
// document of the block's first query. A warp skips tiles that its rows do not see, and masks only tiles that some row
// sees in part. With grouped heads, the rows of a block are groups of 16 positions of the group's heads in turn
// (QueryRows), so that a key tile is read once for all heads of the group and the rows see nearly the same keys.
// Bytes: qkv once from memory (a head's keys again from L2 cache), out and lse once. FLOPs: 2 batch n_head head_size
// seq_len^2. Expected on an H200, not measured: 250 TFLOP/s with 1024 positions and heads of 64; mma.sync peaks at
// about 620 and cuDNN reaches 290. A warp has 32 rows so that reads of B fragments from shared memory (128 bytes per
// MMA, 256 with 16 rows) are not the bottleneck.
// Numerics: scores, maxima, sums and out are float. exp(score - max), at most 1, is rounded to T before it multiplies
// the values; lse uses the unrounded numbers. A soft cap's tanh is float, within 2^-21.
// Other head sizes, float and unaligned memory: attention_general_forward.cuh. On GPUs of compute capability 9.0, heads
// of 64 and 128 without dropout, soft cap and chunks: attention_forward_sm90.cu.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/arch_kernels.h"
#include "kernels/cuda/attention/attention_general_forward.cuh"
#include "kernels/cuda/attention/attention_layout.cuh"
#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/cuda/attention/attention_softmax.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// Tile sizes. A warp has 16 kM queries. kHeld of their fragments, 16 columns each, stay in registers, as many as fit in
// addition to out and the scores.
template <int kHeadSize, AttentionKind kKind> struct Shape {
    static constexpr int kM = kHeadSize == 256 ? 1 : 2;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kBlocksPerMultiprocessor = 2;
    static constexpr int kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
    static constexpr int kKeys = kHeadSize == 64 ? 64 : 32;  // per tile
    static constexpr int kHeld = kHeadSize == 64 ? 4 : 0;
};

// 48 KiB for heads of 64 and 96, 64 KiB for heads of 128, 96 KiB for heads of 256.
template <class T, int kHeadSize, class S> struct Shared {
    alignas(kTileAlignment<kHeadSize>) T query[S::kQueries][kHeadSize];  // out at the end
    T key[2][S::kKeys][kHeadSize];
    T value[2][S::kKeys][kHeadSize];
    uint64_t sample_key;  // for dropout; no register is left for it
};

template <class T, int kHeadSize, AttentionKind kKind>
__global__ void __launch_bounds__(Shape<kHeadSize, kKind>::kThreads, Shape<kHeadSize, kKind>::kBlocksPerMultiprocessor)
    attention_forward_kernel(AttentionForward op) {
    using S = Shape<kHeadSize, kKind>;
    constexpr int kKeys = S::kKeys, kM = S::kM;
    constexpr bool kAny = has_all_features(kKind), kChunk = kKind == AttentionKind::chunk;
    auto& s = shared_memory<Shared<T, kHeadSize, S>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(S::kQueries, LongestBlock::last);
    const QueryRows<16, kAny> rows(at, kv_head, begin);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * S::kWarpQueries;
    const T* __restrict__ qkv = op.qkv.as<T>();
    const KeyRows<T> of_head = key_rows<kKind, T>(op, b, kv_head);
    const bool has_cap = kAny && op.softcap > 0, drops = kAny ? bool(op.dropout) : kKind == AttentionKind::dropout;
    const float scale = has_cap ? op.softcap : op.scale, scale_log2 = scale * kLog2E;

    const auto query_at = [&](int head, int position) { return at.query(b, head, position); };
    load_queries_async<kHeadSize, S::kQueries, S::kThreads>(s.query[0], qkv, rows, at.seq_len, at.qkv_step(), query_at);
    ptx::cp_async_commit();
    if (kAny && op.dropout && threadIdx.x == 0) s.sample_key = op.dropout.keys[b];
    auto load_keys = [&](int tile) {
        load_keys_async<kHeadSize, kKeys, S::kThreads>(s.key[tile % 2][0], s.value[tile % 2][0], tile, of_head, at);
    };
    const VisibleKeys visible = visible_keys<kKind>(op, b);
    const KeyTiles tiles = tiles_of_block<kAny>(rows, S::kQueries, kKeys, visible, at.seq_len);
    load_keys(tiles.begin);
    ptx::cp_async_wait<1>();
    __syncthreads();  // wait for the queries
    const StationaryRows<kHeadSize, kM, S::kHeld> queries(ptx::shared_address(s.query), warp_row);
    const WarpKeys<kAny, S::kWarpQueries, QueryRows<16, kAny>> warp(rows, warp_row, visible, at.seq_len);

    float out[kM][kHeadSize / 8][4] = {};
    // lowest() is too low for a query that sees no key of its first tiles: after scaling, it could become infinite.
    OnlineSoftmax<kM> softmax(kAny ? -0x1p100f : std::numeric_limits<float>::lowest());
    const auto out_at = [&](int head, int position) { return at.out(b, head, position); };
    const auto out_of_row = [&](int r) {
        const int position = rows.position(warp_row + r);
        return position < at.seq_len ? int64_t(out_at(rows.head(warp_row + r), position)) : -1;
    };
    if (kChunk && !op.chunk.is_first) {
        load_sums<kHeadSize>(out, op.running.out, out_of_row);
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp_row + 16 * m + 8 * half + lane / 4, position = rows.position(row);
                if (position >= at.seq_len) continue;
                const size_t place = at.lse(b, rows.head(row), position);
                softmax.max[m][half] = op.running.max[place];
                softmax.sum[m][half] = lane % 4 == 0 ? op.running.sum[place] : 0.0f;
            }
    }
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // wait for the tile, and until all warps have read the other stage
        if (tile + 1 < tiles.end) load_keys(tile + 1);
        if (warp.is_before(tile * kKeys) || warp.is_past(tile * kKeys, kKeys)) continue;

        float scores[kM][kKeys / 8][4] = {};
#pragma unroll(kHeadSize == 256 ? 4 : kHeadSize / 16)
        for (int k = 0; k < kHeadSize / 16; k++)
            add_dot_products<T>(scores, queries, ptx::shared_address(s.key[tile % 2]), 0, k);
        if (has_cap) cap_scores(scores, op.scale / op.softcap);
        mask_scores(scores, warp, rows, warp_row, tile * kKeys, visible, at.seq_len);
        float rescale[kM][2];
        add_to_softmax(softmax, rescale, scores, scale_log2);
        scale_rows(out, rescale);
        if (drops)
            for_each_decision<kM, kKeys / 8>(op.dropout, kAny ? s.sample_key : op.dropout.keys[b], rows, warp_row,
                                             visible, tile * kKeys, [&](int m, int n, int i, bool kept) {
                                                 if (!kept) scores[m][n][i] = 0;
                                             });
        add_weighted_rows<T, kHeadSize>(out, scores, ptx::shared_address(s.value[tile % 2]), 0);
    }

    // If the queries see no tile: wait for the first tile, and until all lanes have read the running maximum.
    if (kChunk) ptx::cp_async_wait<0>(), __syncwarp();
    const bool is_sum = kChunk && !op.chunk.is_last;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp_row + 16 * m + 8 * half + lane / 4, position = rows.position(row);
            softmax.sum[m][half] = lanes_reduce<4>(softmax.sum[m][half], Sum());
            if (lane % 4 != 0 || position >= at.seq_len) continue;
            const size_t place = at.lse(b, rows.head(row), position);
            if (is_sum)
                op.running.max[place] = softmax.max[m][half], op.running.sum[place] = softmax.sum[m][half];
            else
                op.lse[place] = softmax.max[m][half] * scale + logf(softmax.sum[m][half]);
        }
    if (is_sum) return store_sums<kHeadSize>(op.running.out, out, out_of_row);
    const float factor = drops ? op.dropout.factor : 1.0f;
    const auto factor_of_row = [&](int m, int half) { return factor / softmax.sum[m][half]; };
    store_queries<T, kHeadSize>(op.out, rows, at.seq_len, at.out_step(), out_at, s.query[0], warp_row, out,
                                factor_of_row);
}

template <class T, int kHeadSize, AttentionKind kKind> void launch_forward(const AttentionForward& op, Stream stream) {
    using S = Shape<kHeadSize, kKind>;
    const int rows = QueryRows<16, has_all_features(kKind)>::count(AttentionLayout(op));
    clear_amax("attention_forward", op.out, true, stream);
    launch(attention_forward_kernel<T, kHeadSize, kKind>,
           {"attention_forward", attention_grid(op, rows, S::kQueries), S::kThreads, sizeof(Shared<T, kHeadSize, S>)},
           stream, op);
}

}  // namespace

void attention_forward(const AttentionForward& op, Stream stream) {
    dispatch("attention_forward", {op.out, op.qkv, op.chunk.kv}, [&]<class T>() {
        require_valid(op);
        if constexpr (sizeof(T) == 2) {
            if (is_used(ArchKernel::attention_forward_sm90) && attention_forward_sm90(op, stream)) return;
            const auto start = [&]<int kHeadSize, AttentionKind kKind>() {
                launch_forward<T, kHeadSize, kKind>(op, stream);
                return true;
            };
            require_aligned_chunk({op.chunk.kv, op.running.out});
            if (are_aligned(16, {op.qkv, op.out}) && for_attention_kernel(op, start)) return;
        }
        attention_forward_general<T>(op, stream);
    });
}

}  // namespace ops

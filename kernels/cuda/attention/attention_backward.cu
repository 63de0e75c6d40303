// attention_backward: dV = P^T dOut, dS = P (dOut V^T - dOut . out), dQ = scale dS K, dK = scale dS^T Q, where
// P = exp(scale Q K^T - lse) is recomputed (FlashAttention-2, algorithm 2, split into two kernels).
//
// The first kernel processes blocks of 128 queries: it computes dQ, and writes (lse, dOut . out) of each query to
// scratch. The second processes blocks of 128 keys: dK and dV, summed over the query heads of a kv head in order. The
// block's rows are A fragments in registers, and so are the sums; tiles of 64 rows of the other operand pass through
// two stages of shared memory. The comment below explains why there are two kernels.
// Memory traffic: qkv and dOut twice, out, lse and dqkv once, scratch (8 bytes per query and head) written and read.
// FLOPs: 7 GEMMs, 7 batch n_head head_size seq_len^2. Expected on an H200, not measured: 270 TFLOP/s with 1024
// positions and heads of 64; counted as the usual 5 GEMMs, 190, where other implementations reach 200.
// With dropout, dV = dropout(P)^T dOut, and dOut V^T is masked and scaled in the same way; dOut . out is still the sum
// of P times that. With a soft cap, dS has the factor 1 - tanh^2. With windows and documents, a block of queries starts
// at the tile of its first query's first key, and a block of keys ends at the last query that sees its last key. Heads
// of 256 use blocks of 64 rows and separate kernels for dV and dK, with 8 GEMMs in total.
// Numerics: as in the forward op. P and dS (before scale) are rounded to T before multiplication; all sums are float.
#include <algorithm>
#include <bit>

#include "kernels/base/dropout.h"
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/arch_kernels.h"
#include "kernels/cuda/attention/attention_general_backward.cuh"
#include "kernels/cuda/attention/attention_layout.cuh"
#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"
#include "kernels/shared/dispatch.h"

// Why two kernels: five GEMMs would be enough, but then dQ is a sum over blocks of keys. Atomics are not deterministic.
// Partial sums in scratch take 0.9 GB written and read per layer for GPT-2 124M with 64 x 1024 tokens, 0.42 ms at
// 4.3 TB/s. Adding to one float dQ in turn takes 1.8 GB through the L2 cache, waits, and a rounding pass. Computing two
// GEMMs twice takes 103 GFLOP, 0.26 ms at 400 TFLOP/s, and needs no float dQ, no waits and no traffic between warps:
// the A operand of each GEMM is in the warp's own registers.

namespace ops {

namespace {

// Heads of 64: four warps of 32 rows, so that two MMAs share a B fragment from shared memory. Heads of 96 and 128:
// eight warps of 16 rows, because the sums of 32 rows would fill the registers. Heads of 256: tiles half as long.
template <int kHeadSize, AttentionKind kKind> struct Shape {
    static constexpr int kM = kHeadSize == 64 ? 2 : 1;  // groups of 16 rows per warp
    static constexpr int kWarps = kHeadSize == 64 || kHeadSize == 256 ? 4 : 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlocksPerMultiprocessor = kHeadSize == 64 || kHeadSize == 256 ? 2 : 1;
    static constexpr int kWarpRows = 16 * kM;
    static constexpr int kRows = kWarps * kWarpRows;  // stationary: queries in the first kernel, keys in the second
    // Whether the first stationary rows, with all their fragments in registers, share memory with a streamed tile.
    // `any` needs some of those registers, so its streamed tiles are half as long in the same memory.
    static constexpr bool kShares = !has_all_features(kKind);
    static constexpr int kOthers = kShares ? kRows / 2 : kRows / 4;  // rows of a streamed tile
    static constexpr int kPart = 16;                                 // rows whose scores are in registers at a time
};

// Arguments of kernels without windows, documents and soft caps. With the full argument struct, ptxas of CUDA 13.0
// spills registers that it does not spill with this one.
struct UnmaskedBackward {
    View dqkv;
    void* scratch;
    ConstView dout, qkv, out;
    const float* lse;
    int batch, seq_len, n_head, n_kv_head, head_size;
    float scale;
    DropoutMask dropout;
};
template <AttentionKind kKind>
using Arguments = std::conditional_t<has_all_features(kKind), AttentionBackward, UnmaskedBackward>;

__device__ __forceinline__ float softcap_of(const AttentionBackward& op) { return op.softcap; }
__device__ __forceinline__ float softcap_of(const UnmaskedBackward&) { return 0; }
template <AttentionKind kKind, class Op> __device__ __forceinline__ bool drops(const Op& op) {
    return has_all_features(kKind) ? bool(op.dropout) : kKind == AttentionKind::dropout;
}

// 49 KiB for heads of 64, 73 KiB for heads of 96, 97 KiB for heads of 128 and 256.
template <class T, int kHeadSize, class S> struct Shared {
    static constexpr int kRowsOfTiles = 4 * S::kOthers + (S::kShares ? 1 : 2) * S::kRows;
    alignas(kTileAlignment<kHeadSize>) T rows[kRowsOfTiles][kHeadSize];
    alignas(16) QueryStatistics statistics[2][S::kRows / 2];  // of the block's queries, or of two tiles of queries
    int first_key[2][S::kOthers];                             // of two tiles of queries
    uint64_t sample_key;                                      // for dropout; no register is left for it

    __device__ T* passing(int stage, int which) { return rows[(2 * stage + which) * S::kOthers]; }
    // The stationary rows. The first may share memory with stage 1, because their fragments are in registers before it
    // is filled. The second stay until the end, when the warps' output rows pass through the same memory.
    __device__ T* staying(int which) { return rows[kRowsOfTiles - (2 - which) * S::kRows]; }
    __device__ T* outgoing() { return staying(1); }
};

template <class S> using Scores = float[S::kM][S::kPart / 8][4];
template <class S, int kHeadSize> using Sums = float[S::kM][kHeadSize / 8][4];
template <class S, int kHeadSize, int kSpared>  // steps that are not in registers
using Staying = StationaryRows<kHeadSize, S::kM, kHeadSize / 16 - kSpared>;

// scores += rows tile^T for kPart rows of the tile.
template <int kHeadSize, class S, class Rows, class T>
__device__ __forceinline__ void dot_products(Scores<S>& scores, const Rows& rows, const T* tile) {
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++) add_dot_products<T>(scores, rows, ptx::shared_address(tile), 0, k);
}

// Computes p from the score, and dscore (before scale) from dp. With kCapped, the score is the tanh of a soft cap. A
// masked score is -infinity and gives 0 for both. scale_log2 converts a score to an exponent of 2.
template <bool kCapped>
__device__ __forceinline__ void to_gradient(float& score, float& dp, const QueryStatistics& query, float scale_log2) {
    const float tanh = fmaxf(score, -1.0f);  // masked scores are -infinity
    score = ptx::exp2_approx(fmaf(score, scale_log2, -query.lse_log2));
    dp = score * (dp - query.dout_out);
    if (kCapped) dp *= fmaf(-tanh, tanh, 1.0f);
}

// Writes the statistics of the warp's queries to shared memory and scratch; dout is the tile of the block's queries.
template <class T, int kHeadSize, class S, class Op, class Rows>
__device__ __forceinline__ void query_statistics(QueryStatistics* shared, const T* dout, const Op& op, int b,
                                                 const Rows& rows) {
    constexpr int kPacks = kHeadSize / kPackNumbers, kWarpRows = S::kWarpRows;
    constexpr int kLanes = int(std::bit_ceil(unsigned(kPacks)));  // lanes per row
    const AttentionLayout at(op);
    const int lane = threadIdx.x % 32, pack = lane % kLanes;
    for (int r = lane / kLanes; r < kWarpRows; r += 32 / kLanes) {
        const int row = threadIdx.x / 32 * kWarpRows + r, position = rows.position(row), head = rows.head(row);
        const bool exists = position < at.seq_len;
        float sum = 0;
        if (exists && pack < kPacks)
            sum = dot_of_packs<T>(*reinterpret_cast<const uint4*>(op.out.template as<T>() + at.out(b, head, position) +
                                                                  pack * kPackNumbers),
                                  *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(dout) +
                                                                  tile_offset<kHeadSize>(row, pack)));
        sum = lanes_reduce<kLanes>(sum, Sum());
        if (pack != 0) continue;
        const float lse = exists ? op.lse[at.lse(b, head, position)] : 0.0f;
        shared[row] = {lse * kLog2E, sum};
        if (exists) static_cast<QueryStatistics*>(op.scratch)[at.lse(b, head, position)] = shared[row];
    }
    __syncwarp();  // four lanes of this warp read a query's statistics
}

template <class T, int kHeadSize, AttentionKind kKind>
__global__ void __launch_bounds__(Shape<kHeadSize, kKind>::kThreads, Shape<kHeadSize, kKind>::kBlocksPerMultiprocessor)
    attention_backward_query_kernel(Arguments<kKind> op) {
    using S = Shape<kHeadSize, kKind>;
    constexpr bool kAny = has_all_features(kKind), kChunk = kKind == AttentionKind::chunk;
    auto& s = shared_memory<Shared<T, kHeadSize, S>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(S::kRows, LongestBlock::last);
    const QueryRows<16, kAny> rows(at, kv_head, begin);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * S::kWarpRows;
    const T* __restrict__ qkv = op.qkv.template as<T>();
    const KeyRows<T> of_head = key_rows<kKind, T>(op, b, kv_head);
    const float softcap = softcap_of(op), scale_log2 = (kAny && softcap > 0 ? softcap : op.scale) * kLog2E;

    const auto query_at = [&](int head, int position) { return at.query(b, head, position); };
    const auto out_at = [&](int head, int position) { return at.out(b, head, position); };
    load_queries_async<kHeadSize, S::kRows, S::kThreads>(s.staying(0), qkv, rows, at.seq_len, at.qkv_step(), query_at);
    load_queries_async<kHeadSize, S::kRows, S::kThreads>(s.staying(1), op.dout.template as<T>(), rows, at.seq_len,
                                                         at.out_step(), out_at);
    ptx::cp_async_commit();
    const VisibleKeys visible = visible_keys<kKind>(op, b);
    const KeyTiles tiles = tiles_of_block<kAny>(rows, S::kRows, S::kOthers, visible, at.seq_len);
    // Stage 1 holds the stationary rows until their fragments are in registers.
    auto load_keys = [&](int tile) {
        const int stage = (tile - tiles.begin) % 2;
        load_keys_async<kHeadSize, S::kOthers, S::kThreads>(s.passing(stage, 0), s.passing(stage, 1), tile, of_head,
                                                            at);
    };
    load_keys(tiles.begin);
    ptx::cp_async_wait<1>();
    __syncthreads();  // wait for query and dout
    constexpr int kSpared = kHeadSize == 256 ? 16 : 0;
    const Staying<S, kHeadSize, kSpared> query(ptx::shared_address(s.staying(0)), warp_row);
    const Staying<S, kHeadSize, kSpared> dout(ptx::shared_address(s.staying(1)), warp_row);
    QueryStatistics* block_statistics = s.statistics[0];
    query_statistics<T, kHeadSize, S>(block_statistics, s.staying(1), op, b, rows);
    QueryStatistics statistics[S::kM][2];
#pragma unroll
    for (int m = 0; m < S::kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            statistics[m][half] = block_statistics[warp_row + 16 * m + 8 * half + lane / 4];

    const WarpKeys<kAny, S::kWarpRows, QueryRows<16, kAny>> warp(rows, warp_row, visible, at.seq_len);
    Sums<S, kHeadSize> dquery = {};
    const auto out_of_row = [&](int r) {
        const int position = rows.position(warp_row + r);
        return position < at.seq_len ? int64_t(out_at(rows.head(warp_row + r), position)) : -1;
    };
    if constexpr (kChunk)
        if (!op.chunk.is_first) load_sums<kHeadSize>(dquery, op.dquery, out_of_row);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // wait for the tile, and until all warps have read the other stage and the stationary rows
        if (tile + 1 < tiles.end) load_keys(tile + 1);
        const int stage = (tile - tiles.begin) % 2;
#pragma unroll
        for (int part = 0; part < S::kOthers; part += S::kPart) {
            const int first = tile * S::kOthers + part;
            if (warp.is_before(first)) break;
            if (warp.is_past(first, S::kPart)) continue;
            const T* key = s.passing(stage, 0) + part * kHeadSize;
            const T* value = s.passing(stage, 1) + part * kHeadSize;
            Scores<S> scores = {}, dscores = {};
            dot_products<kHeadSize, S>(scores, query, key);
            dot_products<kHeadSize, S>(dscores, dout, value);
            if (kAny && softcap > 0) cap_scores(scores, op.scale / softcap);
            mask_scores(scores, warp, rows, warp_row, first, visible, at.seq_len);
            if (drops<kKind>(op))
                for_each_decision<S::kM, S::kPart / 8>(
                    op.dropout, op.dropout.keys[b], rows, warp_row, visible, first,
                    [&](int m, int n, int i, bool kept) { dscores[m][n][i] *= kept ? op.dropout.factor : 0.0f; });
            const auto to_gradients = [&]<bool kCapped>() {
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                    to_gradient<kCapped>(scores[m][n][i], dscores[m][n][i], statistics[m][i / 2], scale_log2);
                });
            };
            if (kAny && softcap > 0)
                to_gradients.template operator()<true>();
            else
                to_gradients.template operator()<false>();
            add_weighted_rows<T, kHeadSize>(dquery, dscores, ptx::shared_address(key), 0);
        }
    }
    if constexpr (kChunk) {
        ptx::cp_async_wait<0>();  // for the first tile, if the queries see none
        if (!op.chunk.is_last) return store_sums<kHeadSize>(op.dquery, dquery, out_of_row);
    }
    store_queries<T, kHeadSize>(op.dqkv, rows, at.seq_len, at.qkv_step(), query_at, s.outgoing(),
                                warp_row, dquery, [&](int, int) { return op.scale; });
}

// The tiles of queries for a block of keys: for each head of the group in order, from the block's first key to the last
// query that sees any of its keys. All properties of a tile are derived from its number, to save registers.
template <int kOthers> class QueryTiles {
public:
    __device__ __forceinline__ QueryTiles(const AttentionLayout& at, int kv_head, int begin, int end)
        : first_head_(kv_head * at.group()), begin_(begin), per_head_((end - begin + kOthers - 1) / kOthers) {}

    __device__ __forceinline__ int count(const AttentionLayout& at) const { return at.group() * per_head_; }
    __device__ __forceinline__ int head(int tile) const { return first_head_ + tile / per_head_; }
    __device__ __forceinline__ int begin(int tile) const { return begin_ + tile % per_head_ * kOthers; }

private:
    int first_head_, begin_, per_head_;
};

template <class T, int kHeadSize, class S, class Op>
__device__ __forceinline__ void load_query_tile_async(Shared<T, kHeadSize, S>& s, int stage, const Op& op,
                                                      const VisibleKeys& visible, int b, int head, int begin) {
    constexpr int kOthers = S::kOthers, kThreads = S::kThreads;
    const AttentionLayout at(op);
    const int count = at.seq_len - begin;
    load_tile_async<kHeadSize, kOthers, kThreads>(
        s.passing(stage, 0), op.qkv.template as<T>() + at.query(b, head, begin), at.qkv_step(), count);
    load_tile_async<kHeadSize, kOthers, kThreads>(
        s.passing(stage, 1), op.dout.template as<T>() + at.out(b, head, begin), at.out_step(), count);
    const int row = threadIdx.x;
    if (row < kOthers) {
        const bool inside = row < count;
        const QueryStatistics* from = static_cast<const QueryStatistics*>(op.scratch) + at.lse(b, head, begin);
        ptx::cp_async<8>(ptx::shared_address(&s.statistics[stage][row]), from + (inside ? row : 0), inside ? 8 : 0);
        // Repeats the last query's value after the end, so that the numbers never decrease.
        if (visible.first_key)
            ptx::cp_async<4>(ptx::shared_address(&s.first_key[stage][row]),
                             visible.first_key + begin + min(row, count - 1));
    }
    ptx::cp_async_commit();
}

// Stores factor(m, half) times the sums of the warp's first `count` rows of keys or values, to rows of dqkv or of a
// chunk's dkv.
template <class T, int kHeadSize, AttentionKind kKind, class S, class Op, class Factor>
__device__ __forceinline__ void store_gradient(Shared<T, kHeadSize, S>& s, const Op& op, size_t in_qkv, size_t in_chunk,
                                               int count, int warp_row, const Sums<S, kHeadSize>& sums, Factor factor) {
    const AttentionLayout at(op);
    if constexpr (kKind == AttentionKind::chunk) {
        const auto place = [&](int r) { return r < count ? int64_t(r * at.kv_step()) : -1; };
        store_sums<kHeadSize>(op.dkv + in_chunk, sums, place, factor(0, 0), op.accumulate_dkv);
    } else {
        store_rows<T, kHeadSize>(op.dqkv.template as<T>() + in_qkv, op.dqkv.amax, at.qkv_step(), count, s.outgoing(),
                                 warp_row, sums, factor);
    }
}

// The gradients that a launch of the kernel computes. With heads of 256, the sums of one gradient fill half of the
// registers, so each gets a launch, and one of the seven GEMMs is computed twice.
enum class Gradient { both, keys, values };

template <class T, int kHeadSize, AttentionKind kKind, Gradient kGradient>
__global__ void __launch_bounds__(Shape<kHeadSize, kKind>::kThreads, Shape<kHeadSize, kKind>::kBlocksPerMultiprocessor)
    attention_backward_key_kernel(Arguments<kKind> op) {
    using S = Shape<kHeadSize, kKind>;
    constexpr bool kAny = has_all_features(kKind), kChunk = kKind == AttentionKind::chunk;
    constexpr bool kOfKeys = kGradient != Gradient::values, kOfValues = kGradient != Gradient::keys;
    auto& s = shared_memory<Shared<T, kHeadSize, S>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(S::kRows, LongestBlock::first);
    const int warp_row = threadIdx.x / 32 * S::kWarpRows, lane = threadIdx.x % 32;
    const float softcap = softcap_of(op), scale_log2 = (kAny && softcap > 0 ? softcap : op.scale) * kLog2E;

    const int n_keys = at.seq_len - begin;
    const KeyRows<T> of_block = key_rows<kKind, T>(op, b, kv_head, begin);
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(1), of_block.keys, of_block.step, n_keys);
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(0), of_block.values, of_block.step, n_keys);
    ptx::cp_async_commit();
    if (kAny && op.dropout && threadIdx.x == 0) s.sample_key = op.dropout.keys[b];
    const VisibleKeys visible = visible_keys<kKind>(op, b);
    const int query_begin = visible.first_query(begin);
    int query_end = kAny ? visible.end_of_queries(min(begin + S::kRows, at.seq_len) - 1, at.seq_len) : at.seq_len;
    if (kChunk) query_end = max(query_end, query_begin + 1);  // at least one tile, even if no query sees the keys
    const QueryTiles<S::kOthers> tiles(at, kv_head, query_begin, query_end);
    load_query_tile_async(s, 0, op, visible, b, tiles.head(0), query_begin);
    ptx::cp_async_wait<1>();
    __syncthreads();  // wait for key and value
    // With 128 registers of sums, heads of 64 have no registers for the last step of the keys, and with philox() for
    // none of the steps.
    constexpr int kSparedOfKeys = kHeadSize == 64 ? (kKind == AttentionKind::plain ? 1 : 4) : kHeadSize == 256 ? 16 : 0;
    constexpr int kSparedOfValues = kHeadSize == 256                              ? 16
                                    : !has_all_features(kKind) || kHeadSize == 96 ? 0
                                    : kHeadSize == 64                             ? 2
                                                                                  : 4;
    const Staying<S, kHeadSize, kSparedOfKeys> key(ptx::shared_address(s.staying(1)), warp_row);
    const Staying<S, kHeadSize, kSparedOfValues> value(ptx::shared_address(s.staying(0)), warp_row);

    // End of the queries that see any of the warp's keys, relative to the first key.
    const int warp_end = min(begin + warp_row + S::kWarpRows, at.seq_len);
    const int reach =
        kAny ? visible.end_of_queries(warp_end - 1, at.seq_len) + visible.distance - (begin + warp_row) : 0;
    Sums<S, kHeadSize> dkey = {}, dvalue = {};
    const int n_tiles = tiles.count(at);
    for (int tile = 0; tile < n_tiles; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // wait for the tile, and until all warps have read the other stage and the stationary rows
        if (tile + 1 < n_tiles)
            load_query_tile_async(s, (tile + 1) % 2, op, visible, b, tiles.head(tile + 1), tiles.begin(tile + 1));
        const int first_distance = tiles.begin(tile) + visible.distance - (begin + warp_row);
        const TileFirstKeys first{s.first_key[tile % 2], visible, tiles.begin(tile) + visible.distance};
#pragma unroll
        for (int part = 0; part < S::kOthers; part += S::kPart) {
            const int distance = first_distance + part;
            if (distance + S::kPart <= 0) continue;   // all these queries precede the warp's keys
            if (kAny && distance >= reach) continue;  // none of them sees the warp's keys anymore
            const T* query = s.passing(tile % 2, 0) + part * kHeadSize;
            const T* dout = s.passing(tile % 2, 1) + part * kHeadSize;
            uint32_t dropped = 0;  // one bit per score of the lane, computed while no register holds a score
            if (drops<kKind>(op))
                for_each_decision_of_transposed<S::kM>(
                    op.dropout, kAny ? s.sample_key : op.dropout.keys[b], tiles.head(tile), visible,
                    tiles.begin(tile) + part, begin + warp_row,
                    [&](int m, int n, int i, bool kept) { dropped |= uint32_t(!kept) << (8 * m + 4 * n + i); });
            [[maybe_unused]] const auto is_dropped = [&](int m, int n, int i) {
                return dropped >> (8 * m + 4 * n + i) & 1;
            };
            Scores<S> scores = {}, dscores = {};
            dot_products<kHeadSize, S>(scores, key, query);
            if constexpr (kOfKeys) dot_products<kHeadSize, S>(dscores, value, dout);
            if (kAny && softcap > 0) cap_scores(scores, op.scale / softcap);
            if constexpr (kAny) {
                if (distance < S::kWarpRows - 1 || first(part + S::kPart - 1) > begin + warp_row)
                    mask_unseeing(scores, begin + warp_row, part, first);
            } else if (distance < S::kWarpRows - 1) {
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int row, int column) {
                    if (row > column + distance) scores[m][n][i] = kMasked;
                });
            }
            if (kOfKeys && drops<kKind>(op))
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                    dscores[m][n][i] *= is_dropped(m, n, i) ? 0.0f : op.dropout.factor;
                });
            const auto to_gradients = [&]<bool kCapped>() {
#pragma unroll
                for (int n = 0; n < S::kPart / 8; n++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) {
                        const QueryStatistics statistics = s.statistics[tile % 2][part + 8 * n + lane % 4 * 2 + odd];
#pragma unroll
                        for (int m = 0; m < S::kM; m++)
#pragma unroll
                            for (int i = odd; i < 4; i += 2)
                                to_gradient<kCapped>(scores[m][n][i], dscores[m][n][i], statistics, scale_log2);
                    }
            };
            if (kAny && softcap > 0)
                to_gradients.template operator()<true>();
            else
                to_gradients.template operator()<false>();
            if (kOfValues && drops<kKind>(op))
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                    if (is_dropped(m, n, i)) scores[m][n][i] = 0;
                });
            if constexpr (kOfValues) add_weighted_rows<T, kHeadSize>(dvalue, scores, ptx::shared_address(dout), 0);
            if constexpr (kOfKeys) add_weighted_rows<T, kHeadSize>(dkey, dscores, ptx::shared_address(query), 0);
        }
    }
    const int row_begin = begin + warp_row, count = at.seq_len - row_begin;
    if constexpr (kOfKeys)
        store_gradient<T, kHeadSize, kKind>(s, op, at.key(b, kv_head, row_begin), at.chunk_key(b, kv_head, row_begin),
                                            count, warp_row, dkey, [&](int, int) { return op.scale; });
    if constexpr (kOfValues)
        store_gradient<T, kHeadSize, kKind>(s, op, at.value(b, kv_head, row_begin),
                                            at.chunk_value(b, kv_head, row_begin), count, warp_row, dvalue,
                                            [&](int, int) { return drops<kKind>(op) ? op.dropout.factor : 1.0f; });
}

template <class T, int kHeadSize, AttentionKind kKind>
void launch_backward(const AttentionBackward& op, Stream stream) {
    using S = Shape<kHeadSize, kKind>;
    clear_amax("attention_backward", op.dqkv, true, stream);
    Arguments<kKind> arguments;
    if constexpr (has_all_features(kKind))
        arguments = op;
    else
        arguments = {op.dqkv,    op.scratch, op.dout,      op.qkv,       op.out,   op.lse,    op.batch,
                     op.seq_len, op.n_head,  op.n_kv_head, op.head_size, op.scale, op.dropout};
    auto start = [&](auto kernel, const char* name, int rows) {
        launch(kernel, {name, attention_grid(op, rows, S::kRows), S::kThreads, sizeof(Shared<T, kHeadSize, S>)}, stream,
               arguments);
    };
    const int query_rows = QueryRows<16, has_all_features(kKind)>::count(AttentionLayout(op));
    start(attention_backward_query_kernel<T, kHeadSize, kKind>, "attention_backward_query", query_rows);
    auto start_keys = [&]<Gradient kGradient>() {
        start(attention_backward_key_kernel<T, kHeadSize, kKind, kGradient>, "attention_backward_key", op.seq_len);
    };
    if constexpr (kHeadSize == 256) {
        start_keys.template operator()<Gradient::values>();
        start_keys.template operator()<Gradient::keys>();
    } else {
        start_keys.template operator()<Gradient::both>();
    }
}

}  // namespace

void attention_backward(const AttentionBackward& op, Stream stream) {
    dispatch("attention_backward", {op.dqkv, op.dout, op.qkv, op.out, op.chunk.kv}, [&]<class T>() {
        require_valid(op);
        if constexpr (sizeof(T) == 2) {
            if (is_used(ArchKernel::attention_backward_sm90) && attention_backward_sm90(op, stream)) return;
            const auto start = [&]<int kHeadSize, AttentionKind kKind>() {
                launch_backward<T, kHeadSize, kKind>(op, stream);
                return true;
            };
            require_aligned_chunk({op.chunk.kv, op.dquery, op.dkv});
            if (are_aligned(16, {op.dqkv, op.dout, op.qkv, op.out}) && for_attention_kernel(op, start)) return;
        }
        attention_backward_general<T>(op, stream);
    });
}

size_t attention_backward_scratch_bytes(const AttentionBackward& op) {
    const size_t portable = size_t(op.batch) * op.n_head * op.seq_len * sizeof(QueryStatistics);
    if (!can_run(ArchKernel::attention_backward_sm90)) return portable;
    return std::max(portable, attention_backward_sm90_scratch_bytes(op));
}

}  // namespace ops

// attention_backward: dV = P^T dOut, dS = P (dOut V^T - dOut . out), dQ = scale dS K, dK = scale dS^T Q, where
// P = exp(scale Q K^T - lse) is computed again (FlashAttention-2, algorithm 2, cut into two kernels).
//
// First over blocks of 128 queries: dQ, and (lse, dOut . out) of each query into scratch; then over blocks of 128 keys:
// dK and dV, summed over the query heads of a kv head in order. The block's rows are A fragments in registers, as are
// the sums; 64 rows of the other kind at a time pass through two stages of shared memory. Below: why two kernels.
// Bytes from memory: qkv and dOut twice, out, lse and dqkv once, scratch (8 bytes a query and head) written and read.
// FLOPs: 7 products, 7 batch n_head head_size seq_len^2. Expected of an H200, not measured: 270 TFLOP/s of these at
// 1024 positions and heads of 64, that is 190 counted as the usual 5 products, where other implementations reach 200.
// With dropout dV = dropout(P)^T dOut, and dOut V^T is masked and scaled likewise; dOut . out remains the sum of P
// times that.
// Numerics: as in the forward op; P and dS (before scale) are rounded to T before they multiply, all sums are float.
#include "kernels/cuda/attention_general_backward.cuh"
#include "kernels/cuda/attention_layout.cuh"
#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/dispatch.h"

// Why two kernels. Five products would do, but then dQ is summed over blocks of keys: with atomics, not the same twice;
// through partial sums in scratch, at GPT-2 124M with 64 x 1024 tokens 0.9 GB written and read per layer, 0.42 ms at
// 4.3 TB/s; adding to one float dQ in turn, 1.8 GB through the L2 cache, waits for the turn, and a rounding pass. The
// two products done twice are 103 GFLOP, 0.26 ms at 400 TFLOP/s, and need no float dQ, no waiting and no traffic
// between warps: each product's A operand is what the warp itself holds in registers.

namespace ops {

namespace {

// Heads of 64: four warps of 32 rows, so that a B fragment from shared memory serves two products. Heads of 128: the
// sums of 32 rows alone would fill the registers, so eight warps of 16.
template <int kHeadSize> struct Shape {
    static constexpr int kM = kHeadSize == 64 ? 2 : 1;  // sixteens of rows of a warp
    static constexpr int kWarps = kHeadSize == 64 ? 4 : 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlocksPerMultiprocessor = kHeadSize == 64 ? 2 : 1;
    static constexpr int kWarpRows = 16 * kM;
    static constexpr int kRows = kWarps * kWarpRows;  // stationary: queries in the first kernel, keys in the second
    static constexpr int kOthers = 64;                // rows of a streamed tile
    static constexpr int kPart = 16;                  // of them, whose scores are in registers at a time
    static_assert(kRows == 2 * kOthers);
};

// 49 KiB for heads of 64, 97 KiB for heads of 128.
template <class T, int kHeadSize> struct Shared {
    static constexpr int kOthers = Shape<kHeadSize>::kOthers;
    alignas(256) T tiles[6][kOthers][kHeadSize];
    alignas(16) QueryStatistics statistics[2][kOthers];  // of the block's queries, or of two tiles of queries

    __device__ T* passing(int stage, int which) { return tiles[2 * stage + which][0]; }
    // The stationary rows. The first share memory with stage 1: their fragments are in registers before it is filled.
    // The second stay until the end, when the warps' output rows pass through the same memory.
    __device__ T* staying(int which) { return tiles[2 + 2 * which][0]; }
    __device__ T* outgoing() { return tiles[4][0]; }
};

template <int kHeadSize> using Scores = float[Shape<kHeadSize>::kM][Shape<kHeadSize>::kPart / 8][4];
template <int kHeadSize> using Sums = float[Shape<kHeadSize>::kM][kHeadSize / 8][4];
template <int kHeadSize, int kSpared = 0>  // steps that are not kept in registers
using Staying = StationaryRows<kHeadSize, Shape<kHeadSize>::kM, kHeadSize / 16 - kSpared>;

// scores += rows first^T, dp += other_rows second^T for kPart rows of the two tiles.
template <class T, int kHeadSize, class Rows, class OtherRows>
__device__ __forceinline__ void both_dot_products(Scores<kHeadSize>& scores, const Rows& rows, const T* first,
                                                  Scores<kHeadSize>& dp, const OtherRows& other_rows, const T* second) {
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++) add_dot_products<T>(scores, rows, ptx::shared_address(first), 0, k);
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++) add_dot_products<T>(dp, other_rows, ptx::shared_address(second), 0, k);
}

// From scores to p, from dp to dscore, before scale. A masked score is -infinity and gives 0 for both.
__device__ __forceinline__ void to_gradient(float& score, float& dp, const QueryStatistics& query, float scale_log2) {
    score = ptx::exp2_approx(fmaf(score, scale_log2, -query.lse_log2));
    dp = score * (dp - query.dout_out);
}

// The sum of the products of 8 pairs of numbers.
template <class T> __device__ __forceinline__ float dot_of_packs(const uint4& x, const uint4& y) {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(to_float(T{uint16_t(xs[i])}), to_float(T{uint16_t(ys[i])}), sum);
        sum = fmaf(to_float(T{uint16_t(xs[i] >> 16)}), to_float(T{uint16_t(ys[i] >> 16)}), sum);
    }
    return sum;
}

// The statistics of the warp's queries, into shared memory and scratch; dout is the tile of the block's queries.
template <class T, int kHeadSize>
__device__ __forceinline__ void query_statistics(QueryStatistics* shared, const T* dout, const AttentionBackward& op,
                                                 int b, int head, int begin) {
    constexpr int kPacks = kHeadSize / kPackNumbers, kWarpRows = Shape<kHeadSize>::kWarpRows;
    const AttentionLayout at(op);
    const int lane = threadIdx.x % 32, pack = lane % kPacks;
    for (int r = lane / kPacks; r < kWarpRows; r += 32 / kPacks) {
        const int row = threadIdx.x / 32 * kWarpRows + r, position = begin + row;
        const bool exists = position < at.seq_len;
        float sum = 0;
        if (exists)
            sum = dot_of_packs<T>(
                *reinterpret_cast<const uint4*>(op.out.as<T>() + at.out(b, head, position) + pack * kPackNumbers),
                *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(dout) +
                                                tile_offset<kHeadSize>(row, pack)));
#pragma unroll
        for (int distance = 1; distance < kPacks; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (pack != 0) continue;
        const float lse = exists ? op.lse[at.lse(b, head, position)] : 0.0f;
        shared[row] = {lse * kLog2E, sum};
        if (exists) static_cast<QueryStatistics*>(op.scratch)[at.lse(b, head, position)] = shared[row];
    }
    __syncwarp();  // a query's statistics are read by four lanes of this warp
}

template <class T, int kHeadSize, bool kDrops>
__global__ void __launch_bounds__(Shape<kHeadSize>::kThreads, Shape<kHeadSize>::kBlocksPerMultiprocessor)
    attention_backward_query_kernel(AttentionBackward op) {
    using S = Shape<kHeadSize>;
    Shared<T, kHeadSize>& s = shared_memory<Shared<T, kHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, head, begin] = attention_task(S::kRows, LongestBlock::last);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * S::kWarpRows;
    const T* __restrict__ qkv = op.qkv.as<T>();
    const T* keys = qkv + at.key(b, head / at.group(), 0);
    const T* values = qkv + at.value(b, head / at.group(), 0);
    const float scale_log2 = op.scale * kLog2E;

    const int n_queries = at.seq_len - begin;
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(0), qkv + at.query(b, head, begin), at.qkv_step(),
                                                      n_queries);
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(1), op.dout.as<T>() + at.out(b, head, begin),
                                                      at.out_step(), n_queries);
    ptx::cp_async_commit();
    auto load_keys = [&](int tile) {
        load_keys_async<kHeadSize, S::kOthers, S::kThreads>(s.passing(tile % 2, 0), s.passing(tile % 2, 1), tile, keys,
                                                            values, at);
    };
    load_keys(0);
    ptx::cp_async_wait<1>();
    __syncthreads();  // query and dout are there
    const Staying<kHeadSize> query(ptx::shared_address(s.staying(0)), warp_row),
        dout(ptx::shared_address(s.staying(1)), warp_row);
    QueryStatistics* block_statistics = s.statistics[0];
    query_statistics<T, kHeadSize>(block_statistics, s.staying(1), op, b, head, begin);
    QueryStatistics statistics[S::kM][2];
#pragma unroll
    for (int m = 0; m < S::kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            statistics[m][half] = block_statistics[warp_row + 16 * m + 8 * half + lane / 4];

    Sums<kHeadSize> dquery = {};
    const int n_tiles = (min(begin + S::kRows, at.seq_len) + S::kOthers - 1) / S::kOthers;
    for (int tile = 0; tile < n_tiles; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived; all warps have read the other stage and the stationary rows
        if (tile + 1 < n_tiles) load_keys(tile + 1);
#pragma unroll
        for (int part = 0; part < S::kOthers; part += S::kPart) {
            const int distance = begin + warp_row - (tile * S::kOthers + part);
            if (distance + S::kWarpRows <= 0) break;  // all further keys come after the warp's queries
            const T* key = s.passing(tile % 2, 0) + part * kHeadSize;
            const T* value = s.passing(tile % 2, 1) + part * kHeadSize;
            Scores<kHeadSize> scores = {}, dscores = {};
            both_dot_products<T, kHeadSize>(scores, query, key, dscores, dout, value);
            if (distance < S::kPart - 1)
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int row, int column) {
                    if (column > row + distance) scores[m][n][i] = -std::numeric_limits<float>::infinity();
                });
            if constexpr (kDrops)
                for_each_decision<S::kM, S::kPart / 8>(
                    op.dropout, op.dropout.keys[b], head, begin + warp_row, tile * S::kOthers + part,
                    [&](int m, int n, int i, bool kept) { dscores[m][n][i] *= kept ? op.dropout.factor : 0.0f; });
            for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                to_gradient(scores[m][n][i], dscores[m][n][i], statistics[m][i / 2], scale_log2);
            });
            add_weighted_rows<T, kHeadSize>(dquery, dscores, ptx::shared_address(key), 0);
        }
    }
    const int row_begin = begin + warp_row;
    store_rows<T, kHeadSize>(op.dqkv.as<T>() + at.query(b, head, row_begin), at.qkv_step(), at.seq_len - row_begin,
                             s.outgoing(), warp_row, dquery, [&](int, int) { return op.scale; });
}

// The tiles of queries for a block of keys: of each head of the group in order, from the block's first key on.
// Everything about a tile follows from its number, since no register is left to store more.
template <int kHeadSize> class QueryTiles {
public:
    __device__ __forceinline__ QueryTiles(const AttentionLayout& at, int kv_head, int begin)
        : first_head_(kv_head * at.group()), begin_(begin), per_head_((at.seq_len - begin + kOthers - 1) / kOthers) {}

    __device__ __forceinline__ int count(const AttentionLayout& at) const { return at.group() * per_head_; }
    __device__ __forceinline__ int head(int tile) const { return first_head_ + tile / per_head_; }
    __device__ __forceinline__ int begin(int tile) const { return begin_ + tile % per_head_ * kOthers; }

private:
    static constexpr int kOthers = Shape<kHeadSize>::kOthers;
    int first_head_, begin_, per_head_;
};

template <class T, int kHeadSize>
__device__ __forceinline__ void load_queries_async(Shared<T, kHeadSize>& s, int stage, const AttentionBackward& op,
                                                   int b, int head, int begin) {
    constexpr int kOthers = Shape<kHeadSize>::kOthers, kThreads = Shape<kHeadSize>::kThreads;
    const AttentionLayout at(op);
    const int count = at.seq_len - begin;
    load_tile_async<kHeadSize, kOthers, kThreads>(s.passing(stage, 0), op.qkv.as<T>() + at.query(b, head, begin),
                                                  at.qkv_step(), count);
    load_tile_async<kHeadSize, kOthers, kThreads>(s.passing(stage, 1), op.dout.as<T>() + at.out(b, head, begin),
                                                  at.out_step(), count);
    const int row = threadIdx.x;
    if (row < kOthers) {
        const bool inside = row < count;
        const QueryStatistics* from = static_cast<const QueryStatistics*>(op.scratch) + at.lse(b, head, begin);
        ptx::cp_async<8>(ptx::shared_address(&s.statistics[stage][row]), from + (inside ? row : 0), inside ? 8 : 0);
    }
    ptx::cp_async_commit();
}

template <class T, int kHeadSize, bool kDrops>
__global__ void __launch_bounds__(Shape<kHeadSize>::kThreads, Shape<kHeadSize>::kBlocksPerMultiprocessor)
    attention_backward_key_kernel(AttentionBackward op) {
    using S = Shape<kHeadSize>;
    Shared<T, kHeadSize>& s = shared_memory<Shared<T, kHeadSize>>();
    const AttentionLayout at(op);
    const auto [b, kv_head, begin] = attention_task(S::kRows, LongestBlock::first);
    const int warp_row = threadIdx.x / 32 * S::kWarpRows, lane = threadIdx.x % 32;
    const T* __restrict__ qkv = op.qkv.as<T>();
    const float scale_log2 = op.scale * kLog2E;

    const int n_keys = at.seq_len - begin;
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(1), qkv + at.key(b, kv_head, begin), at.qkv_step(),
                                                      n_keys);
    load_tile_async<kHeadSize, S::kRows, S::kThreads>(s.staying(0), qkv + at.value(b, kv_head, begin), at.qkv_step(),
                                                      n_keys);
    ptx::cp_async_commit();
    const QueryTiles<kHeadSize> tiles(at, kv_head, begin);
    load_queries_async(s, 0, op, b, tiles.head(0), begin);
    ptx::cp_async_wait<1>();
    __syncthreads();  // key and value are there
    // Beside 128 registers of sums, heads of 64 have no room for the last step of the keys, with philox() beside them
    // for none of them.
    const Staying<kHeadSize, kHeadSize == 128 ? 0 : kDrops ? 4 : 1> key(ptx::shared_address(s.staying(1)), warp_row);
    const Staying<kHeadSize> value(ptx::shared_address(s.staying(0)), warp_row);

    Sums<kHeadSize> dkey = {}, dvalue = {};
    const int n_tiles = tiles.count(at);
    for (int tile = 0; tile < n_tiles; tile++) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived; all warps have read the other stage and the stationary rows
        if (tile + 1 < n_tiles)
            load_queries_async(s, (tile + 1) % 2, op, b, tiles.head(tile + 1), tiles.begin(tile + 1));
        const int first_distance = tiles.begin(tile) - (begin + warp_row);
#pragma unroll
        for (int part = 0; part < S::kOthers; part += S::kPart) {
            const int distance = first_distance + part;
            if (distance + S::kPart <= 0) continue;  // all these queries come before the warp's keys
            const T* query = s.passing(tile % 2, 0) + part * kHeadSize;
            const T* dout = s.passing(tile % 2, 1) + part * kHeadSize;
            uint32_t dropped = 0;  // a bit for each of the lane's scores, found while no register holds a score
            if constexpr (kDrops)
                for_each_decision_of_transposed<S::kM>(
                    op.dropout, op.dropout.keys[b], tiles.head(tile), tiles.begin(tile) + part, begin + warp_row,
                    [&](int m, int n, int i, bool kept) { dropped |= uint32_t(!kept) << (8 * m + 4 * n + i); });
            [[maybe_unused]] const auto is_dropped = [&](int m, int n, int i) {
                return dropped >> (8 * m + 4 * n + i) & 1;
            };
            Scores<kHeadSize> scores = {}, dscores = {};
            both_dot_products<T, kHeadSize>(scores, key, query, dscores, value, dout);
            if (distance < S::kWarpRows - 1)
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int row, int column) {
                    if (row > column + distance) scores[m][n][i] = -std::numeric_limits<float>::infinity();
                });
            if constexpr (kDrops)
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                    dscores[m][n][i] *= is_dropped(m, n, i) ? 0.0f : op.dropout.factor;
                });
#pragma unroll
            for (int n = 0; n < S::kPart / 8; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const QueryStatistics statistics = s.statistics[tile % 2][part + 8 * n + lane % 4 * 2 + odd];
#pragma unroll
                    for (int m = 0; m < S::kM; m++)
#pragma unroll
                        for (int i = odd; i < 4; i += 2)
                            to_gradient(scores[m][n][i], dscores[m][n][i], statistics, scale_log2);
                }
            if constexpr (kDrops)
                for_each_element<S::kM, S::kPart / 8>([&](int m, int n, int i, int, int) {
                    if (is_dropped(m, n, i)) scores[m][n][i] = 0;
                });
            add_weighted_rows<T, kHeadSize>(dvalue, scores, ptx::shared_address(dout), 0);
            add_weighted_rows<T, kHeadSize>(dkey, dscores, ptx::shared_address(query), 0);
        }
    }
    const int row_begin = begin + warp_row, count = at.seq_len - row_begin;
    store_rows<T, kHeadSize>(op.dqkv.as<T>() + at.key(b, kv_head, row_begin), at.qkv_step(), count, s.outgoing(),
                             warp_row, dkey, [&](int, int) { return op.scale; });
    store_rows<T, kHeadSize>(op.dqkv.as<T>() + at.value(b, kv_head, row_begin), at.qkv_step(), count, s.outgoing(),
                             warp_row, dvalue, [&](int, int) { return kDrops ? op.dropout.factor : 1.0f; });
}

template <class T, int kHeadSize> void launch_backward(const AttentionBackward& op, Stream stream) {
    auto start = [&](auto kernel, const char* name, int heads) {
        launch(kernel,
               {name, attention_grid(op, heads, Shape<kHeadSize>::kRows), Shape<kHeadSize>::kThreads,
                sizeof(Shared<T, kHeadSize>)},
               stream, op);
    };
    auto start_both = [&]<bool kDrops>() {
        start(attention_backward_query_kernel<T, kHeadSize, kDrops>, "attention_backward_query", op.n_head);
        start(attention_backward_key_kernel<T, kHeadSize, kDrops>, "attention_backward_key", op.n_kv_head);
    };
    op.dropout ? start_both.template operator()<true>() : start_both.template operator()<false>();
}

}  // namespace

void attention_backward(const AttentionBackward& op, Stream stream) {
    dispatch("attention_backward", {op.dqkv, op.dout, op.qkv, op.out}, [&]<class T>() {
        require_attention_sizes(op);
        require(reinterpret_cast<uintptr_t>(op.scratch) % 64 == 0,
                "attention_backward: scratch %p is not 64-byte aligned", op.scratch);
        if constexpr (sizeof(T) == 2)
            if (are_aligned(16, {op.dqkv, op.dout, op.qkv, op.out})) {
                if (op.head_size == 64) return launch_backward<T, 64>(op, stream);
                if (op.head_size == 128) return launch_backward<T, 128>(op, stream);
            }
        attention_backward_general<T>(op, stream);
    });
}

size_t attention_backward_scratch_bytes(const AttentionBackward& op) {
    return size_t(op.batch) * op.n_head * op.seq_len * sizeof(QueryStatistics);
}

}  // namespace ops

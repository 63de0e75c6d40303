// attention_backward for sm_90a, with the formulas of attention_backward.cu and five GEMMs instead of seven.
//
// A block processes one part of the key blocks of one kv head, in ascending order: 128 keys, 64 for each of two
// consumer warpgroups. The inner loop visits the tiles of queries that see the key block: 8192 numbers, which are 128
// rows with heads of 64 and 64 rows with heads of 128. In the third warpgroup, one warp loads (Q, dOut and statistics
// of a tile, K and V of a key block), and for each consumer one warp stores sums of dQ. A consumer, from tile to tile:
//
//     tensor cores  S^T | dP^T      |          | dV += P^T dOut | dQ = dS K | dK += dS^T Q | S^T of the next tile
//     its warps         | P^T: exp2 | dS^T,    | dS^T to shared |           | dQ to shared |
//                                   | rounding | memory, barrier|           | memory       |
//     a storing warp                                                                       | dQ to scratch
//
// S^T = K Q^T and dP^T = V dOut^T have keys as rows, so that P^T and dS^T, rounded, are A operands in registers for dV
// and dK, whose sums stay in registers. dS^T also goes to shared memory, where both consumers read it, transposed, for
// dQ: each computes 64 x 64 numbers over all 128 keys. Nothing but dK is in flight when a tile ends: with S^T or dS^T
// in flight as well, ptxas serializes the products.
//
// dQ is a sum over key blocks. The first key block of a part that sees a tile stores its product in scratch, FP32, and
// the others add to it (TMA reduction) after the copies of the key block before are complete. So the order is fixed,
// no memory is cleared, and no block waits for another. A last kernel adds the parts in order. The number of parts
// decides bits, so it depends only on seq_len, group and head size. There are batch * n_kv_head * parts blocks. Up to
// 6143 positions with heads of 64 and no groups are one part, so small batches leave multiprocessors idle.
//
// Per tile and consumer: 32 wgmma, 1280 tensor clocks; with heads of 64 (128) about 560 (390) issue slots of each warp,
// 792 (509) with a mask, counted in SASS. A quarter of the multiprocessor issues one warp of each consumer in the 2560
// tensor clocks of both; their exp2 need 1024 (512) of these. Shared memory at 128 bytes per clock: operands, dS, dQ
// and copies take about 1400 (1470) clocks per consumer, more than the products.
// Registers: 168 at launch; then 232 in consumers, 40 in the third warpgroup. Shared memory: 213 (227) KiB.
// FLOPs: 5 batch n_head head_size seq_len^2; with 1024 positions, masked parts of tiles add 12 %.
// Memory traffic: dqkv, out and lse once, dout twice, qkv once if the L2 cache holds the rows of a kv head; scratch: 16
// bytes per query and head, and the sums of dQ written and read once per part. GPT-2 124M with 64 x 1024 tokens, one
// part: 0.2 GB written and 0.2 GB read per layer, 0.09 ms at 4.3 TB/s, and 0.9 GB of stores and additions to the L2
// cache. The two products that attention_backward.cu computes twice instead are 103 GFLOP, 0.26 ms at 400 TFLOP/s.
// These times are computed; none of this kernel has been measured.
// Numerics: as in attention_backward.cu: P and dS (before scale) are rounded to T before multiplication, and all sums
// are float.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/attention/attention_backward_sm90.cuh"
#include "kernels/cuda/attention/attention_backward_sm90_block.cuh"
#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"

namespace ops {

namespace {

constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;

// ---- the consumers: each has 64 keys of the block, and half of the sums of dQ ----

// The differences of the descriptors of step k and of step 0, constants. So no register holds a descriptor per step.
template <class Tile> __device__ __forceinline__ constexpr uint64_t step_along_columns(int k) {
    return (Tile::kBoxBytes * uint32_t(k / 4) + uint32_t(k % 4 * 32)) / 16;
}
[[maybe_unused]] __device__ __forceinline__ constexpr uint64_t step_along_rows(int k) {
    return uint32_t(k * 16 * kBoxRowBytes) / 16;
}

// products (64 keys, kRows) = keys queries^T, for the consumer's keys.
template <class T, int kHeadSize>
__device__ __forceinline__ void start_dot_products(float (&products)[kTileQueries<kHeadSize> / 2], const char* keys,
                                                   int consumer, const char* queries) {
    using Of = BackwardTiles<kHeadSize>;
    const uint64_t a = Of::Keys::along_columns(ptx::shared_address(keys), 64 * consumer, 0);
    const uint64_t b = Of::Queries::along_columns(ptx::shared_address(queries), 0, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++)
        ptx::wgmma<Of::kRows, T>(products, a + step_along_columns<typename Of::Keys>(k),
                                 b + step_along_columns<typename Of::Queries>(k), k > 0);
    ptx::wgmma_commit();
}

// A matrix (64 keys, 16 kSteps) as A operands, rounded.
template <int kSteps> using Weights = uint32_t[kSteps][4];

// sums (64 keys, kHeadSize) += weights (64 keys, kRows) times queries.
template <class T, int kHeadSize>
__device__ __forceinline__ void start_weighted_rows(float (&sums)[kHeadSize / 2],
                                                    const Weights<kTileQueries<kHeadSize> / 16>& weights,
                                                    const char* queries) {
    using Of = BackwardTiles<kHeadSize>;
    const uint64_t b = Of::Queries::along_rows(ptx::shared_address(queries), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Of::kRows / 16; k++) ptx::wgmma<kHeadSize, T, 1>(sums, weights[k], b + step_along_rows(k));
    ptx::wgmma_commit();
}

// dquery (64 rows, 64 columns) = dscores keys, over all keys of the block: the second consumer has the second half of
// the rows with heads of 64, of the columns with heads of 128.
template <class T, int kHeadSize>
__device__ __forceinline__ void start_query_gradient(float (&dquery)[32], const char* dscores, const char* keys,
                                                     int consumer) {
    using Of = BackwardTiles<kHeadSize>;
    constexpr bool kSplitsRows = kHeadSize == kBoxColumns;
    const uint64_t a = Of::Scores::along_rows(ptx::shared_address(dscores), 0, kSplitsRows ? 64 * consumer : 0);
    const uint64_t b = Of::Keys::along_rows(ptx::shared_address(keys), 0, kSplitsRows ? 0 : 64 * consumer);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; k++)
        ptx::wgmma<64, T, 1, 1>(dquery, a + step_along_rows(k), b + step_along_rows(k), k > 0);
    ptx::wgmma_commit();
}

// Masks the scores of keys that the query does not see. Every query of the tile sees the keys from seen[kRows - 1] to
// seen[kRows]: the first key of its last query, and the last key of its first.
template <int kRows>
__device__ __forceinline__ void mask_scores(float (&scores)[kRows / 2], const int* seen, int first_key) {
    const int last_key = first_key + 63;
    if (seen[kRows - 1] <= first_key && last_key <= seen[kRows]) return;
    const uint32_t lane = threadIdx.x % 32;
    const int key = first_key + int(threadIdx.x % 128 / 32 * 16 + lane / 4);
#pragma unroll
    for (int n = 0; n < kRows / 8; n++) {
        const int2 first = *reinterpret_cast<const int2*>(seen + 8 * n + lane % 4 * 2);
        const int2 last = *reinterpret_cast<const int2*>(seen + kRows + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (key + 8 * half < first.x || key + 8 * half > last.x) scores[4 * n + 2 * half] = kMasked;
            if (key + 8 * half < first.y || key + 8 * half > last.y) scores[4 * n + 2 * half + 1] = kMasked;
        }
    }
}

// Replaces scores (keys, kRows) with probabilities.
template <int kRows>
__device__ __forceinline__ void to_probabilities(float (&scores)[kRows / 2], const float* statistics,
                                                 float scale_log2) {
#pragma unroll
    for (int n = 0; n < kRows / 8; n++) {
        const float2 lse_log2 = *reinterpret_cast<const float2*>(statistics + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[4 * n + i] =
                ptx::exp2_approx(fmaf(scores[4 * n + i], scale_log2, -(i % 2 ? lse_log2.y : lse_log2.x)));
    }
}

// Rounds the probabilities and the gradients of the scores (before scale). dprobabilities is dOut V^T, transposed.
template <class T, int kRows>
__device__ __forceinline__ void to_weights(Weights<kRows / 16>& weights, Weights<kRows / 16>& dweights,
                                           const float (&probabilities)[kRows / 2],
                                           const float (&dprobabilities)[kRows / 2], const float* statistics) {
#pragma unroll
    for (int n = 0; n < kRows / 8; n++) {
        const float2 dout_out = *reinterpret_cast<const float2*>(statistics + kRows + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 4 * n + 2 * half, register_of_step = n % 2 * 2 + half;
            weights[n / 2][register_of_step] = ptx::pack<T>(probabilities[i], probabilities[i + 1]);
            dweights[n / 2][register_of_step] =
                ptx::pack<T>(probabilities[i] * (dprobabilities[i] - dout_out.x),
                             probabilities[i + 1] * (dprobabilities[i + 1] - dout_out.y));
        }
    }
}

// Stores 16 rows and 16 columns of a warp, an A operand, at row `row` and column 16 `k` of a tile.
template <class Tile>
__device__ __forceinline__ void store_operand(char* tile, int row, int k, const uint32_t (&operand)[4]) {
    const uint32_t lane = threadIdx.x % 32, lane_row = lane % 16;
    const uint32_t first =
        ptx::shared_address(tile) + Tile::offset(row) + lane_row * kBoxRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
    ptx::stmatrix<4>((first ^ uint32_t(k % 4 * 32)) + Tile::offset(0, 16 * k), operand);
}

// Stores a warp's 16 rows of sums times `factor`, rounded. A box of 64 columns goes to the same box of the tile.
template <class T, int kHeadSize, class Tile>
__device__ __forceinline__ void store_gradient(char* tile, int row, const float (&sums)[kHeadSize / 2], float factor) {
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[i] = ptx::pack<T>(sums[8 * k + 2 * i] * factor, sums[8 * k + 2 * i + 1] * factor);
        store_operand<Tile>(tile, row, k, packed);
    }
}

// Passes a consumer's sums of dQ to the warp that stores them: 16 bytes per thread, then the next 16.
template <int kHeadSize>
__device__ __forceinline__ void pass_sums(BackwardShared<kHeadSize>& s, const float (&dquery)[32], int consumer) {
    ptx::bar_sync(SUMS_EMPTY + consumer, kSumsThreads);
    float4* to = reinterpret_cast<float4*>(s.sums[consumer]) + threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int n = 0; n < 8; n++)
        to[n * kWarpgroupThreads] = {dquery[4 * n], dquery[4 * n + 1], dquery[4 * n + 2], dquery[4 * n + 3]};
    ptx::fence_proxy_async();
    ptx::bar_arrive(SUMS_FULL + consumer, kSumsThreads);
}

// Releases a stage for the calling warp.
template <int kCount> __device__ __forceinline__ void release(RingBarriers<kCount>& ring, const RingPlace<kCount>& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release(at);
}

template <class T, int kHeadSize> class Consumer {
public:
    __device__ __forceinline__ Consumer(BackwardShared<kHeadSize>& shared, const BackwardArguments& arguments,
                                        int of_block)
        : s(shared), op(arguments), part(arguments), consumer(of_block), scale_log2(arguments.scale * kLog2E) {}

    __device__ __forceinline__ void run() {
        part.for_each_key_block<kHeadSize>([&](const KeyBlock& block) { process(block); });
    }

private:
    static constexpr int kRows = kTileQueries<kHeadSize>;

    __device__ __forceinline__ void process(const KeyBlock& block) {
        float dkey[kHeadSize / 2], dvalue[kHeadSize / 2];
#pragma unroll
        for (int i = 0; i < kHeadSize / 2; i++) dkey[i] = dvalue[i] = 0;
        const RingPlace<kStages> key_place = place_of<kStages>(block.round);
        const char* key = s.key[key_place.stage];
        s.key_ring.wait_full(key_place);
        float scores[kRows / 2], dscores[kRows / 2];
        start_scores(scores, key);
        s.value_ring.wait_full(place_of<1>(block.round));
        finish_scores(scores, dscores, block);
        for (int tile = block.begin;; tile++) {
            const RingPlace<kStages> place = place_of<kStages>(number);
            Weights<kRows / 16> weights, dweights;
            to_weights<T, kRows>(weights, dweights, scores, dscores, s.statistics[place.stage]);
            start_weighted_rows<T, kHeadSize>(dvalue, weights, s.dout[place.stage]);
            char* exchanged = s.dscores[place.stage];
#pragma unroll
            for (int k = 0; k < kRows / 16; k++)
                store_operand<typename BackwardTiles<kHeadSize>::Scores>(exchanged, first_row(), k, dweights[k]);
            ptx::fence_proxy_async();
            ptx::bar_sync(CONSUMERS, kConsumers * kWarpgroupThreads);
            float dquery[32];
            start_query_gradient<T, kHeadSize>(dquery, exchanged, key, consumer);
            start_weighted_rows<T, kHeadSize>(dkey, dweights, s.query[place.stage]);
            ptx::wgmma_wait<1>();  // for all products except dK
            release(s.dout_ring, place);
            pass_sums<kHeadSize>(s, dquery, consumer);
            number++;
            if (tile + 1 == block.end) break;
            start_scores(scores, key);
            ptx::wgmma_wait<1>();  // for dK
            release(s.query_ring, place);
            finish_scores(scores, dscores, block);
        }
        ptx::wgmma_wait<0>();
        release(s.query_ring, place_of<kStages>(number - 1));
        release(s.key_ring, key_place);
        if (s.dvalue() != s.value) release(s.value_ring, place_of<1>(block.round));
        store_gradients(block.first_key, dkey, dvalue);
        if (s.dvalue() == s.value) release(s.value_ring, place_of<1>(block.round));
        if (op.dqkv_amax) add_magnitudes(block.first_key, dkey, dvalue);
    }

    __device__ __forceinline__ void start_scores(float (&scores)[kRows / 2], const char* key) {
        const RingPlace<kStages> place = place_of<kStages>(number);
        s.query_ring.wait_full(place);
        start_dot_products<T, kHeadSize>(scores, key, consumer, s.query[place.stage]);
    }

    // Computes dOut V^T, and meanwhile the probabilities.
    __device__ __forceinline__ void finish_scores(float (&scores)[kRows / 2], float (&dscores)[kRows / 2],
                                                  const KeyBlock& block) {
        const RingPlace<kStages> place = place_of<kStages>(number);
        s.dout_ring.wait_full(place);
        start_dot_products<T, kHeadSize>(dscores, s.value, consumer, s.dout[place.stage]);
        ptx::wgmma_wait<1>();
        mask_scores<kRows>(scores, s.seen[place.stage], block.first_key + 64 * consumer);
        to_probabilities<kRows>(scores, s.statistics[place.stage], scale_log2);
        ptx::wgmma_wait<0>();
    }

    // The first of the warp's 16 rows of a key block.
    __device__ __forceinline__ int first_row() const {
        return 64 * consumer + int(threadIdx.x % kWarpgroupThreads / 32 * 16);
    }

    // Rounds the gradients of the warp's 16 keys and stores them through shared memory, which is free afterwards.
    __device__ __forceinline__ void store_gradients(int first_key, const float (&dkey)[kHeadSize / 2],
                                                    const float (&dvalue)[kHeadSize / 2]) {
        using Keys = typename BackwardTiles<kHeadSize>::Keys;
        ptx::bar_sync(CONSUMERS, kConsumers * kWarpgroupThreads);  // until the other consumer has multiplied dS
        store_gradient<T, kHeadSize, Keys>(s.dvalue(), first_row(), dvalue, 1);
        store_gradient<T, kHeadSize, Keys>(s.dkey(), first_row(), dkey, op.scale);
        ptx::fence_proxy_async();
        __syncwarp();
        const int position = first_key + first_row();
        if (threadIdx.x % 32 == 0 && position < part.work.seq_len) {
            const int column = (op.n_head + part.kv_head) * kHeadSize;
#pragma unroll
            for (int box = 0; box < kHeadSize; box += kBoxColumns) {
                const uint32_t offset = Keys::offset(first_row(), box);
                ptx::tma_store(&op.dqkv, ptx::shared_address(s.dkey()) + offset, column + box, position, part.b);
                ptx::tma_store(&op.dqkv, ptx::shared_address(s.dvalue()) + offset,
                               column + part.work.n_kv_head * kHeadSize + box, position, part.b);
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void add_magnitudes(int first_key, const float (&dkey)[kHeadSize / 2],
                                                   const float (&dvalue)[kHeadSize / 2]) {
        const auto tiles = [](const float(&sums)[kHeadSize / 2]) -> auto& {
            return reinterpret_cast<const float(&)[kHeadSize / 8][4]>(sums);
        };
        uint32_t largest = 0;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (first_key + first_row() + 8 * half + int(threadIdx.x % 32 / 4) < part.work.seq_len) {
                largest = largest_stored<T>(largest, tiles(dkey), half, op.scale);
                largest = largest_stored<T>(largest, tiles(dvalue), half, 1);
            }
        add_to_amax(op.dqkv_amax, largest);
    }

    BackwardShared<kHeadSize>& s;
    const BackwardArguments& op;
    const BackwardPart part;
    const int consumer;
    const float scale_log2;
    uint32_t number = 0;  // of the tile
};

template <class T, int kHeadSize>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_sm90_kernel(const __grid_constant__ BackwardArguments op) {
    if constexpr (ptx::kHasHopper) {
        auto& s = shared_memory<BackwardShared<kHeadSize>>();
        if (threadIdx.x == 0) {
            s.query_ring.init(kConsumerWarps);
            s.dout_ring.init(kConsumerWarps);
            s.key_ring.init(kConsumerWarps);
            s.value_ring.init(kConsumerWarps);
            ptx::fence_mbarrier_init();
        }
        __syncthreads();
        const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // a value for uniform registers
        if (warp >= 4) {
            ptx::setmaxnreg_inc<232>();
            Consumer<T, kHeadSize>(s, op, warp / 4 - 1).run();
        } else {
            ptx::setmaxnreg_dec<40>();
            if (warp == 0) load<kHeadSize>(s, op);
            if (warp == 1 || warp == 2) store_sums_of_queries<kHeadSize>(s, op, warp - 1);
        }
    }
}

bool takes(const AttentionBackward& op) {
    const Dtype type = op.qkv.dtype;
    return (op.head_size == 64 || op.head_size == 128) && (type == Dtype::bf16 || type == Dtype::fp16) &&
           op.dqkv.dtype == type && op.dout.dtype == type && op.out.dtype == type && !op.dropout && op.softcap == 0 &&
           !op.chunk && are_aligned(16, {op.dqkv, op.dout, op.qkv, op.out}) && op.batch <= 65535 &&
           op.n_kv_head <= 65535;
}

template <class T, int kHeadSize> void launch_backward(const BackwardPass& pass, Stream stream) {
    const AttentionBackward& op = pass.op;
    const AttentionLayout at(op);
    clear_amax("attention_backward", op.dqkv, true, stream);
    prepare_backward_sm90<T, kHeadSize>(pass, stream);
    const uint64_t sums_rows = pass.work.sums(pass.work.n_parts, 0, 0) * 16;
    const BackwardArguments arguments{
        .qkv = make_attention_map(op.qkv, at.qkv_step(), op, kRunRows),
        .dout = make_attention_map(op.dout, at.out_step(), op, kRunRows),
        .dqkv = make_attention_map(op.dqkv, at.qkv_step(), op, kRunRows),
        .sums = make_tensor_map(static_cast<const float*>(pass.scratch.sums),
                                {.rank = 2, .size = {256, sums_rows}, .strides = {1024}, .box = {256, 16}}),
        .work = pass.work,
        .statistics = pass.scratch.statistics,
        .seen = pass.scratch.seen,
        .tile_ends = pass.scratch.tile_ends,
        .n_head = op.n_head,
        .run_step = QueryBox<kHeadSize>::kRuns % pass.work.group,
        .position_step = QueryBox<kHeadSize>::kRuns / pass.work.group * kRunRows,
        .scale = op.scale,
        .dqkv_amax = op.dqkv.amax};
    const dim3 blocks(unsigned(pass.work.n_parts), unsigned(op.n_kv_head), unsigned(op.batch));
    launch(attention_backward_sm90_kernel<T, kHeadSize>,
           {"attention_backward_sm90", blocks, kThreads, sizeof(BackwardShared<kHeadSize>)}, stream, arguments);
    finish_backward_sm90<T, kHeadSize>(pass, stream);
}

}  // namespace

bool attention_backward_sm90(const AttentionBackward& op, Stream stream) {
    if (!takes(op)) return false;
    const BackwardWork work(op);
    const BackwardPass pass{op, work, BackwardScratch(work, op.head_size, op.scratch)};
    const auto start = [&]<class T>() {
        if (op.head_size == 64)
            launch_backward<T, 64>(pass, stream);
        else
            launch_backward<T, 128>(pass, stream);
    };
    if (op.qkv.dtype == Dtype::bf16)
        start.template operator()<bf16>();
    else
        start.template operator()<fp16>();
    return true;
}

size_t attention_backward_sm90_scratch_bytes(const AttentionBackward& op) {
    if (!takes(op)) return 0;
    return BackwardScratch(BackwardWork(op), op.head_size, nullptr).bytes;
}

}  // namespace ops

// Token and position embedding.
//
// Forward: one warp per position, packs of 128 bits; 6 bytes per 16-bit element, 4 without positions.
// Backward: one worker sums each row of a gradient in the order of positions, without float atomics. A stable radix
// sort (of integers, in scratch) sorts the positions by token. Then a warp processes 32 sorted positions and 64
// columns: for each token whose first position is among its own, it sums all rows of dout of that token, with 32 loads
// in flight. For dwpe, a thread sums over the batch. Reads dout twice and updates the rows of dwte that occur: 4 bytes
// per 16-bit element and 8 per element of those rows. Numerics: float sums in the order of positions, starting from the
// previous gradient, as on the CPU. A dwte that is overwritten is set to 0 first, 4 bytes per element.
#include <algorithm>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

namespace ops {

namespace {

// ---- forward --------------------------------------------------------------------------------------------------------

constexpr int kForwardThreads = 256;

template <class T> __device__ Pack<T> negative_zeros() {
    Floats<T, kPackSize<T>> zeros;
#pragma unroll
    for (float& value : zeros.value) value = -0.0f;
    return pack_floats(zeros);
}

template <class T, bool kAligned, bool kHasPositions>
__global__ void __launch_bounds__(kForwardThreads) embedding_forward_kernel(EmbeddingForward op) {
    constexpr int kStep = kWarpSize * kPackSize<T>;
    const size_t i = (size_t(blockIdx.x) * kForwardThreads + threadIdx.x) / kWarpSize;
    if (i >= size_t(op.batch) * op.seq_len) return;
    const int channels = op.channels;
    const int row = index_in_part(op.tokens[i], op.part.first_token, op.part.tokens);
    const T* __restrict__ token = op.wte.as<T>() + size_t(max(row, 0)) * channels;
    const int b = int(i) / op.seq_len, t = int(i) % op.seq_len;
    const size_t at = size_t(op.positions ? op.positions[i] : op.starts.start(b, op.batch) + t);
    const T* __restrict__ position = op.wpe.as<T>() + (kHasPositions ? at * channels : 0);
    T* __restrict__ out = op.out.as<T>() + i * channels;
#pragma unroll 4
    for (int c = int(threadIdx.x) % kWarpSize * kPackSize<T>; c < channels; c += kStep) {
        Pack<T> pack = row >= 0 ? load_pack<kAligned>(token + c, channels - c) : negative_zeros<T>();
        if constexpr (kHasPositions) {
            auto sum = unpack(pack);
            sum += unpack(load_pack<kAligned>(position + c, channels - c));
            pack = pack_floats(sum);
        }
        store_pack<kAligned>(out + c, pack, channels - c);
    }
}

// ---- positions sorted by token --------------------------------------------------------------------------------------

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kTile = 1024;  // positions per block, one per thread
constexpr int kTileWarps = kTile / kWarpSize;

// One pass of the sort: from order `from` to order `to`, by one digit of the tokens' rows in the part, [0, vocab).
// Other tokens are sorted to the end.
struct SortPass {
    const int* tokens;
    int first_token, vocab;
    const int* from;  // (n_positions), or null for the identity
    int* to;          // (n_positions)
    int* counts;      // (kDigits, n_tiles): the counts, then the destination of the first position
    int n_positions, n_tiles, shift;

    __device__ int position(int i) const { return from ? from[i] : i; }
    __device__ int digit(int position) const {
        const int row = index_in_part(tokens[position], first_token, vocab);
        return ((row >= 0 ? row : vocab) >> shift) & (kDigits - 1);
    }
};

using CountShared = int[kDigits];

// Counts the digits of a tile. Integer atomics, so the order does not matter.
__global__ void __launch_bounds__(kTile) embedding_backward_count_kernel(SortPass pass) {
    CountShared& s_count = shared_memory<CountShared>();
    const int i = int(blockIdx.x) * kTile + int(threadIdx.x);
    if (threadIdx.x < kDigits) s_count[threadIdx.x] = 0;
    __syncthreads();
    if (i < pass.n_positions) atomicAdd(&s_count[pass.digit(pass.position(i))], 1);
    __syncthreads();
    if (threadIdx.x < kDigits) pass.counts[size_t(threadIdx.x) * pass.n_tiles + blockIdx.x] = s_count[threadIdx.x];
}

using ScanShared = int[kTileWarps];

// counts[i] = sum of the counts before i. One block; a thread processes consecutive counts.
__global__ void __launch_bounds__(kTile) embedding_backward_scan_kernel(SortPass pass) {
    ScanShared& s_warp_sum = shared_memory<ScanShared>();
    const int n = kDigits * pass.n_tiles, per_thread = (n + kTile - 1) / kTile;
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    const int begin = min(n, int(threadIdx.x) * per_thread), end = min(n, begin + per_thread);
    int sum = 0;
    for (int i = begin; i < end; i++) sum += pass.counts[i];
    int upto = sum;  // over the lanes up to and including this one
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int before = __shfl_up_sync(kAllLanes, upto, distance);
        if (lane >= distance) upto += before;
    }
    if (lane == kWarpSize - 1) s_warp_sum[warp] = upto;
    __syncthreads();
    int place = upto - sum;
    for (int w = 0; w < warp; w++) place += s_warp_sum[w];
    for (int i = begin; i < end; i++) {
        const int count = pass.counts[i];
        pass.counts[i] = place;
        place += count;
    }
}

using ScatterShared = int[kTileWarps][kDigits];  // a warp's counts, then the destinations of its first positions

// Returns the lanes of the warp with the same digit as this one. Lanes without a position have the digit -1.
__device__ unsigned lanes_with_same_digit(int digit) {
    unsigned same = kAllLanes;
#pragma unroll
    for (int bit = 0; bit <= kDigitBits; bit++) {
        const unsigned set = __ballot_sync(kAllLanes, (digit >> bit) & 1);
        same &= (digit >> bit) & 1 ? set : ~set;
    }
    return same;
}

// Positions with the same digit keep their order: by tile, then by warp, then by lane.
__global__ void __launch_bounds__(kTile) embedding_backward_scatter_kernel(SortPass pass) {
    ScatterShared& s_place = shared_memory<ScatterShared>();
    const int i = int(blockIdx.x) * kTile + int(threadIdx.x);
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    for (int digit = lane; digit < kDigits; digit += kWarpSize) s_place[warp][digit] = 0;
    __syncwarp();
    const int position = i < pass.n_positions ? pass.position(i) : -1;
    const int digit = position >= 0 ? pass.digit(position) : -1;
    const unsigned same = lanes_with_same_digit(digit);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (digit >= 0 && rank == 0) s_place[warp][digit] = __popc(same);
    __syncthreads();
    if (threadIdx.x < kDigits) {
        int place = pass.counts[size_t(threadIdx.x) * pass.n_tiles + blockIdx.x];
        for (int w = 0; w < kTileWarps; w++) {
            const int count = s_place[w][threadIdx.x];
            s_place[w][threadIdx.x] = place;
            place += count;
        }
    }
    __syncthreads();
    if (digit >= 0) pass.to[s_place[warp][digit] + rank] = position;
}

// ---- sums of rows ---------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 256;
constexpr int kLaneColumns = 2;
constexpr int kWarpColumns = kWarpSize * kLaneColumns;  // 128 bytes of a row of a 16-bit type

template <class T> struct TokenSums {
    EmbeddingBackward op;
    const int* order;  // positions sorted by token
    int n_positions, n_slabs;

    // The row of dwte for sorted position i, or -1 if another part has it.
    __device__ int row(int i) const { return index_in_part(op.tokens[order[i]], op.first_token, op.vocab); }
};

// The 32 consecutive sorted positions of a warp, one per lane.
struct PositionGroup {
    int position;  // -1 after the end
    int token;     // its row in the part; -1 after the end and for tokens of other parts
};

template <class T> __device__ PositionGroup load_group(const TokenSums<T>& sums, int first) {
    const int i = first + int(threadIdx.x) % kWarpSize;
    if (i >= sums.n_positions) return {-1, -1};
    return {sums.order[i], sums.row(i)};
}

// Adds the rows of dout of `count` lanes in order, starting at lane `first`; load(position) loads this lane's columns,
// if it has some. kBatch loads are in flight before the first sum, because otherwise each row of a frequent token would
// cost a memory latency.
template <int kBatch, class T, class Load>
__device__ void add_rows(Floats<T, kLaneColumns>& sum, bool has_columns, Load load, const PositionGroup& group,
                         int first, int count) {
    for (int begin = 0; begin < count; begin += kBatch) {
        Pack<T, kLaneColumns> row[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int position = __shfl_sync(kAllLanes, group.position, (first + begin + k) % kWarpSize);
            row[k] = {};
            if (begin + k < count && has_columns) row[k] = load(position);
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            if (begin + k >= count) break;
            sum += unpack(row[k]);
        }
    }
}

// A warp processes group (warp / slabs) and columns (warp % slabs). The lanes of a warp do not diverge.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kSumThreads) embedding_backward_tokens_kernel(TokenSums<T> sums) {
    const size_t warp = (size_t(blockIdx.x) * kSumThreads + threadIdx.x) / kWarpSize;
    const int lane = int(threadIdx.x) % kWarpSize, channels = sums.op.channels;
    const int first = int(warp / sums.n_slabs) * kWarpSize;
    if (first >= sums.n_positions) return;
    const int column = int(warp % sums.n_slabs) * kWarpColumns + lane * kLaneColumns;
    const int available = channels - column;
    const T* __restrict__ dout = sums.op.dout.template as<T>();
    auto load = [&](int position) {
        return load_pack<kAligned, T, kLaneColumns>(dout + size_t(position) * channels + column, available);
    };

    const PositionGroup group = load_group(sums, first);
    int token_before = __shfl_up_sync(kAllLanes, group.token, 1);
    if (lane == 0) token_before = first > 0 ? sums.row(first - 1) : -1;
    unsigned begins = __ballot_sync(kAllLanes, group.token >= 0 && group.token != token_before);
    for (; begins; begins &= begins - 1) {
        const int token = __shfl_sync(kAllLanes, group.token, __ffs(int(begins)) - 1);
        float* row = sums.op.dwte + size_t(token) * channels + column;
        auto sum = unpack(load_pack<false, float, kLaneColumns>(row, available)).template as<T>();
        PositionGroup now = group;
        for (int next = first + kWarpSize;; next += kWarpSize) {
            const unsigned rows = __ballot_sync(kAllLanes, now.token == token);
            const bool goes_on = rows >> (kWarpSize - 1) & 1;
            PositionGroup following{-1, -1};
            if (goes_on) following = load_group(sums, next);
            if (rows == kAllLanes)
                add_rows<kWarpSize>(sum, available > 0, load, now, 0, kWarpSize);
            else if (rows)
                add_rows<8>(sum, available > 0, load, now, __ffs(int(rows)) - 1, __popc(rows));
            if (!goes_on) break;
            now = following;
        }
        store_pack<false>(row, pack_floats(sum.template as<float>()), available);
    }
}

constexpr int kPositionBatch = 8;  // rows of dout in flight

// One more than the last position of all chunks.
__device__ __host__ int end_of_positions(const EmbeddingBackward& op) {
    return std::max(op.starts.first, op.starts.second) + op.seq_len;
}

// A thread processes a pack of columns of one position's row.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kSumThreads) embedding_backward_positions_kernel(EmbeddingBackward op) {
    const T* __restrict__ dout = op.dout.as<T>();
    const int channels = op.channels, packs = (channels + kPackSize<T> - 1) / kPackSize<T>;
    const size_t i = size_t(blockIdx.x) * kSumThreads + threadIdx.x;
    const int position = int(i / packs), column = int(i % packs) * kPackSize<T>, available = channels - column;
    if (position >= (op.accumulate ? end_of_positions(op) : op.n_positions)) return;
    // The position's place in sequence b, or -1.
    auto place_in = [&](int b) {
        return b < op.batch ? index_in_part(position, op.starts.start(b, op.batch), op.seq_len) : -1;
    };
    float* row = op.dwpe + size_t(position) * channels + column;
    Floats<T, kPackSize<T>> sum{};
#pragma unroll
    for (int c = 0; c < kPackSize<T>; c++)
        if (op.accumulate && c < available) sum.value[c] = row[c];
    for (int first = 0; first < op.batch; first += kPositionBatch) {
        Pack<T> part[kPositionBatch];
#pragma unroll
        for (int k = 0; k < kPositionBatch; k++) {
            part[k] = {};
            const int t = place_in(first + k);
            if (t < 0) continue;
            const size_t from = size_t(first + k) * op.seq_len + t;
            part[k] = load_pack<kAligned>(dout + from * channels + column, available);
        }
#pragma unroll
        for (int k = 0; k < kPositionBatch; k++) {
            if (place_in(first + k) >= 0) sum += unpack(part[k]);
        }
    }
#pragma unroll
    for (int c = 0; c < kPackSize<T>; c++)
        if (c < available) row[c] = sum.value[c];
}

// ---- launchers ------------------------------------------------------------------------------------------------------

int n_tiles(int n_positions) { return (n_positions + kTile - 1) / kTile; }

// The keys are at most `vocab`, which stands for the tokens of other parts.
int n_passes(int vocab) { return (int(std::bit_width(unsigned(vocab))) + kDigitBits - 1) / kDigitBits; }

// Sorts positions by token. Scratch holds two orders, which the passes write alternately, and the counts.
const int* sort_positions(const EmbeddingBackward& op, Stream stream) {
    const int n = op.batch * op.seq_len;
    int* orders[2] = {static_cast<int*>(op.scratch), static_cast<int*>(op.scratch) + n};
    SortPass pass{.tokens = op.tokens,
                  .first_token = op.first_token,
                  .vocab = op.vocab,
                  .from = nullptr,
                  .to = orders[0],
                  .counts = orders[1] + n,
                  .n_positions = n,
                  .n_tiles = n_tiles(n),
                  .shift = 0};
    const dim3 tiles{unsigned(pass.n_tiles)};
    for (int p = 0; p < n_passes(op.vocab); p++) {
        pass.shift = p * kDigitBits;
        pass.to = orders[p % 2];
        launch(embedding_backward_count_kernel, {"embedding_backward, counts", tiles, kTile, sizeof(CountShared)},
               stream, pass);
        launch(embedding_backward_scan_kernel, {"embedding_backward, scan", dim3(1), kTile, sizeof(ScanShared)}, stream,
               pass);
        launch(embedding_backward_scatter_kernel, {"embedding_backward, scatter", tiles, kTile, sizeof(ScatterShared)},
               stream, pass);
        pass.from = pass.to;
    }
    return pass.to;
}

template <class T> void token_gradients(const EmbeddingBackward& op, Stream stream) {
    const int n = op.batch * op.seq_len;
    const TokenSums<T> sums{.op = op,
                            .order = sort_positions(op, stream),
                            .n_positions = n,
                            .n_slabs = (op.channels + kWarpColumns - 1) / kWarpColumns};
    const bool aligned = op.channels % kLaneColumns == 0 && are_aligned(kLaneColumns * sizeof(T), {op.dout});
    launch(aligned ? embedding_backward_tokens_kernel<T, true> : embedding_backward_tokens_kernel<T, false>,
           {"embedding_backward, tokens",
            blocks_for(size_t((n + kWarpSize - 1) / kWarpSize) * sums.n_slabs, kSumThreads / kWarpSize), kSumThreads},
           stream, sums);
}

template <class T> void position_gradients(const EmbeddingBackward& op, Stream stream) {
    const size_t rows = op.accumulate ? end_of_positions(op) : op.n_positions;
    const size_t packs = (op.channels + kPackSize<T> - 1) / kPackSize<T>;
    const bool aligned = op.channels % kPackSize<T> == 0 && are_aligned(16, {op.dout});
    launch(aligned ? embedding_backward_positions_kernel<T, true> : embedding_backward_positions_kernel<T, false>,
           {"embedding_backward, positions", blocks_for(rows * packs, kSumThreads), kSumThreads}, stream, op);
}

}  // namespace

void embedding_forward(const EmbeddingForward& op, Stream stream) {
    dispatch("embedding_forward", {op.out, op.wte, op.wpe}, [&]<class T>() {
        const bool aligned = op.channels % kPackSize<T> == 0 && are_aligned(16, {op.out, op.wte, op.wpe});
        auto kernel =
            op.wpe ? (aligned ? embedding_forward_kernel<T, true, true> : embedding_forward_kernel<T, false, true>)
                   : (aligned ? embedding_forward_kernel<T, true, false> : embedding_forward_kernel<T, false, false>);
        launch(kernel,
               {"embedding_forward", blocks_for(size_t(op.batch) * op.seq_len, kForwardThreads / kWarpSize),
                kForwardThreads},
               stream, op);
    });
}

void embedding_backward(const EmbeddingBackward& op, Stream stream) {
    dispatch("embedding_backward", {op.dout}, [&]<class T>() {
        require(op.batch > 0 && op.seq_len > 0 && op.channels > 0 && op.vocab > 0,
                "embedding_backward: batch %d, seq_len %d, channels %d, vocab %d", op.batch, op.seq_len, op.channels,
                op.vocab);
        require(!op.dwpe || end_of_positions(op) <= op.n_positions,
                "embedding_backward: the positions end at %d, but dwpe has %d rows", end_of_positions(op),
                op.n_positions);
        if (!op.accumulate_dwte)
            fill({.out = op.dwte, .count = size_t(op.vocab) * size_t(op.channels), .value = 0}, stream);
        token_gradients<T>(op, stream);
        if (op.dwpe) position_gradients<T>(op, stream);
    });
}

size_t embedding_backward_scratch_bytes(const EmbeddingBackward& op) {
    const int n = op.batch * op.seq_len;
    return (2 * size_t(n) + size_t(kDigits) * n_tiles(n)) * sizeof(int);
}

}  // namespace ops

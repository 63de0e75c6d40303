// Tiles of 16-bit numbers in shared memory, and the fragments of mma.m16n8k16.
//
// A tile has rows of kHeadSize numbers in packs of 16 bytes. Pack p of row r is stored at place p ^ (r % 8) of the row.
// So the same pack of eight rows, which ldmatrix reads at once, is in eight different groups of banks, and so are the
// packs of a row. All row numbers below start at a multiple of 8, so r % 8 depends only on the lane. Every other row of
// 96 numbers (12 packs) starts halfway through the banks, so p ^ (r / 2 % 4) has the same effect.
//
// Fragments are as in the PTX manual, with lane l, g = l / 4, q = l % 4: an accumulator (16, 8) holds columns
// 2q, 2q + 1 of row g, then of row g + 8. So two adjacent accumulators, rounded, are the A fragment of the next MMA.
#pragma once

#include "kernels/base/dropout.h"
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/attention/attention_layout.cuh"  // IWYU pragma: export
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"  // IWYU pragma: export
#include "kernels/numeric.h"
#include "kernels/shared/attention_layout.h"  // IWYU pragma: export
#include "kernels/tensor.h"

namespace ops {

inline constexpr int kPackNumbers = 8;  // numbers in 16 bytes

template <int kHeadSize> __device__ __forceinline__ uint32_t tile_offset(int row, int pack) {
    constexpr bool kWholeBanks = kHeadSize % 64 == 0;
    static_assert(kWholeBanks || kHeadSize % 64 == 32);
    return uint32_t(row * kHeadSize * 2 + ((pack ^ (kWholeBanks ? row & 7 : row >> 1 & 3)) << 4));
}

// The alignment of a tile.
template <int kHeadSize> inline constexpr int kTileAlignment = kHeadSize % 64 == 0 ? std::max(kHeadSize * 2, 256) : 256;

// Calls visit(row, pack) for this thread's share of a tile's packs.
template <int kHeadSize, int kRows, int kThreads, class Visit>
__device__ __forceinline__ void for_each_pack(Visit visit) {
    constexpr int kPacks = kHeadSize / kPackNumbers;
    const int first = threadIdx.x / kPacks;
#pragma unroll
    for (int pass = 0; pass < (kRows * kPacks + kThreads - 1) / kThreads; pass++) {
        if constexpr (kThreads % (8 * kPacks) == 0 && kRows * kPacks % kThreads == 0) {
            visit(first + pass * (kThreads / kPacks), int(threadIdx.x % kPacks));
        } else {
            const int number = int(threadIdx.x) + pass * kThreads;
            if (number < kRows * kPacks) visit(number / kPacks, number % kPacks);
        }
    }
}

// Starts copying `count` rows of kHeadSize numbers with stride `step` into a tile of kRows rows; the other rows become
// 0. The threads must wait for their copies and then pass a barrier.
template <int kHeadSize, int kRows, int kThreads, class T>
__device__ __forceinline__ void load_tile_async(T* tile, const T* inp, size_t step, int count) {
    const uint32_t to = ptx::shared_address(tile);
    for_each_pack<kHeadSize, kRows, kThreads>([&](int row, int pack) {
        const bool inside = row < count;
        const T* from = inp + (inside ? row : 0) * step + pack * kPackNumbers;
        ptx::cp_async<16>(to + tile_offset<kHeadSize>(row, pack), from, inside ? 16 : 0);
    });
}

// The same with row r at inp + place(r); if place(r) is negative, the row becomes 0.
template <int kHeadSize, int kRows, int kThreads, class T, class Place>
__device__ __forceinline__ void gather_tile_async(T* tile, const T* inp, Place place) {
    const uint32_t to = ptx::shared_address(tile);
    for_each_pack<kHeadSize, kRows, kThreads>([&](int row, int pack) {
        const int64_t from = place(row);
        ptx::cp_async<16>(to + tile_offset<kHeadSize>(row, pack), inp + (from < 0 ? 0 : from) + pack * kPackNumbers,
                          from < 0 ? 0 : 16);
    });
}

// The same for the rows of a block of queries; place(head, position) is a query's index, `step` the distance of two
// positions.
template <int kHeadSize, int kRows, int kThreads, class T, int kRun, bool kGrouped, class Place>
__device__ __forceinline__ void load_queries_async(T* tile, const T* inp, const QueryRows<kRun, kGrouped>& rows,
                                                   int seq_len, size_t step, Place place) {
    if constexpr (kGrouped)
        gather_tile_async<kHeadSize, kRows, kThreads>(tile, inp, [&](int row) {
            const int position = rows.position(row);
            return position < seq_len ? int64_t(place(rows.head(row), position)) : -1;
        });
    else
        load_tile_async<kHeadSize, kRows, kThreads>(tile, inp + place(rows.first_head, rows.begin), step,
                                                    seq_len - rows.begin);
}

// Starts copying tile `tile` of a head's keys and values, kRows rows each.
template <int kHeadSize, int kRows, int kThreads, class T>
__device__ __forceinline__ void load_keys_async(T* key_tile, T* value_tile, int tile, const KeyRows<T>& rows,
                                                const AttentionLayout& at) {
    const int begin = tile * kRows, count = at.seq_len - begin;
    load_tile_async<kHeadSize, kRows, kThreads>(key_tile, rows.keys + begin * rows.step, rows.step, count);
    load_tile_async<kHeadSize, kRows, kThreads>(value_tile, rows.values + begin * rows.step, rows.step, count);
    ptx::cp_async_commit();
}

// The shared address of pack 2 k + lane_pack of tile row `row` + lane_row, for ldmatrix. The tile is aligned to the
// size of its rows and `row` is a multiple of 8, so the swizzle of k is one XOR on the address of k = 0. So the
// compiler does not keep an address in a register for each k. (With 96 numbers per row, only groups of four packs are
// permuted.)
template <int kHeadSize>
__device__ __forceinline__ uint32_t pack_address(uint32_t tile, int row, int lane_row, int k, int lane_pack) {
    const uint32_t first = tile + tile_offset<kHeadSize>(lane_row, lane_pack);
    if constexpr (kHeadSize % 64 == 0)
        return (first ^ uint32_t(k * 32)) + row * kHeadSize * 2;
    else
        return (first ^ uint32_t(k % 2 * 32)) + k / 2 * 64 + row * kHeadSize * 2;
}

// A fragment: tile rows [row, row + 16), columns [16 k, 16 k + 16).
template <int kHeadSize> __device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(a, pack_address<kHeadSize>(tile, row, lane % 16, k, lane / 16));
}

// Two B fragments for A tile^T: tile rows [row, row + 16) are columns of the result; sums are over tile columns
// [16 k, 16 k + 16).
template <int kHeadSize>
__device__ __forceinline__ void load_b_of_transposed(uint32_t (&b)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(b, pack_address<kHeadSize>(tile, row, lane / 16 * 8 + lane % 8, k, lane / 8 % 2));
}

// Two B fragments for A tile: sums are over tile rows [row, row + 16); columns [16 n, 16 n + 16) of the result.
template <int kHeadSize> __device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int row, int n) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4<true>(b, pack_address<kHeadSize>(tile, row, lane % 16, n, lane / 16));
}

// The dot product of 8 pairs of numbers.
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

// The rows of a warp that are the A operand of every MMA: (16 kM, kHeadSize). The fragments of the first kHeld steps of
// 16 columns stay in registers; the others are read from the tile each time.
template <int kHeadSize, int kM, int kHeld> class StationaryRows {
public:
    __device__ __forceinline__ StationaryRows(uint32_t tile, int row) : tile_(tile), row_(row) {
#pragma unroll
        for (int k = 0; k < kHeld; k++) read(held_[k], k);
    }

    __device__ __forceinline__ void fragment(uint32_t (&a)[kM][4], int k) const {
        if (k >= kHeld) return read(a, k);
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = held_[k][m][i];
    }

private:
    __device__ __forceinline__ void read(uint32_t (&a)[kM][4], int k) const {
#pragma unroll
        for (int m = 0; m < kM; m++) load_a<kHeadSize>(a[m], tile_, row_ + 16 * m, k);
    }

    uint32_t tile_;
    int row_;
    uint32_t held_[kHeld == 0 ? 1 : kHeld][kM][4];
};

// acc (16 kM, 8 kN) += rows . tile[row, row + 8 kN)^T at step k of the sum over the head's columns.
template <class T, int kHeadSize, int kM, int kN, int kHeld>
__device__ __forceinline__ void add_dot_products(float (&acc)[kM][kN][4],
                                                 const StationaryRows<kHeadSize, kM, kHeld>& rows, uint32_t tile,
                                                 int row, int k) {
    uint32_t a[kM][4];
    rows.fragment(a, k);
#pragma unroll
    for (int pair = 0; pair < kN / 2; pair++) {
        uint32_t b[4];
        load_b_of_transposed<kHeadSize>(b, tile, row + 16 * pair, k);
#pragma unroll
        for (int m = 0; m < kM; m++) {
            ptx::mma_m16n8k16<T>(acc[m][2 * pair], a[m], b, acc[m][2 * pair]);
            ptx::mma_m16n8k16<T>(acc[m][2 * pair + 1], a[m], b + 2, acc[m][2 * pair + 1]);
        }
    }
}

// acc (16 kM, kHeadSize) += weights (16 kM, 8 kN), rounded to T, times tile[row, row + 8 kN).
template <class T, int kHeadSize, int kM, int kN>
__device__ __forceinline__ void add_weighted_rows(float (&acc)[kM][kHeadSize / 8][4], const float (&weights)[kM][kN][4],
                                                  uint32_t tile, int row) {
#pragma unroll
    for (int k = 0; k < kN / 2; k++) {
        uint32_t a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&w)[4] = weights[m][2 * k + i / 2];
                a[m][i] = ptx::pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
            }
#pragma unroll
        for (int pair = 0; pair < kHeadSize / 16; pair++) {
            uint32_t b[4];
            load_b<kHeadSize>(b, tile, row + 16 * k, pair);
#pragma unroll
            for (int m = 0; m < kM; m++) {
                ptx::mma_m16n8k16<T>(acc[m][2 * pair], a[m], b, acc[m][2 * pair]);
                ptx::mma_m16n8k16<T>(acc[m][2 * pair + 1], a[m], b + 2, acc[m][2 * pair + 1]);
            }
        }
    }
}

// Calls visit(m, n, i, row, column) for every element of an accumulator (16 kM, 8 kN) in this lane.
template <int kM, int kN, class Visit> __device__ __forceinline__ void for_each_element(Visit visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) visit(m, n, i, 16 * m + i / 2 * 8 + lane / 4, 8 * n + lane % 4 * 2 + i % 2);
}

// Calls visit(m, n, i, kept) for every element of scores (16 kM queries, 8 kN keys). The first row in the block and the
// first key are multiples of 16. One call of philox() decides on the lane's elements of a square of 16.
template <int kM, int kN, class Rows, class Visit>
__device__ __forceinline__ void for_each_decision(const DropoutMask& mask, uint64_t sample_key, const Rows& rows,
                                                  int row, const VisibleKeys& visible, int key, Visit visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int square = 0; square < kN / 2; square++) {
            const Philox random =
                mask.words(sample_key, rows.head(row + 16 * m),
                           mask.query_call(visible.query_position(rows.position(row + 16 * m))) + lane / 4,
                           mask.key_call(visible.key_position(key + 16 * square)) + lane % 4);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) visit(m, 2 * square + n, i, mask.keeps(random.word[i / 2 * 2 + n], i % 2));
        }
}

// The same for scores (16 kM keys, 16 queries). A lane needs half of the decisions of two calls. m and i are not
// constants, because several calls at a time need more registers than are available.
template <int kM, class Visit>
__device__ __forceinline__ void for_each_decision_of_transposed(const DropoutMask& mask, uint64_t sample_key, int head,
                                                                const VisibleKeys& visible, int query, int key,
                                                                Visit visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int m = 0; m < kM; m++)
#pragma unroll 1
        for (int odd = 0; odd < 2; odd++) {
            const Philox random =
                mask.words(sample_key, head, mask.query_call(visible.query_position(query)) + lane % 4 * 2 + odd,
                           mask.key_call(visible.key_position(key + 16 * m)) + lane / 8);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    visit(m, n, 2 * half + odd, mask.keeps(random.word[2 * n + half], lane / 4 % 2));
        }
}

// out[place(r)] = acc[r] * factor for the warp's rows r with place(r) >= 0, 16 bytes per lane. factor(m, half) is the
// factor of row 16 m + 8 half + g. To rearrange the rows, the warp uses its own rows, starting at `row`, of a tile that
// no other warp reads anymore. Adds the rows to `amax` if it is not null.
template <class T, int kHeadSize, int kM, class Place, class Factor>
__device__ __forceinline__ void scatter_rows(T* out, float* amax, T* tile, int row,
                                             const float (&acc)[kM][kHeadSize / 8][4], Place place, Factor factor) {
    constexpr int kPacks = kHeadSize / kPackNumbers;
    const int lane = threadIdx.x % 32;
    char* bytes = reinterpret_cast<char*>(tile);
    uint32_t largest = 0;
    __syncwarp();  // wait until other lanes have read these rows
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float f = factor(m, half);
            const int r = 16 * m + 8 * half + lane / 4;
            if (amax && place(r) >= 0) largest = largest_stored<T>(largest, acc[m], half, f);
#pragma unroll
            for (int n = 0; n < kPacks; n++)
                *reinterpret_cast<uint32_t*>(bytes + tile_offset<kHeadSize>(row + r, n) + lane % 4 * 4) =
                    ptx::pack<T>(acc[m][n][2 * half] * f, acc[m][n][2 * half + 1] * f);
        }
    if (amax) add_to_amax(amax, largest);
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < 16 * kM * kPacks / 32; pass++) {
        const int r = (pass * 32 + lane) / kPacks, pack = (pass * 32 + lane) % kPacks;
        const int64_t to = place(r);
        if (to >= 0)
            *reinterpret_cast<uint4*>(out + to + pack * kPackNumbers) =
                *reinterpret_cast<const uint4*>(bytes + tile_offset<kHeadSize>(row + r, pack));
    }
}

// Calls visit(sums, to) for the lane's pairs of adjacent columns of the warp's rows r with place(r) >= 0: acc's first
// element, and the pair's index in an array of rows. So FP32 sums in memory need no shared memory.
template <int kHeadSize, int kM, class Acc, class Place, class Visit>
__device__ __forceinline__ void for_each_pair(Acc& acc, Place place, Visit visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = place(16 * m + 8 * half + lane / 4);
            if (row < 0) continue;
#pragma unroll
            for (int n = 0; n < kHeadSize / 8; n++) visit(&acc[m][n][2 * half], row + 8 * n + lane % 4 * 2);
        }
}

// acc = these rows of inp.
template <int kHeadSize, int kM, class Place>
__device__ __forceinline__ void load_sums(float (&acc)[kM][kHeadSize / 8][4], const float* inp, Place place) {
    for_each_pair<kHeadSize, kM>(acc, place, [&](float* pair, int64_t from) {
        const float2 sums = *reinterpret_cast<const float2*>(inp + from);
        pair[0] = sums.x, pair[1] = sums.y;
    });
}

// out = or += acc * factor for these rows.
template <int kHeadSize, int kM, class Place>
__device__ __forceinline__ void store_sums(float* out, const float (&acc)[kM][kHeadSize / 8][4], Place place,
                                           float factor = 1, bool accumulate = false) {
    for_each_pair<kHeadSize, kM>(acc, place, [&](const float* pair, int64_t to) {
        float2* sums = reinterpret_cast<float2*>(out + to);
        const float2 before = accumulate ? *sums : float2{0, 0};
        *sums = float2{fmaf(pair[0], factor, before.x), fmaf(pair[1], factor, before.y)};
    });
}

// The same for `count` rows with stride `step`.
template <class T, int kHeadSize, int kM, class Factor>
__device__ __forceinline__ void store_rows(T* out, float* amax, size_t step, int count, T* tile, int row,
                                           const float (&acc)[kM][kHeadSize / 8][4], Factor factor) {
    const auto place = [&](int r) { return r < count ? int64_t(r * step) : -1; };
    scatter_rows<T, kHeadSize>(out, amax, tile, row, acc, place, factor);
}

// The same for rows of a block of queries; place(head, position) is a query's index, `step` the distance of two
// positions.
template <class T, int kHeadSize, int kM, int kRun, bool kGrouped, class Place, class Factor>
__device__ __forceinline__ void store_queries(View out, const QueryRows<kRun, kGrouped>& rows, int seq_len, size_t step,
                                              Place place, T* tile, int row, const float (&acc)[kM][kHeadSize / 8][4],
                                              Factor factor) {
    const auto place_of_row = [&](int r) {
        const int position = rows.position(row + r);
        return position < seq_len ? int64_t(place(rows.head(row + r), position)) : -1;
    };
    const int begin = rows.begin + row;
    if constexpr (kGrouped)
        scatter_rows<T, kHeadSize>(out.as<T>(), out.amax, tile, row, acc, place_of_row, factor);
    else
        store_rows<T, kHeadSize>(out.as<T>() + place(rows.first_head, begin), out.amax, step, seq_len - begin, tile,
                                 row, acc, factor);
}

}  // namespace ops

// LayerNorm and RMSNorm, forward: mean, rstd, out = (inp - mean) rstd weight + bias, optionally after adding a branch.
// RMSNorm uses a mean of 0; an absent weight counts as 1, an absent bias as 0 (norm_parts.cuh).
//
// One warp per row. The row is read once and stays in registers in the storage type: lane l holds the packs at columns
// (32 p + l) kPackSize. Rows of more than 2048 columns use a block each and are read three times, the second and third
// time from the cache. Moved per 16-bit element: 4 bytes, 8 with a branch.
// Numerics: float sums; the variance is computed from the centered row (two passes over registers). The order of sums
// does not depend on the packs per warp or on alignment, so a row gives the same bits with and without a branch.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_parts.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpSize;
constexpr int kMaxRegisterCols = 2048;  // 32 registers of a 16-bit row, 64 of a float row
constexpr int kWideThreads = 512;
constexpr int kWideWarps = kWideThreads / kWarpSize;

// Blocks per SM, which limit the registers per thread: 80 for up to 1024 columns of 16 bits, 128 for 32 bits.
template <class T, int kPacks>
inline constexpr int kMinBlocks = kPacks <= 4                     ? 3
                                  : sizeof(T) == 4 && kPacks <= 8 ? 2
                                                                  : 1;

template <class T> constexpr int packs_for(int cols) { return cols / (kWarpSize * kPackSize<T>); }

// ---- a row in a warp's registers ------------------------------------------------------------------------------------

template <class T, int kPacks> struct Row { Pack<T> pack[kPacks]; };

template <class T> __device__ int column_of(int pack) {
    return (pack * kWarpSize + int(threadIdx.x) % kWarpSize) * kPackSize<T>;
}

// Elements after the end of the row are 0.
template <bool kAligned, class T, int kPacks> __device__ Row<T, kPacks> load_row(const T* from, int cols) {
    Row<T, kPacks> row{};
#pragma unroll
    for (int p = 0; p < kPacks; p++)
        if (column_of<T>(p) < cols) row.pack[p] = load_pack<kAligned>(from + column_of<T>(p), cols - column_of<T>(p));
    return row;
}

template <bool kAligned, class T, int kPacks> __device__ void store_row(T* to, const Row<T, kPacks>& row, int cols) {
#pragma unroll
    for (int p = 0; p < kPacks; p++)
        if (column_of<T>(p) < cols) store_pack<kAligned>(to + column_of<T>(p), row.pack[p], cols - column_of<T>(p));
}

// a + b, rounded to T.
template <class T> __device__ Pack<T> sum_of(const Pack<T>& a, const Pack<T>& b) {
    auto sum = unpack(a);
    sum += unpack(b);
    return pack_floats(sum);
}

template <class T> __device__ float pack_sum(const Pack<T>& pack) {
    auto x = unpack(pack);
    float sum = 0;
#pragma unroll
    for (float value : x.value) sum += value;
    return sum;
}

// Sum of squared differences from the mean over the first `available` elements.
template <class T> __device__ float pack_squares(const Pack<T>& pack, float mean, int available) {
    auto x = unpack(pack);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) {
        const float centered = x.value[i] - mean;
        squares = i < available ? fmaf(centered, centered, squares) : squares;
    }
    return squares;
}

// Loads a pack of a weight or bias at column `col`. If it is absent, all elements are `absent`.
template <NormParts parts, bool kAligned, class T>
__device__ Pack<T> load_parameter(const T* parameter, int col, int cols, float absent) {
    if (!has<parts>(parameter)) return repeated<T>(absent);
    return load_pack<kAligned>(parameter + col, cols - col);
}

template <class T>
__device__ Pack<T> normalized(const Pack<T>& pack, const Pack<T>& weight, const Pack<T>& bias, float mean, float rstd) {
    auto x = unpack(pack), w = unpack(weight), b = unpack(bias);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) x.value[i] = fmaf((x.value[i] - mean) * rstd, w.value[i], b.value[i]);
    return pack_floats(x);
}

__device__ float rstd_of(float squares, int cols, float eps) { return 1.0f / sqrtf(squares / float(cols) + eps); }

// ---- one warp per row -----------------------------------------------------------------------------------------------

// With kHasBranch, the row is the sum of two rows and is stored.
template <class T, int kPacks, bool kAligned, bool kHasBranch, NormParts parts>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T, kPacks>)
    residual_norm_forward_kernel(ResidualNormForward op) {
    const T* __restrict__ inp = op.inp.as<T>();
    const T* __restrict__ branch = op.branch.as<T>();
    const T* __restrict__ weight = op.weight.as<T>();
    const T* __restrict__ bias = op.bias.as<T>();
    const int row = int(blockIdx.x) * kRowsPerBlock + int(threadIdx.x) / kWarpSize, cols = op.cols;
    if (row >= op.rows) return;
    const size_t begin = size_t(row) * cols;
    Row<T, kPacks> x = load_row<kAligned, T, kPacks>(inp + begin, cols);
    if constexpr (kHasBranch) {
        const Row<T, kPacks> y = load_row<kAligned, T, kPacks>(branch + begin, cols);
#pragma unroll
        for (int p = 0; p < kPacks; p++) x.pack[p] = sum_of(x.pack[p], y.pack[p]);
        store_row<kAligned>(op.residual.as<T>() + begin, x, cols);
    }

    float mean = 0;
    if (has_mean<parts>(op.mean)) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kPacks; p++) sum += pack_sum(x.pack[p]);
        mean = warp_sum(sum) / float(cols);
    }

    float squares = 0;
#pragma unroll
    for (int p = 0; p < kPacks; p++)
        if (column_of<T>(p) < cols) squares += pack_squares(x.pack[p], mean, cols - column_of<T>(p));
    const float rstd = rstd_of(warp_sum(squares), cols, op.eps);

    Row<T, kPacks> out;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
        const int col = column_of<T>(p);
        if (col >= cols) continue;
        out.pack[p] = normalized(x.pack[p], load_parameter<parts, kAligned>(weight, col, cols, 1),
                                 load_parameter<parts, kAligned>(bias, col, cols, 0), mean, rstd);
    }
    store_row<kAligned>(op.out.as<T>() + begin, out, cols);
    if (kGivesAmax<T, kAligned> && op.out.amax) {
        uint32_t largest = 0;
#pragma unroll
        for (int p = 0; p < kPacks; p++)
            if (column_of<T>(p) < cols) largest = largest_magnitude(largest, out.pack[p]);
        add_to_amax(op.out.amax, largest);
    }
    if (threadIdx.x % kWarpSize == 0) {
        if (has_mean<parts>(op.mean)) op.mean[row] = mean;
        op.rstd[row] = rstd;
    }
}

// ---- one block per row ----------------------------------------------------------------------------------------------

struct WideShared {
    float sums[kWideWarps];
    float squares[kWideWarps];
};

// The same. A thread only reads columns that it has read or written before.
template <class T, bool kAligned, bool kHasBranch, NormParts parts>
__global__ void __launch_bounds__(kWideThreads) residual_norm_forward_wide_kernel(ResidualNormForward op) {
    WideShared& s = shared_memory<WideShared>();
    constexpr int kStep = kWideThreads * kPackSize<T>;
    const int row = int(blockIdx.x), cols = op.cols, first = int(threadIdx.x) * kPackSize<T>;
    const size_t begin = size_t(row) * cols;
    const T* __restrict__ inp = op.inp.as<T>() + begin;
    const T* __restrict__ branch = op.branch.as<T>();
    const T* __restrict__ weight = op.weight.as<T>();
    const T* __restrict__ bias = op.bias.as<T>();
    const T* x = kHasBranch ? op.residual.as<T>() + begin : inp;

    float sum = 0;
    for (int col = first; col < cols; col += kStep) {
        Pack<T> pack = load_pack<kAligned>(inp + col, cols - col);
        if constexpr (kHasBranch) {
            pack = sum_of(pack, load_pack<kAligned>(branch + begin + col, cols - col));
            store_pack<kAligned>(op.residual.as<T>() + begin + col, pack, cols - col);
        }
        if (has_mean<parts>(op.mean)) sum += pack_sum(pack);
    }
    const float mean = has_mean<parts>(op.mean) ? block_sum(sum, s.sums) / float(cols) : 0.0f;
    float squares = 0;
    for (int col = first; col < cols; col += kStep)
        squares += pack_squares(load_pack<kAligned>(x + col, cols - col), mean, cols - col);
    const float rstd = rstd_of(block_sum(squares, s.squares), cols, op.eps);

    T* out = op.out.as<T>() + begin;
    uint32_t largest = 0;
    for (int col = first; col < cols; col += kStep) {
        const int available = cols - col;
        const Pack<T> pack =
            normalized(load_pack<kAligned>(x + col, available), load_parameter<parts, kAligned>(weight, col, cols, 1),
                       load_parameter<parts, kAligned>(bias, col, cols, 0), mean, rstd);
        store_pack<kAligned>(out + col, pack, available);
        if (kGivesAmax<T, kAligned> && op.out.amax) largest = largest_magnitude(largest, pack);
    }
    if (kGivesAmax<T, kAligned> && op.out.amax) add_to_amax(op.out.amax, largest);
    if (threadIdx.x == 0) {
        if (has_mean<parts>(op.mean)) op.mean[row] = mean;
        op.rstd[row] = rstd;
    }
}

// ---- launchers ------------------------------------------------------------------------------------------------------

// Launches the smallest instance that the row fits into. Unaligned rows, and LayerNorms without weight or bias, have
// only two instances.
template <class T, bool kHasBranch, bool kAligned, NormParts parts>
void launch_rows(const ResidualNormForward& op, Stream stream) {
    auto launch_narrow = [&]<int kCols>() {
        launch(residual_norm_forward_kernel<T, packs_for<T>(kCols), kAligned, kHasBranch, parts>,
               {"residual_norm_forward", blocks_for(size_t(op.rows), kRowsPerBlock), kThreads}, stream, op);
    };
    if (op.cols > kMaxRegisterCols)
        return launch(residual_norm_forward_wide_kernel<T, kAligned, kHasBranch, parts>,
                      {"residual_norm_forward", blocks_for(size_t(op.rows), 1), kWideThreads, sizeof(WideShared)},
                      stream, op);
    if constexpr (parts != NormParts::any) {
        if (op.cols <= 768) return launch_narrow.template operator()<768>();
        if (op.cols <= 1024) return launch_narrow.template operator()<1024>();
    }
    launch_narrow.template operator()<kMaxRegisterCols>();
}

template <class T, bool kHasBranch> void launch_rows(const ResidualNormForward& op, Stream stream) {
    const bool aligned =
        op.cols % kPackSize<T> == 0 && are_aligned(16, {op.residual, op.out, op.inp, op.branch, op.weight, op.bias});
    clear_amax("residual_norm_forward", op.out, aligned, stream);
    if (!aligned) return launch_rows<T, kHasBranch, false, NormParts::any>(op, stream);
    switch (norm_parts(op.mean, bool(op.weight), bool(op.bias))) {
        case NormParts::all: return launch_rows<T, kHasBranch, true, NormParts::all>(op, stream);
        case NormParts::no_mean: return launch_rows<T, kHasBranch, true, NormParts::no_mean>(op, stream);
        case NormParts::any: return launch_rows<T, kHasBranch, true, NormParts::any>(op, stream);
    }
}

}  // namespace

void residual_norm_forward(const ResidualNormForward& op, Stream stream) {
    dispatch("residual_norm_forward", {op.residual, op.out, op.inp, op.branch, op.weight, op.bias}, [&]<class T>() {
        require(op.cols > 0, "residual_norm_forward: cols is %d, but must be positive", op.cols);
        require(bool(op.residual) == bool(op.branch), "residual_norm_forward: branch requires residual and vice versa");
        if (op.rows <= 0) return;
        op.branch ? launch_rows<T, true>(op, stream) : launch_rows<T, false>(op, stream);
    });
}

}  // namespace ops

// Layer normalisation, forward: mean, rstd, out = (inp - mean) rstd weight + bias, with or without a sum before it.
//
// One warp per row, the row kept in registers as it was stored, so it is read once: lane l holds the packs at columns
// (32 p + l) kPackSize. Rows beyond 2048 columns take a block each and are read three times, out of the cache after the
// first. Moved per element of 16 bits: norm_forward 4 bytes, residual_norm_forward 8.
// Numerics: sums in float, the variance from the centered row (two passes over registers). How many packs a warp keeps
// and whether accesses are whole changes no order, so both ops give the same bits for the same row.
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpSize;
constexpr int kMaxRegisterCols = 2048;  // 32 registers of a 16-bit row, 64 of a float row
constexpr int kWideThreads = 512;
constexpr int kWideWarps = kWideThreads / kWarpSize;

// Blocks on a processor, which bound the registers of a thread: 80 for up to 1024 columns of 16 bits.
template <int kPacks> inline constexpr int kMinBlocks = kPacks <= 4 ? 3 : 1;

template <class T> constexpr int packs_for(int cols) { return cols / (kWarpSize * kPackSize<T>); }

// ---- a row in a warp's registers ------------------------------------------------------------------------------------

template <class T, int kPacks> struct Row { Pack<T> pack[kPacks]; };

template <class T> __device__ int column_of(int pack) {
    return (pack * kWarpSize + int(threadIdx.x) % kWarpSize) * kPackSize<T>;
}

// Elements beyond the row are 0.
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
    auto sum = unpack(a), other = unpack(b);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) sum.value[i] += other.value[i];
    return pack_floats(sum);
}

template <class T> __device__ float pack_sum(const Pack<T>& pack) {
    auto x = unpack(pack);
    float sum = 0;
#pragma unroll
    for (float value : x.value) sum += value;
    return sum;
}

// Of the first `available` elements.
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

template <class T>
__device__ Pack<T> normalized(const Pack<T>& pack, const Pack<T>& weight, const Pack<T>& bias, float mean, float rstd) {
    auto x = unpack(pack), w = unpack(weight), b = unpack(bias);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) x.value[i] = fmaf((x.value[i] - mean) * rstd, w.value[i], b.value[i]);
    return pack_floats(x);
}

__device__ float rstd_of(float squares, int cols, float eps) { return 1.0f / sqrtf(squares / float(cols) + eps); }

// ---- one warp per row -----------------------------------------------------------------------------------------------

// Both ops, for a row in registers.
template <bool kAligned, class T, int kPacks, class Op>
__device__ void normalize_row(const Op& op, const Row<T, kPacks>& x, int row) {
    const T* __restrict__ weight = op.weight.template as<T>();
    const T* __restrict__ bias = op.bias.template as<T>();
    const int cols = op.cols;

    float sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; p++) sum += pack_sum(x.pack[p]);
    const float mean = warp_sum(sum) / float(cols);

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
        out.pack[p] = normalized(x.pack[p], load_pack<kAligned>(weight + col, cols - col),
                                 load_pack<kAligned>(bias + col, cols - col), mean, rstd);
    }
    store_row<kAligned>(op.out.template as<T>() + size_t(row) * cols, out, cols);
    if (threadIdx.x % kWarpSize == 0) {
        op.mean[row] = mean;
        op.rstd[row] = rstd;
    }
}

// The row of the calling thread's warp; rows or more if there is none left.
__device__ int row_of_warp() { return int(blockIdx.x) * kRowsPerBlock + int(threadIdx.x) / kWarpSize; }

template <class T, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kPacks>) norm_forward_kernel(NormForward op) {
    const T* __restrict__ inp = op.inp.as<T>();
    const int row = row_of_warp();
    if (row >= op.rows) return;
    normalize_row<kAligned>(op, load_row<kAligned, T, kPacks>(inp + size_t(row) * op.cols, op.cols), row);
}

template <class T, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kPacks>) residual_norm_forward_kernel(ResidualNormForward op) {
    const T* __restrict__ inp = op.inp.as<T>();
    const T* __restrict__ branch = op.branch.as<T>();
    const int row = row_of_warp();
    if (row >= op.rows) return;
    const size_t begin = size_t(row) * op.cols;
    Row<T, kPacks> x = load_row<kAligned, T, kPacks>(inp + begin, op.cols);
    const Row<T, kPacks> y = load_row<kAligned, T, kPacks>(branch + begin, op.cols);
#pragma unroll
    for (int p = 0; p < kPacks; p++) x.pack[p] = sum_of(x.pack[p], y.pack[p]);
    store_row<kAligned>(op.residual.as<T>() + begin, x, op.cols);
    normalize_row<kAligned>(op, x, row);
}

// ---- one block per row ----------------------------------------------------------------------------------------------

struct WideShared {
    float sums[kWideWarps];
    float squares[kWideWarps];
};

// Both ops, for a row of which each thread has summed its part; `x` points to the row. A thread reads no columns but
// those that it has read before.
template <bool kAligned, class T, class Op>
__device__ void normalize_wide_row(const Op& op, const T* x, float thread_sum, int row) {
    const T* __restrict__ weight = op.weight.template as<T>();
    const T* __restrict__ bias = op.bias.template as<T>();
    WideShared& s = shared_memory<WideShared>();
    constexpr int kStep = kWideThreads * kPackSize<T>;
    const int cols = op.cols, first = int(threadIdx.x) * kPackSize<T>;

    const float mean = block_sum(thread_sum, s.sums) / float(cols);
    float squares = 0;
    for (int col = first; col < cols; col += kStep)
        squares += pack_squares(load_pack<kAligned>(x + col, cols - col), mean, cols - col);
    const float rstd = rstd_of(block_sum(squares, s.squares), cols, op.eps);

    T* out = op.out.template as<T>() + size_t(row) * cols;
    for (int col = first; col < cols; col += kStep) {
        const int available = cols - col;
        store_pack<kAligned>(
            out + col,
            normalized(load_pack<kAligned>(x + col, available), load_pack<kAligned>(weight + col, available),
                       load_pack<kAligned>(bias + col, available), mean, rstd),
            available);
    }
    if (threadIdx.x == 0) {
        op.mean[row] = mean;
        op.rstd[row] = rstd;
    }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kWideThreads) norm_forward_wide_kernel(NormForward op) {
    const int row = int(blockIdx.x), cols = op.cols;
    const T* __restrict__ x = op.inp.as<T>() + size_t(row) * cols;
    float sum = 0;
    for (int col = int(threadIdx.x) * kPackSize<T>; col < cols; col += kWideThreads * kPackSize<T>)
        sum += pack_sum(load_pack<kAligned>(x + col, cols - col));
    normalize_wide_row<kAligned>(op, x, sum, row);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kWideThreads) residual_norm_forward_wide_kernel(ResidualNormForward op) {
    const int row = int(blockIdx.x), cols = op.cols;
    const T* __restrict__ inp = op.inp.as<T>() + size_t(row) * cols;
    const T* __restrict__ branch = op.branch.as<T>() + size_t(row) * cols;
    T* residual = op.residual.as<T>() + size_t(row) * cols;
    float sum = 0;
    for (int col = int(threadIdx.x) * kPackSize<T>; col < cols; col += kWideThreads * kPackSize<T>) {
        const Pack<T> x =
            sum_of(load_pack<kAligned>(inp + col, cols - col), load_pack<kAligned>(branch + col, cols - col));
        store_pack<kAligned>(residual + col, x, cols - col);
        sum += pack_sum(x);
    }
    normalize_wide_row<kAligned>(op, static_cast<const T*>(residual), sum, row);
}

// ---- launchers ------------------------------------------------------------------------------------------------------

template <class Op> using Kernel = void (*)(Op);

// The smallest of the instances in which the row fits; rows that are moved element by element need no choice.
template <class Op> struct Kernels { Kernel<Op> cols_768, cols_1024, cols_2048, unaligned, wide, wide_unaligned; };

template <class Op>
void launch_by_rows(const char* name, const Kernels<Op>& kernels, bool aligned, const Op& op, Stream stream) {
    require(op.cols > 0, "%s: cols must be positive, is %d", name, op.cols);
    if (op.rows <= 0) return;
    if (op.cols > kMaxRegisterCols) {
        launch(aligned ? kernels.wide : kernels.wide_unaligned,
               {.name = name,
                .blocks = blocks_for(size_t(op.rows), 1),
                .threads = kWideThreads,
                .shared_bytes = sizeof(WideShared)},
               stream, op);
        return;
    }
    const Kernel<Op> kernel = !aligned          ? kernels.unaligned
                              : op.cols <= 768  ? kernels.cols_768
                              : op.cols <= 1024 ? kernels.cols_1024
                                                : kernels.cols_2048;
    launch(kernel, {.name = name, .blocks = blocks_for(size_t(op.rows), kRowsPerBlock), .threads = kThreads}, stream,
           op);
}

}  // namespace

void norm_forward(const NormForward& op, Stream stream) {
    dispatch("norm_forward", {op.out, op.inp, op.weight, op.bias}, [&]<class T>() {
        static constexpr Kernels<NormForward> kKernels = {
            norm_forward_kernel<T, packs_for<T>(768), true>,
            norm_forward_kernel<T, packs_for<T>(1024), true>,
            norm_forward_kernel<T, packs_for<T>(2048), true>,
            norm_forward_kernel<T, packs_for<T>(2048), false>,
            norm_forward_wide_kernel<T, true>,
            norm_forward_wide_kernel<T, false>,
        };
        const bool aligned = op.cols % kPackSize<T> == 0 && are_aligned(16, {op.out, op.inp, op.weight, op.bias});
        launch_by_rows("norm_forward", kKernels, aligned, op, stream);
    });
}

void residual_norm_forward(const ResidualNormForward& op, Stream stream) {
    dispatch("residual_norm_forward", {op.residual, op.out, op.inp, op.branch, op.weight, op.bias}, [&]<class T>() {
        static constexpr Kernels<ResidualNormForward> kKernels = {
            residual_norm_forward_kernel<T, packs_for<T>(768), true>,
            residual_norm_forward_kernel<T, packs_for<T>(1024), true>,
            residual_norm_forward_kernel<T, packs_for<T>(2048), true>,
            residual_norm_forward_kernel<T, packs_for<T>(2048), false>,
            residual_norm_forward_wide_kernel<T, true>,
            residual_norm_forward_wide_kernel<T, false>,
        };
        const bool aligned = op.cols % kPackSize<T> == 0 &&
                             are_aligned(16, {op.residual, op.out, op.inp, op.branch, op.weight, op.bias});
        launch_by_rows("residual_norm_forward", kKernels, aligned, op, stream);
    });
}

}  // namespace ops
